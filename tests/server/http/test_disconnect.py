"""Clients that go, that don't read, and streams that have nothing to say."""

import asyncio
import contextlib
import json
import socket
import time

import pytest

from jaxllm.server.http import exchange
from tests import fake_server
from tests.fake_server import FakeClient, read_answer, request, running

BODY = {"model": "fake", "prompt": "Hi"}


@pytest.fixture
def held():
    """A server whose engine is busy until the gate opens."""
    client = FakeClient(reply="x" * 200)
    with running(client) as web:
        client.gate.clear()
        yield web


def gone(web) -> None:
    web.wait(lambda: len(web.client.aborted) == len(web.client.seen) and not web.client.running)
    web.wait(lambda: web.server.limit.num_admitted == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_closing_aborts(held, path, stream):
    body = {"model": "fake", "stream": stream}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    body = {"model": "fake", "stream": stream, "input": "Hi"} if "responses" in path else body
    with held.connect() as connection:
        connection.sendall(request("POST", path, body))
        held.wait(lambda: held.client.running)
    gone(held)
    text = held.send("GET", "/metrics").body.decode()
    assert 'jaxllm:requests_aborted_total{engine="0",model_name="fake"} 1.0' in text


def test_closing_in_the_middle_aborts_every_prompt(held):
    with held.open_stream(prompt=["a", "b"]) as connection:
        held.wait(lambda: len(held.client.running) == 2)
        held.client.gate.set()
        assert connection.recv(1000)
        held.client.gate.clear()
    gone(held)


def test_half_closing_aborts(held):
    with held.open_stream() as connection:
        held.wait(lambda: held.client.running)
        connection.shutdown(socket.SHUT_WR)
        gone(held)


def test_a_storm_of_clients_that_go(held):
    held.server.limit.max_queued = 500
    for _ in range(4):
        connections = [held.open_stream() for _ in range(25)]
        held.wait(lambda: len(held.client.running) == 25)
        for connection in connections:
            connection.close()
        gone(held)
    held.client.gate.set()
    assert held.complete().status == 200


def test_a_client_that_goes_before_its_body_came(held):
    with held.connect() as connection:
        connection.sendall(request("POST", "/v1/completions", BODY)[:-3])
    held.client.gate.set()
    assert held.complete().status == 200 and len(held.client.seen) == 1


def test_a_stream_is_kept_alive():
    client = FakeClient()
    with running(client, keep_alive_s=0.05) as web:
        client.gate.clear()
        with web.open_stream() as connection:
            web.wait(lambda: client.running)
            seen = b""
            while seen.count(b": ping\n\n") < 3:
                seen += connection.recv(1000)
            client.gate.set()
            assert read_answer_of(seen, connection).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def read_answer_of(seen: bytes, connection: socket.socket) -> bytes:
    while part := connection.recv(1 << 16):
        seen += part
    return seen


def test_a_client_that_does_not_read_holds_up_nobody():
    client = FakeClient(reply="x" * 50_000)
    client.info = type(client.info)(client.info.config, client.info.vocab)
    with running(client) as web:
        with web.connect() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = BODY | {"stream": True, "max_tokens": 50_000}
            slow.sendall(request("POST", "/v1/completions", body))
            slow.recv(100)
            for _ in range(5):
                assert web.complete(max_tokens=5).status == 200
            assert client.running, "it waits for its reader"
        web.wait(lambda: not client.running)


def test_a_client_that_never_reads_is_dropped_at_its_deadline(monkeypatch):
    """What it was sent by then fits the buffers; nothing of it is left in the server."""
    monkeypatch.setattr(exchange, "_LAST_WORDS_S", 0.2)
    bind = fake_server.bind

    def narrow(config) -> socket.socket:
        listener = bind(config)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # or the system takes all of it
        return listener

    monkeypatch.setattr(fake_server, "bind", narrow)
    client = FakeClient(reply="x" * 10_000)
    with running(client, request_timeout_s=5.0, header_timeout_s=0.3) as web:
        with web.connect() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.sendall(request("POST", "/v1/completions", BODY | {"stream": True, "max_tokens": 10_000}))
            web.wait(lambda: client.running)
            gone(web)
            web.wait(lambda: not web.connections)
            seen = b""
            with contextlib.suppress(ConnectionResetError):
                while part := slow.recv(1 << 16):
                    seen += part
        assert seen.count(b"data: ") < 5000 and b"[DONE]" not in seen and b"deadline" not in seen
        assert web.complete(max_tokens=5).status == 200


def test_big_bodies_do_not_hold_up_others():
    """The tokenizer works in threads; JSON of this size takes the event loop some milliseconds."""
    with running() as web:
        real = web.server.model.tokenizer.encode

        def slow(*args, **options):
            time.sleep(0.5)
            return real(*args, **options)

        web.server.model.tokenizer.encode = slow
        with web.connect() as connection:
            connection.sendall(request("POST", "/v1/completions", BODY))
            start = time.monotonic()
            for _ in range(5):
                assert web.send("GET", "/health").status == 200
            assert time.monotonic() - start < 5
            assert read_answer(connection).status == 200


def test_many_streams_at_once():
    client = FakeClient(reply="Hello, world" * 3)
    with running(client, max_queued_requests=1000) as web:

        async def one(i: int) -> str:
            reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
            writer.write(request("POST", "/v1/completions", BODY | {"stream": True, "max_tokens": 10 + i % 20}))
            data = await reader.read()
            writer.close()
            await writer.wait_closed()
            lines = [line[6:] for line in data.decode().split("\n") if line.startswith("data: {")]
            return "".join(json.loads(line)["choices"][0]["text"] for line in lines)

        async def all_of_them() -> list[str]:
            return await asyncio.gather(*(one(i) for i in range(256)))

        texts = asyncio.run(all_of_them())
        assert texts == [("Hello, world" * 3)[: 10 + i % 20] for i in range(256)]
        assert web.server.limit.num_admitted == 0 and not client.running
