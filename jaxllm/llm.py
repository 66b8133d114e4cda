"""`LLM`: offline generation in the caller's own process and thread."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from jaxllm.build import build_engine
from jaxllm.checkpoint.loader import place_params
from jaxllm.engine.engine import EngineStats
from jaxllm.outputs import RequestOutput
from jaxllm.prompts import parse_each, parse_params, parse_prompts
from jaxllm.sampling_params import SamplingParams

Prompts = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]


class LLM:
    """A model ready to generate. Not thread-safe; `AsyncLLM` is for concurrent callers.

    `model` is a local directory in Hugging Face format (None: the small model in the package), a Flax module of
    `jaxllm.models`, or a pair (configuration, parameter pytree); parameters on the device are used where they lie.
    `tokenizer` overrides the directory's: a directory, a `tokenizers` or `transformers` tokenizer, or any object with
    `encode` and `decode`. `dtype="auto"` is float32 on a CPU and bfloat16 elsewhere. `max_model_len` (tokens of prompt
    and output), `max_num_seqs` (running at once), `max_num_batched_tokens` (a step's), `block_size` (tokens) and
    `num_blocks` are sized from the model and the device when None. `mesh` is "tensor=4", a `jax.sharding.Mesh`, or
    None for one device. `seed` is for requests that bring none.

    Raises `ValueError`, `ModelFormatError`, `MeshError` or `OutOfMemoryError`, each with what to do about it.
    """

    def __init__(
        self,
        model: str | Path | nnx.Module | tuple[Any, Any] | None = None,
        *,
        tokenizer: Any = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        enable_prefix_caching: bool = True,
        mesh: str | Mesh | None = None,
        seed: int = 0,
    ):
        self.engine = build_engine(
            model, tokenizer=tokenizer, dtype=dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens, block_size=block_size, num_blocks=num_blocks,
            enable_prefix_caching=enable_prefix_caching, mesh=mesh, seed=seed,
        )  # fmt: skip
        self._ids = itertools.count()
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

        `sampling_params` and `priority` (lower runs first) are one for all prompts, or one for each. Raises
        `ValueError` before anything runs if any prompt or parameter is unusable. Interrupted, it aborts what is left.
        """
        results: dict[int, RequestOutput] = {}
        requests = self._requests(prompts, sampling_params, priority)
        with tqdm(total=len(requests), desc="generating", unit="req", disable=None if use_tqdm else True) as bar:
            for index, output in self._run(requests, stream=False):
                results[index] = output
                bar.update()
        return [results[i] for i in range(len(requests))]

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Like `generate`, but yields (prompt index, output so far) whenever a prompt's output has grown.

        Closing the iterator aborts what is left.
        """
        return self._run(self._requests(prompts, sampling_params, priority), stream=True)

    def update_params(self, params: Any) -> None:
        """Replaces the parameters by a pytree of the same structure, shapes and dtypes; running requests go on with
        the new ones from their next token. ValueError names what does not match."""
        runner = self.engine.runner
        self.engine.update_params(place_params(params, runner.abstract_params, runner.mesh))

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def wait_compiled(self) -> None:
        """Blocks until every executable is compiled: before a benchmark, say."""
        self.engine.wait_compiled()

    def _wait_first(self) -> None:
        with tqdm(total=self.stats().num_executables, desc="compiling", unit="step", disable=None, leave=False) as bar:
            self.engine.wait_compiled(lambda: bar.update(self.stats().num_compiled - bar.n), first=True)

    def close(self) -> None:
        """Frees the device's memory and stops compiling."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests(self, prompts: Any, params: Any, priority: Any) -> list[tuple]:
        """(request id, prompt, params, priority) of each prompt, all found valid."""
        parsed = parse_prompts(prompts, self.tokenizer)
        each = zip(
            parsed, parse_params(params, len(parsed)), parse_each("priority", priority, int, len(parsed)), strict=True
        )
        requests = [(str(next(self._ids)), *fields) for fields in each]
        for _, prompt, sampling, _ in requests:
            self.engine.validate(prompt.token_ids, sampling)
        return requests

    def _run(self, requests: list[tuple], *, stream: bool) -> Iterator[tuple[int, RequestOutput]]:
        index = {request_id: i for i, (request_id, *_) in enumerate(requests)}
        try:
            for request_id, prompt, sampling, priority in requests:
                self.engine.add(
                    prompt.token_ids, sampling,
                    request_id=request_id, prompt=prompt.text, priority=priority, stream=stream,
                )  # fmt: skip
            unfinished = set(index)
            while unfinished:
                for output in self.engine.step():
                    if output.finished:
                        unfinished.discard(output.request_id)
                    yield index[output.request_id], output
        finally:
            for request_id in index:
                self.engine.abort(request_id)
