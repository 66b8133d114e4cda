"""lm-evaluation-harness over an `LLM`: the model "jaxllm" of its registry, from when this module is imported.

`python -m jaxllm.integrations.lm_eval run --model jaxllm ...` is its command line with that model in it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
except ImportError as error:
    raise ImportError(
        f"lm-evaluation-harness is not there ({error}); pip install 'jaxllm[lm-eval]', or 'lm_eval>=0.4.9'"
    ) from error

from jaxllm.errors import EngineError
from jaxllm.llm import LLM
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.continuations import encode_text, prefix_token
from jaxllm.text.prompts import TokensPrompt

MAX_GEN_TOKS = 256  # of a task that does not say

Pair = tuple[Any, list[int], list[int]]  # what the harness calls it, a context and its continuation


@register_model("jaxllm")
class JaxLLM(TemplateLM):
    """An `LLM` that is there, or one that is made of `pretrained` and the other arguments of `LLM`:

        lm_eval.simple_evaluate(model=JaxLLM(llm), tasks=["arc_easy"])
        lm_eval.simple_evaluate(model="jaxllm", model_args={"pretrained": "Qwen/Qwen3-0.6B"}, tasks=["arc_easy"])

    Numbers are those of its Hugging Face back end. The engine makes its own batches: `batch_size`, `max_batch_size` and
    `device`, which the harness passes, have no effect here.
    """

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        pretrained: Any = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
        **options: Any,
    ):
        super().__init__()
        if llm is not None and (pretrained is not None or options):
            raise ValueError(f"an LLM is given, and {['pretrained', *options]} are for making one; leave them out")
        self.llm = LLM(pretrained, **options) if llm is None else llm
        self.tokenizer = self.llm.tokenizer
        if self.tokenizer is None:
            raise ValueError("tasks are texts, and the LLM has no tokenizer; pass tokenizer=...")

    @property
    def max_length(self) -> int:
        """Tokens that the model reads."""
        return self.llm.engine.config.max_model_len

    @property
    def max_gen_toks(self) -> int:
        return MAX_GEN_TOKS

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return prefix_token(self.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        return self.llm.model_config.model.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results."""
        return {"model_dtype": str(self.llm.model_config.dtype), "max_length": self.max_length}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            return encode_text(string, self.tokenizer)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Pairs with the same context are scored together. Of one that is too long the context loses its beginning."""
        together: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            together.setdefault(self._fitting(context, continuation), []).append(i)
        contexts = [(context, [requests[i][2] for i in indices]) for context, indices in together.items()]
        found: dict[int, tuple[float, bool]] = {}
        for indices, scores in zip(
            together.values(), self.llm.loglikelihood(contexts, use_tqdm=not disable_tqdm), strict=True
        ):
            for i, score in zip(indices, scores, strict=True):
                found[i] = score.logprob, score.is_greedy
                self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
        return [found[i] for i in range(len(requests))]

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[int, ...]:
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens is longer than max_model_len={self.max_length}; raise it"
            )
        return tuple(context[-room:])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        texts = [request.args[0] for request in requests]
        scores = iter(self.llm.perplexity([text for text in texts if text], use_tqdm=not disable_tqdm))
        found = [next(scores).logprob if text else 0.0 for text in texts]
        for text, logprob in zip(texts, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), logprob)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy unless a task says otherwise, up to the first of its stop strings, which is left out. What else a task
        does not say is as the LLM's default sampling parameters have it. A prompt that is too long loses its
        beginning."""
        asked = [self._generation(*request.args) for request in requests]
        prompts, params = [one[0] for one in asked], [one[1] for one in asked]
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        found = []
        for request, output, (_, _, stops) in zip(requests, outputs, asked, strict=True):
            if output.error:
                raise EngineError(f"generating failed: {output.error}")
            found.append(postprocess_generated_text(output.outputs[0].text, stops, None))
            self.cache_hook.add_partial("generate_until", request.args, found[-1])
        return found

    def _generation(self, text: str, wanted: dict[str, Any]) -> tuple[TokensPrompt, SamplingParams, list[str]]:
        """What is generated from, how, and what it stops at."""
        given: dict[str, Any] = {"temperature": 0.0, **normalize_gen_kwargs(wanted, self.max_gen_toks)}
        given = self._recommended(is_greedy=given["temperature"] == 0) | given
        until, max_tokens = [stop for stop in given.pop("until") if stop], given.pop("max_gen_toks")
        given.pop("do_sample")  # the temperature says it
        if not 0 < max_tokens < self.max_length:
            raise ValueError(
                f"max_gen_toks={max_tokens} leaves no room for a prompt in max_model_len={self.max_length}"
            )
        prompt: TokensPrompt = {"prompt_token_ids": self.tok_encode(text)[-(self.max_length - max_tokens) :]}
        return prompt, SamplingParams(max_tokens=max_tokens, **self._stopping(until), **given), until

    def _recommended(self, *, is_greedy: bool) -> dict[str, Any]:
        """What the model's generation_config.json says, which transformers' `generate` takes where it is told nothing
        else: of a greedy text the repetition penalty, as it filters no tokens there."""
        own = self.llm.get_default_sampling_params()
        names = ("repetition_penalty",) if is_greedy else ("repetition_penalty", "top_p", "top_k", "min_p")
        return {name: getattr(own, name) for name in names}

    def _stopping(self, stops: Iterable[str]) -> dict[str, Any]:
        """Special tokens stop by their ids: they have no text in the output."""
        ids = {stop: self.tokenizer.special_id(stop) for stop in stops}
        return {
            "stop": [stop for stop, token in ids.items() if token is None],
            "stop_token_ids": [token for token in ids.values() if token is not None],
        }

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.chat.render(
            chat_history, add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source, by which the harness names results."""
        if chat_template is False or chat_template is None:
            return None
        return self.tokenizer.chat.source(None if chat_template is True else chat_template)


if __name__ == "__main__":
    cli_evaluate()
