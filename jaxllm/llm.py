"""`LLM`: offline generation in the caller's own process and thread."""

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax
from tqdm import tqdm

from jaxllm.base_llm import BaseLLM
from jaxllm.checkpoint.placement import canonical_params, place_params
from jaxllm.engine.caller import CallerLoop, Inbox
from jaxllm.engine.engine import Engine
from jaxllm.engine.prepare import PreparedRequest
from jaxllm.errors import EngineAsleepError, EngineError
from jaxllm.from_vllm.request_arguments import (
    CHAT_ARGUMENTS,
    GENERATE_ARGUMENTS,
    VllmChatArguments,
    VllmGenerateArguments,
    check_request_arguments,
)
from jaxllm.llm_engine import LLMEngine
from jaxllm.models.transformer import Params
from jaxllm.outputs import BeamSearchOutput, RequestOutput
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from jaxllm.text.prompts import (
    TokensPrompt,
    is_conversation,
    parse_each,
    parse_params,
    parse_prompt,
    parse_prompts,
    with_salt,
)

Prompts = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any] | Sequence[int] | int]
_AHEAD = 4  # times max_num_seqs: requests that wait in the engine, so that a step never lacks some


class LLM(BaseLLM):
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

    def _start(self) -> None:
        self._ids = itertools.count()
        self._loop = CallerLoop(self.engine)
        self._queue = LLMEngine(self)  # of `enqueue`
        self._queued: list[str] = []
        try:
            self._wait_first()
        except BaseException:  # Ctrl-C too: compiling goes on in a thread otherwise
            self.close()
            raise

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def llm_engine(self) -> LLMEngine:
        """The same engine with vLLM's interface for those who step it themselves."""
        return LLMEngine(self)

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool | Callable[..., Any] = True,
        **vllm: Unpack[VllmGenerateArguments],
    ) -> list[RequestOutput]:
        """Completes all prompts; one output each, in their order.

        A prompt is a string, a list of token ids, `{"prompt": str}` or `{"prompt_token_ids": [...]}`; a dict may have a
        `cache_salt`. `use_tqdm` may be what makes the progress bar, as `tqdm.tqdm` does.
        `sampling_params` (None: what the model recommends) and `priority` (lower runs first) are one for all prompts,
        or one for each. Raises `ValueError` before anything runs if any prompt or parameter is unusable. Interrupted,
        it aborts what is left.

        A prompt whose steps fail on the device has an output with finish_reason "error", whose `error` names the
        cause, and the others go on. `EngineError` is raised if all prompts end so, as every step fails: when a training
        step was given the parameters to donate, say, and `update_params` is called for.
        """
        check_request_arguments("generate", vllm, GENERATE_ARGUMENTS)
        results: dict[int, RequestOutput] = {}
        requests = self._requests(prompts, sampling_params, priority)
        with _progress_bar(use_tqdm, len(requests)) as bar:
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
        use_tqdm: bool | Callable[..., Any] = True,
        **vllm: Unpack[VllmChatArguments],
    ) -> list[RequestOutput]:
        """Answers a conversation, `[{"role": "user", "content": "Hi"}]`, or each of a list of conversations.

        `chat_template` is None for the model's own, the name of one of its own, "vicuna" or "llama2", a file, or Jinja
        source. `continue_final_message` goes on with the last message, and needs `add_generation_prompt=False`.
        `tools` (JSON schemas) and `chat_template_kwargs` are for the template. The rest is as in `generate`.
        """
        check_request_arguments("chat", vllm, CHAT_ARGUMENTS)
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

    def enqueue(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[str]:
        """Hands requests over, and returns their ids; they run while something waits for outputs, and
        `wait_for_completion` returns theirs. Arguments and errors are as of `generate`."""
        requests = self._requests(prompts, sampling_params, priority)
        ids = [str(next(self._ids)) for _ in requests]
        for request_id, (prepared, one) in zip(ids, requests, strict=True):
            self._queue.submit(request_id, prepared, priority=one, stream=False)
        self._queued += ids
        return ids

    def wait_for_completion(self, *, use_tqdm: bool | Callable[..., Any] = True) -> list[RequestOutput]:
        """The outputs of all that was enqueued, in that order."""
        ids, self._queued = self._queued, []
        done: dict[str, RequestOutput] = {}
        with _progress_bar(use_tqdm, len(ids)) as bar:
            while self._queue.has_unfinished_requests():
                for output in self._queue.step():
                    done[output.request_id] = output
                    bar.update()
        return [done[request_id] for request_id in ids]

    def reset_prefix_cache(self) -> bool:
        """Drops the prefix cache; True, as in vLLM where that has worked."""
        with self._loop.between_steps():
            self.engine.scheduler.pool.forget_keys()
        return True

    def sleep(self, level: int = 1) -> None:
        """Gives the device's memory away until `wake_up`: of the parameters, which level 1 keeps in host memory and
        level 2 drops, and of the KV pool, whose contents are lost with the prefix cache.

        After level 2, `update_params` must give new parameters before the next request. Requests made meanwhile raise
        `EngineAsleepError`. ValueError while requests run.
        """
        with self._loop.between_steps():
            self.engine.sleep(level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Takes back what `sleep` gave away: "weights", "kv_cache", or both (None)."""
        with self._loop.between_steps():
            self.engine.wake_up(tags)

    def start_profile(self, directory: str | Path | None = None) -> None:
        """Traces what the device does from now on, into `directory` (None: the environment variable JAXLLM_PROFILE_DIR,
        or vLLM's VLLM_TORCH_PROFILER_DIR), for XProf or Perfetto. ValueError if there is none."""
        variables = ("JAXLLM_PROFILE_DIR", "VLLM_TORCH_PROFILER_DIR")
        directory = directory or next(filter(None, map(os.environ.get, variables)), None)
        if directory is None:
            raise ValueError(f"start_profile needs a directory: give one, or set {variables[0]}")
        jax.profiler.start_trace(str(directory))

    def stop_profile(self) -> None:
        """Writes what was traced."""
        jax.profiler.stop_trace()

    @property
    def params(self) -> Params:
        """The parameters that are served, an `nnx.State` that `update_params` takes: canonical ones, whatever the mesh
        makes of them, and without a copy where it makes nothing of them."""
        executor = self.engine.runner.executor
        if not executor.leaves:
            raise EngineAsleepError(
                "the parameters are not on the device while the engine sleeps; call wake_up() first"
            )
        treedef = jax.tree.structure(executor.abstract_params)
        return canonical_params(jax.tree.unflatten(treedef, executor.leaves), executor.mesh)

    def update_params(self, params: Any) -> None:
        """Replaces the parameters by a pytree of the same structure, shapes and dtypes; running requests go on with
        the new ones from their next token. ValueError names what does not match."""
        runner = self.engine.runner
        placed = place_params(params, runner.executor.abstract_params, runner.executor.mesh)
        with self._loop.between_steps():
            self.engine.update_params(placed)

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
            (self.engine.prepare(prompt.token_ids, with_salt(sampling, prompt.cache_salt), prompt=prompt.text), one)
            for prompt, sampling, one in each
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
        text, token_ids, salt = parse_prompt(prompt, self.tokenizer)
        params = self.get_default_sampling_params() if params is None else params
        return self.engine.prepare(token_ids, with_salt(params, salt), prompt=text)


def _refusal(request_id: str, prompt: Any, error: ValueError) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, Mapping) else None
    return RequestOutput(
        request_id=request_id, prompt=text, prompt_token_ids=[], outputs=[], finished=True, error=str(error)
    )


def _progress_bar(wanted: bool | Callable[..., Any], total: int) -> Any:
    """As `wanted` makes it; or ours, which is none if it is False."""
    if callable(wanted):
        return wanted(total=total, desc="generating", unit="req")
    return tqdm(total=total, desc="generating", unit="req", disable=None if wanted else True)
