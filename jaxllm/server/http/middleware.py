"""Runs before routing for every request: assigns an id, checks the API key and the host name."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxllm.server.config import HOST
from jaxllm.server.http.errors import APIError, as_api_error, unauthorized
from jaxllm.server.http.exchange import Receive, Scope, Send, send_body
from jaxllm.server.observe.access import Report, RequestRecord, RouteNames, method_of
from jaxllm.server.page import page

PUBLIC_PATHS = frozenset({"/health", "/ping", "/ready"})
ADMIN_PATHS = frozenset({"/is_sleeping", "/reset_prefix_cache", "/sleep", "/wake_up"})
_HOST_HEADER = re.compile(rf"(?P<name>{HOST.pattern})(:\d{{1,5}})?")
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
App = Callable[[Scope, Receive, Send], Any]


class Guard:
    """The outermost ASGI app. A client without a key can reach `PUBLIC_PATHS` only, and `ADMIN_PATHS` have a key of
    their own; the check uses the same path as the router. `hosts`: the host names that the server answers to, so that
    no web page can reach it under a name of its own (DNS rebinding); None: any. Heads have at most `max_header_bytes`.
    `report` is called with each request when it is over; `routes` are the paths that it may name."""

    def __init__(
        self,
        app: App,
        *,
        api_keys: Sequence[str],
        hosts: Iterable[str] | None,
        max_header_bytes: int = 64 << 10,
        admin_api_key: str | None = None,
        routes: Iterable[str] = (),
        report: Report = lambda record: None,
    ):
        self._app = app
        self._keys = [_digest(key.encode()) for key in api_keys]
        self._admin_keys = [] if admin_api_key is None else [_digest(admin_api_key.encode())]
        self._routes, self._report = RouteNames(routes), report
        self._hosts = None if hosts is None else frozenset(hosts)
        self._max_header_bytes = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"
        record = RequestRecord(request_id, self._routes.name(route_path(scope)), method_of(scope["method"]))
        scope.setdefault("state", {}).update(request_id=request_id, record=record)
        try:
            await self._answer(scope, receive, send, record)
        finally:
            self._report(record)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        request_id, started = record.request_id, False

        async def send_with_id(message: dict[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started, record.status = True, message["status"]
                message = message | {"headers": [*message["headers"], *_ids(scope, request_id)]}
            await send(message)

        try:
            check_head(scope, self._max_header_bytes)
            scope["state"]["tenant"] = record.key = self._check(scope)
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 - last resort: of an internal error the client sees the request id only
            failure = as_api_error(error, request_id)
            if not started and failure.status == 401 and _is_browser(scope):
                await send_body(send_with_id, 401, page().body, headers=page().headers | failure.headers)
            elif not started:
                await send_body(send_with_id, failure.status, failure.encode(), headers=failure.headers)

    def _check(self, scope: Scope) -> bytes | None:
        """The digest of the request's API key; None if no key is required. Raises `APIError` 401 or 403."""
        if route_path(scope) in PUBLIC_PATHS:
            return None
        headers = scope["headers"]
        is_admin = self._admin_keys and route_path(scope) in ADMIN_PATHS
        keys = self._admin_keys if is_admin else self._keys
        digest = _known_key(keys, headers) if keys else None
        if keys and digest is None:
            raise unauthorized()
        if self._hosts is not None and not any(_hostname(v) in self._hosts for n, v in headers if n == b"host"):
            host = next((value.decode("latin-1") for name, value in headers if name == b"host"), "")
            raise APIError(
                403,
                f"this server does not answer to the name {host!r:.100}; use http://localhost, or start it with "
                "--allowed-hosts and the name, as behind a proxy that forwards it",
                type="permission_error",
                code="host_not_allowed",
            )
        return digest


def _known_key(keys: Sequence[bytes], headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """The digest of the request's key if that is one of `keys`, which are digests."""
    given = [value for name, value in headers if name == b"authorization"]
    kind, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
    digest, found = _digest(key.strip()), False
    for known in keys:  # compares all keys, so that timing reveals nothing
        found |= hmac.compare_digest(digest, known)
    return digest if found and kind.lower() == b"bearer" else None


def check_head(scope: Scope, max_bytes: int) -> None:
    """Raises `APIError` 431 for a head that is too long, though it came at once, and 400 for one that says in two ways
    where the body ends, as a proxy may have gone by the other (RFC 9112, 6.1). Both close the connection."""
    headers = scope["headers"]
    size = len(scope.get("raw_path", b"")) + len(scope["query_string"])
    size += sum(len(name) + len(value) + 4 for name, value in headers)
    close = {"Connection": "close"}
    if size > max_bytes:
        raise APIError(431, f"the request's head has {size} bytes; at most {max_bytes} are allowed", headers=close)
    names = {name for name, _ in headers}
    if b"content-length" in names and b"transfer-encoding" in names:
        raise APIError(400, "Content-Length and Transfer-Encoding exclude each other; send one", headers=close)


def _is_browser(scope: Scope) -> bool:
    """Whether a browser asks for the page. It is sent without a key too, because it contains nothing of this server and
    has the form for the key. The status stays 401."""
    accepted = next((value for name, value in scope["headers"] if name == b"accept"), b"")
    return route_path(scope) == "/" and scope["method"] in ("GET", "HEAD") and b"text/html" in accepted


def route_path(scope: Scope) -> str:
    """The path that is routed: uvicorn puts the root path of `--root-path` before what came."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _hostname(value: bytes) -> str:
    """The name of a Host header, without brackets and port; empty if it is malformed."""
    match = _HOST_HEADER.fullmatch(value.decode("latin-1").strip().lower())
    return "" if match is None else match["name"].strip("[]")


def _ids(scope: Scope, request_id: str) -> list[tuple[bytes, bytes]]:
    ids = [(b"x-request-id", request_id.encode())]
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _CLIENT_ID.fullmatch(value):
            ids.append((b"x-client-request-id", value))
            break
    return ids
