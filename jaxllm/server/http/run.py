"""Runs the server: uvicorn with additional limits, signals, draining, and the start message."""

import asyncio
import contextlib
import json
import logging
import resource
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxllm.server.config import ServerConfig
from jaxllm.server.engine.client import EngineInfo
from jaxllm.server.http.app import create_app
from jaxllm.server.http.errors import invalid
from jaxllm.server.server import Server
from jaxllm.stderr import say

log = logging.getLogger(__name__)

_LAST_ANSWERS_S = 3  # for error events to be sent when a drain is cut short
_BACKLOG = 256  # connections that are taken at once, before any is counted
_OTHER_FILES = 128  # descriptors that are no client's
_DEAD_S = 2.0  # during which a server with a dead engine still answers with errors


def most_connections(wanted: int) -> int:
    """As many as `wanted`, if this process may have a descriptor for each: it allows itself as many as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a limit above the kernel's
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if limit == resource.RLIM_INFINITY else max(1, min(wanted, limit - _BACKLOG - _OTHER_FILES))


def protocol_of(config: ServerConfig, max_connections: int) -> type[H11Protocol]:
    """uvicorn's HTTP/1.1 protocol with bounds that it lacks: on connections, and on the time to send a request head or
    to read the rest of an answer."""

    class Protocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._seen: Any = None  # at the last check: what the client had to do, if anything
            self._look()
            if len(self.connections) > max_connections:
                transport.abort()

        def _look(self) -> None:
            """Drops a client that has made no progress since the last check, neither sending the rest of a head nor
            reading the rest of an answer. One that has done both, uvicorn drops after the keep-alive
            timeout."""
            is_answered = self.cycle is None or self.cycle.response_complete
            unsent = self.transport.get_write_buffer_size()
            is_idle = self.cycle is not None and not unsent and not self.conn.trailing_data[0]
            seen = None
            if is_answered and not is_idle or self.transport.is_closing():
                seen = (self.cycle, unsent)
                if seen == self._seen:
                    self.transport.abort()
                    return
            self._seen = seen
            self._timer = self.loop.call_later(config.header_timeout_s, self._look)

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        def _should_upgrade(self) -> bool:
            """An Upgrade header is for the server to ignore, and no reason to write to the log."""
            return False

        def send_400_response(self, msg: str) -> None:
            """Sends the error in the same format as all others."""
            log.debug("%s sent what is no HTTP/1.1 request, or too long a head", self.client)
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # in the middle of an answer
                self.transport.abort()
                return
            body = invalid("this is no HTTP/1.1 request, or its head is too long", code=None).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
            self.transport.close()

    return Protocol


class _Unlogged(logging.Filter):
    """Drops the warnings that any client can cause as often as it likes, and that name neither it nor a cause."""

    lines = frozenset({"Invalid HTTP request received.", "socket.send() raised exception."})

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg not in self.lines


_UNLOGGED = _Unlogged()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `_Signals` handles them: a drain keeps the listener open, so that new clients get an answer


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket. Raises `OSError` naming the address that is in use."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise OSError(f"{config.host}:{config.port} can't be listened on ({error.strerror}); choose --port") from error
    return listener


def make_web(server: Server) -> uvicorn.Server:
    """The web server; `serve(sockets=[...])` runs until `should_exit` is set. Raises `ValueError` for certificates that
    can't be used."""
    config = server.config
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(_UNLOGGED)
    web = uvicorn.Config(
        create_app(server),
        http=protocol_of(config, most_connections(config.max_connections)),
        lifespan="off",
        access_log=False,
        log_level=config.uvicorn_log_level,
        log_config=None,
        h11_max_incomplete_event_size=config.max_header_bytes,
        timeout_keep_alive=config.keep_alive_timeout_s,
        ws="none",
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
        server_header=False,
        backlog=_BACKLOG,
        proxy_headers=False,
        root_path=config.root_path,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        ssl_ciphers=config.ssl_ciphers,
    )
    try:
        web.load()
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(filter(None, [config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs]))
        raise ValueError(
            f"HTTPS can't be served with {files} ({error}); give a certificate and its key in PEM"
        ) from error
    return _Uvicorn(web)


