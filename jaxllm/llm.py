"""`LLM`: offline generation in the caller's own process and thread."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.generation_config import default_sampling_params
from jaxllm.checkpoint.placement import canonical_params, place_params
from jaxllm.default_model import DEFAULT_MODEL
from jaxllm.engine.build import build_engine
from jaxllm.engine.caller import CallerLoop, Inbox
from jaxllm.engine.prepare import PreparedRequest
from jaxllm.engine.stats import EngineStats
from jaxllm.errors import EngineError
from jaxllm.hub.locate import locate
from jaxllm.models.transformer import Params
from jaxllm.outputs import BeamSearchOutput, RequestOutput
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from jaxllm.text.prompts import TokensPrompt, is_conversation, parse_each, parse_params, parse_prompt, parse_prompts

Prompts = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any] | Sequence[int] | int]
_AHEAD = 4  # times max_num_seqs: requests that wait in the engine, so that a step never lacks some


class LLM:
    """A model ready to generate, in the caller's thread. Streams of one `LLM` may be read in turns, and threads that
    share it take turns with the steps; `AsyncLLM` is for many concurrent callers.

    Ctrl-C takes effect between two steps, a second one at once: that loses the requests that run, and no more.

    `model` is a local directory in Hugging Face format (None: the small model in the package), a GGUF file or a
    directory with one, a name of the hub as "org/name", "org/name@revision" or "org/name:FILE.gguf" (fetched into
    huggingface_hub's cache, or `download_dir`; `revision` is another way to give that), a Flax module with the
    interface of `jaxllm.models` (served as it is, its class and attributes included), or a pair (configuration,
    parameter pytree); parameters on the device are used where they lie. `tokenizer` overrides the model's: a directory,
    a GGUF file, a `tokenizers` or `transformers` tokenizer, or any object with `encode` and `decode`. `dtype="auto"` is
    float32 on a CPU and bfloat16 elsewhere. `max_model_len` (tokens of prompt and output), `max_num_seqs` (running at
    once), `max_num_batched_tokens` (a step's), `block_size` (tokens) and `num_blocks` are sized from the model and the
    device when None. `mesh` is "tensor=4" (as is `tensor_parallel_size=4`), a `jax.sharding.Mesh`, or None for one
    device. `gpu_memory_utilization` (0.92) is the share of each accelerator's whole memory that this process may use:
    what its other arrays take is left to them, and JAX allocates no more than XLA_CLIENT_MEM_FRACTION (0.75 of a GPU
    unless set). When blocks run out, `preemption` of the last requests is by "swap" to at most `swap_space` GiB of host
    memory, or by "recompute"; "auto" measures which is faster. `seed` is for requests that bring none. `record` names a
    new file for what the engine asks of the device, prompts included: `jaxllm replay FILE` does it again, for bug
    reports.

    Raises `ValueError`, `ModelFormatError`, `MeshError` or `OutOfMemoryError`, and for names `ModelNotFoundError`,
    `ModelAccessError` or `DownloadError`, each with what to do about it.
    """

    def __init__(
        self,
        model: str | Path | nnx.Module | tuple[Any, Any] | None = None,
        *,
        revision: str | None = None,
        download_dir: str | Path | None = None,
        tokenizer: Any = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        enable_prefix_caching: bool = True,
        mesh: str | Mesh | None = None,
        tensor_parallel_size: int | None = None,
        gpu_memory_utilization: float | None = None,
        preemption: str = "auto",
        swap_space: float | None = None,
        seed: int = 0,
        record: str | Path | None = None,
    ):
        model = locate(model, revision=revision, download_dir=download_dir, tokenizer=tokenizer is None)
        self.engine = build_engine(
            model,
            tokenizer=tokenizer,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            mesh=mesh,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            preemption=preemption,
            swap_space=swap_space,
            seed=seed,
            record=record,
        )
        path = DEFAULT_MODEL if model is None else model
        self._checkpoint = open_checkpoint(path) if isinstance(path, str | Path) else None
        self._user_tokenizer = tokenizer
        self._ids = itertools.count()
        self._loop = CallerLoop(self.engine)
        try:
            self._wait_first()
        except BaseException:  # Ctrl-C too: compiling goes on in a thread otherwise
            self.close()
            raise

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes all prompts; one output each, in their order.

        A prompt is a string, a list of token ids, `{"prompt": str}` or `{"prompt_token_ids": [...]}`.
        `sampling_params` (None: what the model recommends) and `priority` (lower runs first) are one for all prompts,
        or one for each. Raises `ValueError` before anything runs if any prompt or parameter is unusable. Interrupted,
        it aborts what is left.

        A prompt whose steps fail on the device has an output with finish_reason "error", whose `error` names the
        cause, and the others go on. `EngineError` is raised if all prompts end so, as every step fails: when a training
        step was given the parameters to donate, say, and `update_params` is called for.
        """
        results: dict[int, RequestOutput] = {}
        requests = self._requests(prompts, sampling_params, priority)
        with tqdm(total=len(requests), desc="generating", unit="req", disable=None if use_tqdm else True) as bar:
            for index, output in self._run(requests, stream=False):
                results[index] = output
                bar.update()
        if self.engine.failure is not None and results and all(output.error for output in results.values()):
            raise EngineError(f"every step failed: {results[0].error}") from self.engine.failure
        return [results[i] for i in range(len(requests))]

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Like `generate`, but yields (prompt index, output so far) whenever a prompt's output has grown; once, when it
        has finished, with `beam_width` or a `best_of` above `n`. What fails has an output with `error`.

        Closing the iterator aborts what is left. While it stays open, its requests go on with every other call, and
        their outputs are kept for it: each delta, and of outputs so far the newest.
        """
        return self._run(self._requests(prompts, sampling_params, priority), stream=True)

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best completions that a beam search finds for each prompt, with their prompts before them.

        Short for `generate` with `params.sampling_params`; `SamplingParams` with `beam_width` has more to say (stop
        strings, penalties), returns as few as `n`, and computes log-probabilities only if asked. Raises as `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params is a {type(params).__name__}; expected BeamSearchParams(beam_width, max_tokens)")
        return [
            BeamSearchOutput.of(output, self._prompt_text(output, params), params.length_penalty)
            for output in self.generate(prompts, params.sampling_params, use_tqdm=use_tqdm)
        ]

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | Path | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Any = None,
        chat_template_kwargs: Any = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers a conversation, `[{"role": "user", "content": "Hi"}]`, or each of a list of conversations.

        `chat_template` is None for the model's own, the name of one of its own, "vicuna" or "llama2", a file, or Jinja
        source. `continue_final_message` goes on with the last message, and needs `add_generation_prompt=False`.
        `tools` (JSON schemas) and `chat_template_kwargs` are for the template. The rest is as in `generate`.
        """
        options = dict(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        conversations = [messages] if is_conversation(messages) else messages
        prompts = [self.chat_prompt(conversation, **options) for conversation in conversations]
        return self.generate(prompts, sampling_params, priority=priority, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Any, **options: Any) -> TokensPrompt:
        """The prompt that `chat` makes of one conversation, with the same options; ValueError if it can't."""
        if self.tokenizer is None:
            raise ValueError("a conversation needs a tokenizer; pass tokenizer=...")
        text = self.tokenizer.chat.render(messages, **options)
        # The template has written the beginning of sequence itself.
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    def generate_iter(
        self, requests: Iterable[tuple[Any, SamplingParams | None]]
    ) -> Iterator[list[tuple[int, RequestOutput]]]:
        """Completes any number of (prompt, sampling parameters), drawn from an iterator as the engine has room.

        Yields after each step those that finished in it, possibly none, as (index, output). One that can't be served
        has an output with `error` and without completions, and the others go on. Closing the iterator aborts what is
        left.
        """
        window, drawn = _AHEAD * self.engine.config.max_num_seqs, enumerate(requests)
        running: dict[str, int] = {}  # request id -> index
        inbox = Inbox()
        try:
            while True:
                finished: list[tuple[int, RequestOutput]] = []
                while len(running) + len(finished) < window and (item := next(drawn, None)) is not None:
                    index, (prompt, sampling) = item
                    request_id = str(next(self._ids))
                    try:
                        prepared = self._prepare(prompt, sampling)
                    except ValueError as error:
                        finished.append((index, _refusal(request_id, prompt, error)))
                    else:
                        running[request_id] = index
                        self._loop.submit(prepared, inbox, request_id=request_id)
                if running:
                    finished += [(running.pop(output.request_id), output) for output in self._loop.wait(inbox)]
                elif not finished:
                    return
                yield finished
        finally:
            self._loop.drop(running, inbox)

    def get_tokenizer(self) -> Any:
        """The tokenizer that was passed as an object, or else the model directory's (`jaxllm.text.tokenizer`)."""
        return self.tokenizer if isinstance(self._user_tokenizer, str | Path | None) else self._user_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's files recommend; the defaults for a model that came as an object."""
        return SamplingParams() if self._checkpoint is None else default_sampling_params(self._checkpoint)

    @property
    def params(self) -> Params:
        """The parameters that are served, an `nnx.State` that `update_params` takes: canonical ones, whatever the mesh
        makes of them, and without a copy where it makes nothing of them."""
        executor = self.engine.runner.executor
        treedef = jax.tree.structure(executor.abstract_params)
        return canonical_params(jax.tree.unflatten(treedef, executor.leaves), executor.mesh)

    def update_params(self, params: Any) -> None:
        """Replaces the parameters by a pytree of the same structure, shapes and dtypes; running requests go on with
        the new ones from their next token. ValueError names what does not match."""
        runner = self.engine.runner
        placed = place_params(params, runner.executor.abstract_params, runner.executor.mesh)
        with self._loop.between_steps():
            self.engine.update_params(placed)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def wait_compiled(self) -> None:
        """Blocks until every executable is compiled: before a benchmark, say."""
        self.engine.wait_compiled()

    def _wait_first(self) -> None:
        # Without a total: a few are waited for, and the others follow in the background.
        with tqdm(desc="compiling the first steps", unit=" ready", disable=None, leave=False) as bar:
            self.engine.wait_compiled(lambda: bar.update(self.stats().num_compiled - bar.n), first=True)

    def close(self) -> None:
        """Frees the device's memory and stops compiling."""
        self._loop.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests(self, prompts: Any, params: Any, priority: Any) -> list[tuple[PreparedRequest, int]]:
        """Each prompt's request, checked, and its priority."""
        parsed = parse_prompts(prompts, self.tokenizer)
        params = self.get_default_sampling_params() if params is None else params
        each = zip(
            parsed, parse_params(params, len(parsed)), parse_each("priority", priority, int, len(parsed)), strict=True
        )
        return [
            (self.engine.prepare(prompt.token_ids, sampling, prompt=prompt.text), one) for prompt, sampling, one in each
        ]

    def _run(self, requests: list[tuple[PreparedRequest, int]], *, stream: bool) -> Iterator[tuple[int, RequestOutput]]:
        running: dict[str, int] = {}  # request id -> index
        inbox = Inbox()
        try:
            for index, (prepared, priority) in enumerate(requests):
                request_id = str(next(self._ids))
                running[request_id] = index
                self._loop.submit(prepared, inbox, request_id=request_id, priority=priority, stream=stream)
            while running:
                for output in self._loop.wait(inbox):
                    index = running.pop(output.request_id) if output.finished else running[output.request_id]
                    yield index, output
        finally:
            self._loop.drop(running, inbox)

    def _prompt_text(self, output: RequestOutput, params: BeamSearchParams) -> str | None:
        if self.tokenizer is None:
            return None
        if output.prompt is not None:
            return output.prompt
        return self.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=params.skip_special_tokens)

    def _prepare(self, prompt: Any, params: SamplingParams | None) -> PreparedRequest:
        text, token_ids = parse_prompt(prompt, self.tokenizer)
        params = self.get_default_sampling_params() if params is None else params
        return self.engine.prepare(token_ids, params, prompt=text)


def _refusal(request_id: str, prompt: Any, error: ValueError) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, Mapping) else None
    return RequestOutput(
        request_id=request_id, prompt=text, prompt_token_ids=[], outputs=[], finished=True, error=str(error)
    )
