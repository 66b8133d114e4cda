"""One HTTP exchange: sends the answer or event stream, and stops when the client leaves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

import msgspec

from jaxllm.server.http.errors import APIError
from jaxllm.server.observe.access import RequestRecord

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_encode = msgspec.json.Encoder().encode
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_POSITION_S = 0.5  # between two checks of the queue position
_LAST_WORDS_S = 5.0  # for a client that does not read to receive an error


class ClientGone(Exception):
    """The client disconnected."""


class Exchange:
    """Sends one answer, with `json` or `events`."""

    def __init__(self, scope: Scope, send: Send, *, keep_alive_s: float):
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.request_id: str = scope["state"]["request_id"]
        self.tenant: bytes | None = scope["state"]["tenant"]  # digest of the API key
        self.num_body_bytes = 0  # of the request
        self.record: RequestRecord = scope["state"]["record"]
        self.is_streaming = False
        self._send, self._keep_alive_s = send, keep_alive_s
        self.error_events: Callable[[APIError], list[dict[str, Any]]] = lambda error: [error.body()]
        self.ahead: Callable[[], int] | None = None  # number of requests before this one, for a stream that reports it
        self._spoke = False  # since the last tick of the keep-alive
        self._has_events = False

    async def json(self, answer: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        body = answer if isinstance(answer, bytes) else _encode(answer)
        await send_body(self._send, status, body, headers=headers)

    async def json_of(self, make: Callable[[], Any], *, is_large: bool) -> None:
        """Sends what `make` returns; where it may be large it is made and encoded outside the event loop."""
        await self.json(await asyncio.to_thread(lambda: _encode(make())) if is_large else make())

    @contextlib.asynccontextmanager
    async def events(self) -> AsyncIterator[None]:
        """Opens a stream of server-sent events for the duration of the context; comments keep it alive while idle."""
        self.is_streaming = True
        head = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": head})
        asides = [asyncio.create_task(self._ping()), asyncio.create_task(self._report_position())]
        try:
            yield
        finally:
            for aside in asides:
                aside.cancel()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def event(self, data: Any, *, name: str | None = None) -> None:
        head = b"" if name is None else b"event: " + name.encode() + b"\n"
        await self.write(head + b"data: " + _encode(data) + b"\n\n")

    async def write(self, data: bytes) -> None:
        self._spoke = self._has_events = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def error(self, error: APIError) -> None:
        """Answers with an error; a stream that has begun ends with an error event."""
        if not self.is_streaming:
            await self.json(error.encode(), status=error.status, headers=error.headers)
            return
        self.record.error = error.code or error.type
        with contextlib.suppress(TimeoutError):  # a client that does not read gets no end either
            async with asyncio.timeout(_LAST_WORDS_S):
                for event in self.error_events(error):
                    await self.event(event, name=event.get("type"))
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(self._keep_alive_s)
            if not self._spoke:
                await self._send({"type": "http.response.body", "body": PING, "more_body": True})
            self._spoke = False

    async def _report_position(self) -> None:
        """Sends comments like `: queue 3` until the first event; clients that do not know them skip comments."""
        told = 0
        while not self._has_events:
            ahead = 0 if self.ahead is None else self.ahead()
            if ahead != told:
                await self._send({"type": "http.response.body", "body": b": queue %d\n\n" % ahead, "more_body": True})
                told = ahead
            await asyncio.sleep(_POSITION_S)


async def send_body(
    send: Send,
    status: int,
    body: bytes,
    *,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> None:
    head = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in head.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def until_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Runs `work` and returns True, or cancels it when the client disconnects and returns False."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        is_done = task.done()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    if is_done:
        task.result()
    return is_done


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
