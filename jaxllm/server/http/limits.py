"""Bounds the number of admitted requests. A request is counted on arrival, before any work is done for it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from jaxllm.server.http.errors import invalid, unavailable


class RequestLimit:
    """A bound on running and waiting requests to the engine. Not thread-safe: for one event loop."""

    def __init__(self, max_queued: int):
        self.max_queued = max_queued
        self.max_running = 0  # the engine's limit, once known
        self.num_admitted = 0
        self.is_draining = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def limit(self) -> int:
        return self.max_running + self.max_queued

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Admits `count` requests for the duration of the context. Raises `APIError` 503 if the limit is reached,
        and 400 if `count` alone exceeds it."""
        if self.is_draining:
            raise unavailable("the server is shutting down; try another, or this one later")
        if count > self.limit:
            raise invalid(f"{count} prompts at once are more than the {self.limit} that this server takes", "prompt")
        if self.num_admitted + count > self.limit:
            raise unavailable(f"the queue is full: {self.num_admitted} requests run or wait; try again later")
        self._change(count)
        try:
            yield
        finally:
            self._change(-count)

    def _change(self, count: int) -> None:
        self.num_admitted += count
        if self.num_admitted:
            self._is_empty.clear()
        else:
            self._is_empty.set()

    async def wait_empty(self) -> None:
        await self._is_empty.wait()