async def serve(server: Server, listener: socket.socket) -> int:
    """Serves until a signal or until the engine dies; returns the exit code. Raises what `Server.start` raises."""
    web = make_web(server)
    stop = _Signals()
    serving = asyncio.create_task(web.serve(sockets=[listener]))
    try:
        start = time.monotonic()
        if not await _first(server.start(), serving, stop.first.wait()):
            return 0
        say(banner(server, listener, time.monotonic() - start))
        died = asyncio.create_task(_death(server))
        await _first(serving, stop.first.wait(), died)
        if died.done():
            await asyncio.sleep(_DEAD_S)
            return 1
        died.cancel()
        await drain(server, stop.second)
        return 0
    finally:
        web.should_exit = True
        await asyncio.wait({serving}, timeout=_LAST_ANSWERS_S + 2)
        await server.close()
        stop.close()


class _Signals:
    """The first SIGTERM or SIGINT, and the second one, which cuts the drain short."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on)

    def _on(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)


async def _first(main: Any, *others: Any) -> bool:
    """Waits for the first to finish; returns whether it was `main`. Raises what a finished one raised. The others are
    cancelled, except tasks passed in as tasks."""
    tasks = [asyncio.ensure_future(one) for one in (main, *others)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return tasks[0] in done
    finally:
        for task, given in zip(tasks, (main, *others), strict=True):
            if task is not given:
                task.cancel()


async def _death(server: Server) -> None:
    while server.client.health().is_alive:
        await asyncio.sleep(0.1)
    log.error("the engine has stopped; the server ends")


async def drain(server: Server, hurry: asyncio.Event) -> None:
    """Refuses new requests and waits for running ones until the timeout or `hurry`; the remaining ones end with an
    error."""
    server.limit.is_draining = True
    log.info("shutting down: %d requests run", server.limit.num_admitted)
    empty, hurried = asyncio.ensure_future(server.limit.wait_empty()), asyncio.ensure_future(hurry.wait())
    await asyncio.wait({empty, hurried}, timeout=server.config.shutdown_timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if not empty.done():
        server.client.fail_all("the server shuts down")
        await asyncio.wait({empty}, timeout=_LAST_ANSWERS_S)
    empty.cancel()
    hurried.cancel()


def address(config: ServerConfig, listener: socket.socket) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)  # noqa: S104 - what was bound is named
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{config.scheme}://{host}:{listener.getsockname()[1]}"


def first_request(info: EngineInfo) -> tuple[str, dict[str, Any]]:
    """A route, and the body of a request for it to try, without the model's name."""
    if info.config.generates:
        return "/v1/completions", {"prompt": "def read_lines(path", "max_tokens": 32}
    return "/v1/embeddings" if info.task == "embed" else "/classify", {"input": "def read_lines(path"}


def banner(server: Server, listener: socket.socket, seconds: float) -> str:
    """The start message: address, capacity, and a first request to try."""
    config, info = server.config, server.client.info
    assert info is not None, "it serves"
    engine = info.config
    url = address(config, listener)
    key = ' -H "Authorization: Bearer $KEY"' if config.api_keys else ""
    tokens, most = engine.total_tokens, engine.max_model_len
    room = f"{tokens:,} tokens" + ("" if engine.kv_cache_dtype == "auto" else f" in {engine.kv_cache_dtype}")
    path, body = first_request(info)
    lines = [
        f"jaxllm serves {server.model.name} at {url}, ready in {seconds:.1f} s",
        *[f"Chat page: {url}/"] * engine.generates,
        f"KV cache: {room}, or {tokens // most:,} requests of {most:,}; {engine.most_running:,} at once",
        "",
        f"curl {url}{path}{key} -H 'Content-Type: application/json' \\",
        f"  -d '{json.dumps({'model': server.model.name} | body)}'",
    ]
    width = max(map(len, lines))
    return "\n".join(
        ["┌" + "─" * (width + 2) + "┐", *(f"│ {line:<{width}} │" for line in lines), "└" + "─" * (width + 2) + "┘"]
    )
