"""The engine in a thread of this process: `AsyncLLM` as an `EngineClient`."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from jaxllm.async_llm import AsyncLLM
from jaxllm.engine.stats import EngineStats
from jaxllm.errors import EngineDeadError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.engine.client import EngineInfo, Health, Mailbox


class InProcessClient:
    """For servers inside a training script, and for tests: `model` and `options` are `AsyncLLM`'s, or it is one."""

    def __init__(self, model: Any = None, **options: Any):
        self._model, self._options = model, options
        self._owns = not isinstance(model, AsyncLLM)
        self._llm: AsyncLLM | None = None if self._owns else model
        self._streams: dict[str, Mailbox] = {}

    @property
    def info(self) -> EngineInfo | None:
        return None if self._llm is None else EngineInfo(self._llm.config, self._llm.vocab)

    async def start(self) -> None:
        if self._llm is None:
            self._llm = await asyncio.to_thread(AsyncLLM, self._model, **self._options)

    async def generate(
        self, token_ids: list[int], params: SamplingParams, *, request_id: str, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        mailbox = self._streams[request_id] = Mailbox()
        pump = asyncio.create_task(self._pump(mailbox, token_ids, params, request_id, priority))
        try:
            finished = False
            while not finished:
                output = await mailbox.get()
                finished = output.finished
                yield output
        finally:
            self._streams.pop(request_id, None)
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def _pump(
        self, mailbox: Mailbox, token_ids: list[int], params: SamplingParams, request_id: str, priority: int
    ) -> None:
        """Between the engine's stream and ours, which can be failed from outside."""
        is_first = True
        prompt = {"prompt_token_ids": token_ids}
        stream = self._llm.generate(prompt, params, request_id, priority=priority)
        try:
            async for output in stream:
                scores = output.prompt_logprobs if is_first else None
                is_first = is_first and output.prompt_logprobs is None
                mailbox.put(dataclasses.replace(output, prompt=None, prompt_token_ids=[], prompt_logprobs=scores))
        except (ValueError, EngineDeadError) as error:
            mailbox.fail(error)
        finally:
            await stream.aclose()

    def abort(self, request_id: str) -> None:
        self._llm.abort(request_id)

    def fail_all(self, reason: str) -> None:
        for mailbox in self._streams.values():
            mailbox.fail(EngineDeadError(reason))

    def stats(self) -> EngineStats | None:
        return None if self._llm is None else self._llm.stats()

    def health(self) -> Health:
        if self._llm is None:
            return Health(True, 0.0)
        return Health(self._llm.is_alive, self._llm.silent_s)

    async def close(self) -> None:
        if self._llm is not None and self._owns:
            await asyncio.to_thread(self._llm.close)
