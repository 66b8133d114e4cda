"""Where requests' outputs wait for a reader in an event loop."""

import asyncio
from typing import Any

from jaxllm.engine.rollout_request import RolloutOutput
from jaxllm.outputs import RequestOutput
from jaxllm.pooling_outputs import PoolingRequestOutput

Output = RequestOutput | PoolingRequestOutput


class Mailbox:
    """The newest output of one request, for one reader: a slow one skips some, or gets several deltas in one, so that
    nothing piles up. It belongs to the running event loop, in which `put` must be called."""

    def __init__(self, *, is_delta: bool):
        self.loop = asyncio.get_running_loop()
        self.is_finished = False  # the last output was read
        self._is_delta = is_delta
        self._changed = asyncio.Event()
        self._newest: Output | Exception | None = None

    def put(self, news: Output | Exception) -> None:
        unread = self._newest
        if isinstance(unread, Exception):
            return
        if self._is_delta and isinstance(unread, RequestOutput) and isinstance(news, RequestOutput):
            news = unread.followed_by(news)
        self._newest = news
        self._changed.set()

    async def get(self) -> Any:
        """Waits for what is new, of the kind that was asked for. Raises the exception if that is it."""
        await self._changed.wait()
        self._changed.clear()
        news, self._newest = self._newest, None
        if isinstance(news, Exception):
            raise news
        assert news is not None  # `put` set the event
        self.is_finished = news.finished
        return news


class Basket:
    """The outputs of `num_requests` requests, each of which has one, for a reader that wants all. It belongs to the
    running event loop, in which `put` must be called."""

    def __init__(self, num_requests: int):
        self.loop = asyncio.get_running_loop()
        self._num_requests = num_requests
        self._outputs: dict[str, RolloutOutput] = {}
        self._all: asyncio.Future[dict[str, RolloutOutput]] = self.loop.create_future()
        if not num_requests:
            self._all.set_result({})

    def put(self, news: RolloutOutput | Exception) -> None:
        if self._all.done():
            return
        if isinstance(news, Exception):
            self._all.set_exception(news)
            return
        self._outputs[news.request_id] = news
        if len(self._outputs) == self._num_requests:
            self._all.set_result(self._outputs)

    async def get(self) -> dict[str, RolloutOutput]:
        """Waits for all, by request. Raises the exception if there is one."""
        return await self._all
