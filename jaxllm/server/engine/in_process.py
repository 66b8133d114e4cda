"""The engine in a thread of this process: `AsyncLLM` as an `EngineClient`."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from jaxllm.async_llm import AsyncLLM
from jaxllm.engine.mailbox import Mailbox
from jaxllm.engine.stats import EngineStats
from jaxllm.errors import RequestEndedError
from jaxllm.outputs import RequestOutput
from jaxllm.pooling_outputs import PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.engine.client import EngineCommand, EngineInfo, Health


class InProcessClient:
    """For servers inside a training script, and for tests: `model` and `options` are `AsyncLLM`'s, or it is one."""

    def __init__(self, model: Any = None, **options: Any):
        self._model, self._options = model, options
        self._owns = not isinstance(model, AsyncLLM)
        self._llm: AsyncLLM | None = None if self._owns else model
        self._mailboxes: dict[str, Mailbox] = {}

    @property
    def info(self) -> EngineInfo | None:
        llm = self._llm
        return None if llm is None else EngineInfo.of(llm.config, llm.vocab, llm.pooler)

    @property
    def _started(self) -> AsyncLLM:
        assert self._llm is not None, "start() comes first"
        return self._llm

    async def start(self) -> None:
        if self._llm is None:
            self._llm = await asyncio.to_thread(AsyncLLM, self._model, **self._options)

    async def generate(
        self, token_ids: list[int], params: SamplingParams, *, request_id: str, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        mailbox = self._mailboxes[request_id] = Mailbox(is_delta=True)
        try:
            self._started.add(token_ids, params, receiver=mailbox, request_id=request_id, priority=priority, lean=True)
            while not mailbox.is_finished:
                yield await mailbox.get()
        finally:
            self._mailboxes.pop(request_id, None)
            self._started.drop(request_id, mailbox)

    async def pool(
        self, token_ids: list[int], params: PoolingParams, *, request_id: str, priority: int = 0
    ) -> PoolingRequestOutput:
        mailbox = self._mailboxes[request_id] = Mailbox(is_delta=False)
        try:
            self._started.add(token_ids, params, receiver=mailbox, request_id=request_id, priority=priority, lean=True)
            return await mailbox.get()
        finally:
            self._mailboxes.pop(request_id, None)
            self._started.drop(request_id, mailbox)

    def abort(self, request_id: str) -> None:
        self._started.abort(request_id)

    def abort_all(self) -> None:
        for request_id in list(self._mailboxes):
            self.abort(request_id)

    async def command(self, command: EngineCommand) -> bool:
        llm = self._started
        match command.name:
            case "sleep":
                await llm.sleep(command.level)
            case "wake_up":
                await llm.wake_up(command.tags)
            case "reset_prefix_cache":
                await llm.reset_prefix_cache()
        return await llm.is_sleeping()

    def fail_all(self, reason: str) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.put(RequestEndedError(reason))

    def stats(self) -> EngineStats | None:
        return None if self._llm is None else self._llm.stats()

    def health(self) -> Health:
        llm = self._llm
        return Health(True, 0.0) if llm is None else Health(llm.is_alive, llm.silent_s, llm.patience_s)

    async def close(self) -> None:
        if self._llm is not None and self._owns:
            await asyncio.to_thread(self._llm.close)
