"""What is asked of an `LLM` in the place of text: embeddings, classes and scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack, overload

from jaxllm.engine.prepare import PreparedRequest
from jaxllm.from_vllm.request_arguments import POOLING_ARGUMENTS, VllmPoolingArguments, check_request_arguments
from jaxllm.llm_scores import LLMScores
from jaxllm.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    cosine,
)
from jaxllm.pooling_params import PoolingParams
from jaxllm.progress import progress_bar
from jaxllm.score_outputs import ContinuationScore
from jaxllm.text.prompts import pair_texts, parse_each, parse_prompts

Prompts = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any] | Sequence[int] | int]
PoolingParamsLike = PoolingParams | Sequence[PoolingParams] | None


class LLMPooling(LLMScores):
    """An engine that makes more of prompts than text."""

    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingParamsLike = None,
        *,
        pooling_task: str | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool | Callable[..., Any] = True,
        **vllm: Unpack[VllmPoolingArguments],
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the model makes of each prompt, float32 `[width]`, in the prompts' order.

        Prompts, `priority` and `use_tqdm` are as in `generate`; `pooling_params` and `pooling_task` ("embed" or
        "classify") are one for all, None being the model's. Raises `ValueError` before anything runs if a prompt or
        parameter is unusable, or if the model does not do that task. A prompt that fails has an output with `error`.
        """
        check_request_arguments("encode", vllm, POOLING_ARGUMENTS)
        requests = self._pooling_requests(prompts, pooling_params, pooling_task, priority)
        return self._pool(requests, use_tqdm)

    def embed(
        self,
        prompts: Prompts,
        *,
        pooling_params: PoolingParamsLike = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool | Callable[..., Any] = True,
        **vllm: Unpack[VllmPoolingArguments],
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt: `outputs.data`, float32 `[hidden_size]`, or `outputs.embedding`, a list.

        How it is pooled and whether it has unit length is what the model's files say (modules.json); without any it is
        the last token's hidden state, of unit length. Nothing is put before a prompt: instructions, as many models
        want them for queries, are the caller's. Else as `encode`.
        """
        check_request_arguments("embed", vllm, POOLING_ARGUMENTS)
        found = self._pool(self._pooling_requests(prompts, pooling_params, "embed", priority), use_tqdm)
        return [_with(output, lambda made: EmbeddingOutput(data=made.data)) for output in found]

    def classify(
        self,
        prompts: Prompts,
        *,
        pooling_params: PoolingParamsLike = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool | Callable[..., Any] = True,
        **vllm: Unpack[VllmPoolingArguments],
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of each prompt's classes, in the order of the model's labels. Else as `encode`."""
        check_request_arguments("classify", vllm, POOLING_ARGUMENTS)
        found = self._pool(self._pooling_requests(prompts, pooling_params, "classify", priority), use_tqdm)
        return [_with(output, lambda made: ClassificationOutput(data=made.data)) for output in found]

    @overload
    def score(
        self, data_1: Sequence[Any], /, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[list[ContinuationScore]]: ...

    @overload
    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **vllm: Unpack[VllmPoolingArguments],
    ) -> list[ScoringRequestOutput]: ...

    def score(
        self,
        data_1: Any,
        data_2: str | Sequence[str] | None = None,
        /,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **vllm: Unpack[VllmPoolingArguments],
    ) -> Any:
        """How well texts go together: one with each of the others, or each with its counterpart.

        A model with one class reads both texts at once, and the score is what it makes of them; of other models it is
        the cosine of the two embeddings. ValueError as of `encode`, and for lists of different lengths.

        Alone, `data_1` is a list of `(context, [continuation, ...])`, and the result that of `loglikelihood`.
        """
        if data_2 is None:
            return self.loglikelihood(data_1, use_tqdm=use_tqdm)
        check_request_arguments("score", vllm, POOLING_ARGUMENTS)
        first, second = pair_texts(data_1, data_2)
        pooler = self.engine.intake.pooler
        if pooler.task == "embed":
            texts = list(dict.fromkeys([*first, *second]))
            params = pooling_params or PoolingParams()
            found = self._pool(self._pooling_requests(texts, params, "embed", 0), use_tqdm)
            outputs = dict(zip(texts, found, strict=True))
            return [cosine(outputs[a], outputs[b]) for a, b in zip(first, second, strict=True)]
        pooler.check_scores()
        pairs = [self._pair(a, b) for a, b in zip(first, second, strict=True)]
        found = self._pool(self._pooling_requests(pairs, pooling_params, "classify", 0), use_tqdm)
        return [_with(output, lambda made: ScoringOutput(score=float(made.data[0]))) for output in found]

    def _pair(self, first: str, second: str) -> dict[str, Any]:
        if self.tokenizer is None:
            raise ValueError("texts need a tokenizer; pass tokenizer=...")
        first, second = self._lowercased([first, second])
        return {"prompt_token_ids": self.tokenizer.encode_pair(first, second, self.engine.config.max_model_len)}

    def _lowercased(self, prompts: Any) -> Any:
        """Texts as the model's tokenizer wants them; other prompts as they are."""
        if not self.engine.intake.pooler.config.lowercase:
            return prompts
        if isinstance(prompts, str):
            return prompts.lower()
        if isinstance(prompts, Mapping):
            return (
                {**prompts, "prompt": prompts["prompt"].lower()} if isinstance(prompts.get("prompt"), str) else prompts
            )
        return [self._lowercased(one) for one in prompts] if isinstance(prompts, list | tuple) else prompts

    def _pooling_requests(
        self, prompts: Any, params: PoolingParamsLike, task: str | None, priority: Any
    ) -> list[tuple[PreparedRequest, int]]:
        parsed = parse_prompts(self._lowercased(prompts), self.tokenizer)
        given = PoolingParams(task=task) if params is None else params
        each = parse_each("pooling_params", given, PoolingParams, len(parsed))
        priorities = parse_each("priority", priority, int, len(parsed))
        return [
            (self._prepare_pooling(prompt, one, task), order)
            for prompt, one, order in zip(parsed, each, priorities, strict=True)
        ]

    def _prepare_pooling(self, prompt: Any, params: PoolingParams, task: str | None) -> PreparedRequest:
        if task is not None and params.task not in (None, task):
            raise ValueError(f"pooling_params.task={params.task!r} is not {task!r}; leave it out")
        params = replace(params, task=task or params.task, cache_salt=prompt.cache_salt or params.cache_salt)
        return self.engine.prepare(prompt.token_ids, params, prompt=prompt.text)

    def _pool(
        self, requests: list[tuple[PreparedRequest, int]], use_tqdm: bool | Callable[..., Any]
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        results: dict[int, Any] = {}
        with progress_bar(use_tqdm, len(requests), "pooling") as bar:
            for index, output in self._run(requests):
                results[index] = output
                bar.update()
        return [results[i] for i in range(len(requests))]


def _with(output: PoolingRequestOutput[PoolingOutput], make: Callable[[PoolingOutput], Any]) -> Any:
    """The same output with another view of what was made."""
    return output if output.outputs is None else replace(output, outputs=make(output.outputs))
