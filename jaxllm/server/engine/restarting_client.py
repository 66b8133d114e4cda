"""An engine's client that starts another engine when one dies, as one over several hosts does with any of them."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from jaxllm.engine.stats import EngineStats
from jaxllm.errors import EngineDeadError, RequestEndedError
from jaxllm.outputs import RequestOutput
from jaxllm.pooling_outputs import PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.engine.client import EngineCommand, EngineInfo, Health
from jaxllm.server.engine.process_client import ProcessClient

log = logging.getLogger(__name__)

_TICK_S = 0.1
_LATE_S = 1.25  # for which an engine's process may be silent before there is trouble
_UNHEARD_S = 8.0  # after which an engine's process counts as stopped
_MOST_DEATHS, _WITHIN_S = 5, 900.0  # more than that many in that time are no accident
_PAUSE_S = 1.0  # before another start
_MOST_TRIES = 2  # of a request: one that kills the engine does not do so for ever


class RestartingClient:
    """An `EngineClient` over those that `make` makes, one after the other.

    A request that an engine had not begun when it died is served by the next; one that had begun ends with an error.
    """

    def __init__(self, make: Callable[[], ProcessClient]):
        self._make = make
        self._client = make()
        self._deaths: deque[float] = deque(maxlen=_MOST_DEATHS)  # time.monotonic() of the last ones
        self._trouble: str | None = None  # why there is no engine now
        self._dead: Exception | None = None  # why there will be none
        self._waiting: dict[str, asyncio.Future[None]] = {}  # requests, by id
        self._info: EngineInfo | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    async def start(self) -> None:
        await self._start()
        self._keeper = asyncio.create_task(self._keep())

    async def _start(self) -> None:
        """Starts an engine, and others in place of those that die before they serve. Raises what no other start would
        mend."""
        while True:
            try:
                await self._client.start()
            except EngineDeadError as error:
                await self._bury(error)
            else:
                self._info, self._trouble = self._client.info, None
                return

    async def _bury(self, reason: Exception) -> None:
        """Makes room for another engine. Raises `EngineDeadError` when there have been enough."""
        self._trouble = str(reason)
        now = time.monotonic()
        is_often = len(self._deaths) == _MOST_DEATHS and now - self._deaths[0] < _WITHIN_S
        self._deaths.append(now)
        await self._client.bury()
        if is_often:
            raise EngineDeadError(f"the engine has died {_MOST_DEATHS + 1} times in {_WITHIN_S:.0f} s: {reason}")
        log.error("the engine is started again: %s", reason)
        await asyncio.sleep(_PAUSE_S)
        self._client = self._make()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            reason = self._client.death
            if reason is None and self._client.unheard_s > _UNHEARD_S:
                reason = EngineDeadError(f"the engine's process has been silent for {_UNHEARD_S:.0f} s")
            if reason is not None:
                try:
                    await self._bury(reason)
                    await self._start()
                except Exception as error:  # noqa: BLE001 - whatever it is, nobody serves any more
                    self._dead = error
                    return self._release(EngineDeadError(str(error)))
                self._release(None)

    def _release(self, error: Exception | None) -> None:
        """Lets those go on who wait for an engine."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(None) if error is None else waiting.set_exception(error)

    async def _current(self, request_id: str) -> ProcessClient:
        """The engine's client, once there is one."""
        if self._dead is not None:
            raise EngineDeadError(str(self._dead)) from self._dead
        if self._trouble is not None or self._client.death is not None:
            waiting = self._waiting[request_id] = asyncio.get_running_loop().create_future()
            try:
                await waiting
            finally:
                self._waiting.pop(request_id, None)
        return self._client

    async def generate(
        self, token_ids: list[int], params: SamplingParams, *, request_id: str, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        for tries in range(1, _MOST_TRIES + 1):
            client, has_begun = await self._current(request_id), False
            try:
                async for output in client.generate(token_ids, params, request_id=request_id, priority=priority):
                    has_begun = True
                    yield output
                return
            except EngineDeadError:
                if has_begun or tries == _MOST_TRIES:
                    raise

    async def pool(
        self, token_ids: list[int], params: PoolingParams, *, request_id: str, priority: int = 0
    ) -> PoolingRequestOutput:
        async def once() -> PoolingRequestOutput:
            client = await self._current(request_id)
            return await client.pool(token_ids, params, request_id=request_id, priority=priority)

        return await _again(once)

    def abort(self, request_id: str) -> None:
        self._client.abort(request_id)
        if (waiting := self._waiting.get(request_id)) is not None and not waiting.done():
            waiting.set_exception(RequestEndedError("it was ended while the engine was started again"))

    def abort_all(self) -> None:
        self._client.abort_all()
        self._release(RequestEndedError("it was ended while the engine was started again"))

    async def command(self, command: EngineCommand) -> bool:
        return await self._client.command(command)

    def fail_all(self, reason: str) -> None:
        self._client.fail_all(reason)
        self._release(RequestEndedError(reason))

    def stats(self) -> EngineStats | None:
        return self._client.stats()

    def health(self) -> Health:
        if self._dead is not None:
            return Health(False, 0.0)
        health = self._client.health()
        if self._trouble is not None:
            return Health(True, 0.0, trouble=self._trouble)
        if not health.is_alive:
            return Health(True, 0.0, trouble=str(self._client.death))
        late_s = self._client.unheard_s
        if late_s > _LATE_S and health.trouble is None:
            return health._replace(trouble=f"the engine's process has been silent for {late_s:.1f} s")
        return health

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._client.close()


async def _again(once: Callable[[], Awaitable[Any]]) -> Any:
    for _ in range(_MOST_TRIES - 1):
        try:
            return await once()
        except EngineDeadError:
            continue
    return await once()
