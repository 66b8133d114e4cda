"""Requests in OpenAI's batch format, answered in this process by the routes of the HTTP server."""

import asyncio
import secrets
from typing import Any

import msgspec

from jaxllm.server.http.errors import APIError, invalid
from jaxllm.server.http.exchange import Scope
from jaxllm.server.http.middleware import App

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank")


class BatchRequest(msgspec.Struct):
    """A line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"

    def check(self) -> None:
        """Raises `APIError` for what no route here answers."""
        if self.method != "POST":
            raise invalid(f"method={self.method!r:.50} must be POST", "method")
        if self.url not in URLS:
            raise invalid(f"there is no {self.url!r:.100} for batches; there are {', '.join(URLS)}", "url")
        if self.body.get("stream"):
            raise invalid("a batch has whole answers; leave stream out", "stream")


class BatchAnswers:
    """Answers the lines of a batch by `app`, and counts them."""

    def __init__(self, app: App):
        self._app = app
        self.num_answered = self.num_failed = 0

    async def answer(self, number: int, raw: bytes) -> bytes:
        """The line of the output for line `number` of the input."""
        custom_id: Any = None
        try:
            value = _decode(number, raw)
            custom_id = value.get("custom_id")
            request = _convert(number, value)
            request.check()
            status, body = await self._send(request)
        except APIError as error:
            status, body = error.status, error.body()
        is_fine = status < 400
        self.num_answered += is_fine
        self.num_failed += not is_fine
        answer_id = secrets.token_hex(12)
        record = {
            "id": f"batch_req_{answer_id}",
            "custom_id": custom_id,
            "response": {"status_code": status, "request_id": f"req_{answer_id}", "body": body},
            "error": None if is_fine else body["error"],
        }
        return msgspec.json.encode(record) + b"\n"

    async def _send(self, request: BatchRequest) -> tuple[int, Any]:
        """The status and the JSON body of what the route answers."""
        received = [{"type": "http.request", "body": msgspec.json.encode(request.body)}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return received.pop() if received else await asyncio.Future()  # the client of a batch never leaves

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self._app(_scope(request.url), receive, send)
        return sent[0]["status"], msgspec.json.decode(b"".join(message["body"] for message in sent[1:]))


def _scope(url: str) -> Scope:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": url, "root_path": "", "query_string": b"", "headers": headers}


def _decode(number: int, raw: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise invalid(f"line {number} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid(f"line {number} holds no object with custom_id, url and body")
    return value


def _convert(number: int, value: dict[str, Any]) -> BatchRequest:
    try:
        return msgspec.convert(value, BatchRequest)
    except msgspec.ValidationError as error:
        raise invalid(f"line {number} is no request of a batch: {error}") from error
