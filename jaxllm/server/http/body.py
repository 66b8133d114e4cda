"""Reads request bodies within limits: on each of them, and on the memory that all of them take together."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from jaxllm.server.http.errors import APIError, unavailable
from jaxllm.server.http.exchange import ClientGone, Receive, Scope

SMALL_BODY_BYTES = 64 << 10
_IDLE_S = 10.0  # without a byte, after which a body is given up: others may want its memory
_CLOSE = {"Connection": "close"}  # as the rest of the body is not read


class BodyBudget:
    """The bytes of all bodies that requests hold, unfinished ones too. Not thread-safe: for one event loop."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes = 0

    @property
    def max_big_bytes(self) -> int:
        """What bodies above `SMALL_BODY_BYTES` may fill: they leave a quarter to small ones."""
        return self.max_bytes // 4 * 3

    @contextmanager
    def open(self) -> Iterator["Body"]:
        """A body that counts for the duration of the context."""
        body = Body(self)
        try:
            yield body
        finally:
            self.num_bytes -= body.num_reserved


class Body:
    """One body, while it is read."""

    def __init__(self, budget: BodyBudget):
        self._budget = budget
        self._data = bytearray()
        self.num_reserved = 0

    def reserve(self, num_bytes: int) -> None:
        """Counts at least `num_bytes` for this body from now on. Raises `APIError` 503 if there is no room."""
        more = num_bytes - self.num_reserved
        if more <= 0:
            return
        budget = self._budget
        limit = budget.max_bytes if num_bytes <= SMALL_BODY_BYTES else budget.max_big_bytes
        if budget.num_bytes + more > limit:
            full = unavailable("the requests that are being answered fill the memory for bodies; try again later")
            full.headers |= _CLOSE
            raise full
        budget.num_bytes += more
        self.num_reserved += more

    def append(self, part: bytes) -> None:
        self.reserve(len(self._data) + len(part))
        self._data += part

    def __len__(self) -> int:
        return len(self._data)

    def take(self) -> bytearray:
        """The bytes, which this object keeps no longer; they still count."""
        data, self._data = self._data, bytearray()
        return data


async def read_body(scope: Scope, receive: Receive, body: Body, *, max_bytes: int, timeout_s: float) -> None:
    """Reads all of a JSON request's body. Raises `APIError` 413, 415, 408 or 503, or `ClientGone`."""
    _check_type(scope)
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    if length.isdigit():
        if int(length) > max_bytes:
            raise _too_big(max_bytes)
        body.reserve(int(length))
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await asyncio.wait_for(receive(), _IDLE_S)
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                if len(body) + len(part) > max_bytes:
                    raise _too_big(max_bytes)
                body.append(part)
                if not message.get("more_body"):
                    return
    except TimeoutError as error:
        told = f"the body did not come within {timeout_s:g} s, or nothing of it for {_IDLE_S:g}"
        raise APIError(408, told, headers=_CLOSE) from error


def _check_type(scope: Scope) -> None:
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    kind = b", ".join(kinds).split(b";", 1)[0].strip().lower()
    if kind != b"application/json" or len(kinds) > 1:
        shown = b", ".join(kinds).decode("latin-1")[:100]
        raise APIError(415, f"the body's type is {shown!r}; send one Content-Type: application/json")
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise APIError(
                415,
                f"the body is compressed (Content-Encoding: {value.decode('latin-1')[:50]}); send it as it is",
                headers={"Accept-Encoding": "identity"},
            )


def _too_big(max_bytes: int) -> APIError:
    return APIError(413, f"the body is larger than {max_bytes} bytes; send less at once", headers=_CLOSE)
