"""The log of requests: a line for each, and nothing in it that a client wrote."""

import hashlib
import logging
import re

import pytest

from tests.fake_server import FakeClient, request, running

KEY = {"Authorization": "Bearer key-to-hide"}
LINE = re.compile(r"(\w+) (\S+) (\d+) \d+\.\d{3} s in=(\d+) out=(\d+) (req_\w+) key=(\S+)(?: error=(\w+))?")


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="jaxllm.access")

    def found() -> list[tuple]:
        assert "to-hide" not in caplog.text
        return [LINE.fullmatch(one.getMessage()).groups() for one in caplog.records if one.name == "jaxllm.access"]

    return found


def post(web, prompt="words-to-hide", **fields):
    return web.post("/v1/completions", {"model": "fake", "prompt": prompt} | fields, KEY)


def test_a_line_for_each_request(lines):
    client = FakeClient(says={"poison": RuntimeError("a bug")})
    with running(client, api_keys=("key-to-hide",), logs_requests=True) as web:
        answers = [post(web), post(web, stream=True, max_tokens=3), post(web, n=0), post(web, "poison", stream=True)]
        answers.append(web.send("GET", "/health"))
        answers.append(web.send("GET", "/words-to-hide?to-hide", headers=KEY))
        answers.append(web.send("GET", "/v1/models/to-hide", headers=KEY))
        web.post("/v1/completions", {}, {"Authorization": "Bearer other-to-hide", "X-Request-Id": "to-hide"})
        web.wait(lambda: len(lines()) == 8)
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert [line[5] for line in lines()][:7] == ids
    digest = hashlib.sha256(b"key-to-hide").hexdigest()[:8]
    assert [line[:5] + line[6:] for line in lines()] == [
        ("POST", "/v1/completions", "200", "14", "12", digest, None),
        ("POST", "/v1/completions", "200", "14", "3", digest, None),
        ("POST", "/v1/completions", "400", "0", "0", digest, None),
        ("POST", "/v1/completions", "200", "7", "0", digest, "internal_error"),
        ("GET", "/health", "200", "0", "0", "-", None),
        ("GET", "other", "404", "0", "0", digest, None),
        ("GET", "/v1/models/{name:path}", "404", "0", "0", digest, None),
        ("POST", "/v1/completions", "401", "0", "0", "-", None),
    ]


def test_a_client_that_leaves(lines):
    client = FakeClient()
    with running(client, logs_requests=True) as web:
        client.gate.clear()
        with web.connect() as connection:
            connection.sendall(
                request(
                    "POST",
                    "/v1/chat/completions",
                    {"model": "fake", "messages": [{"role": "user", "content": "to-hide"}]},
                )
            )
            web.wait(lambda: client.running)
        web.wait(lines)
        client.gate.set()
        web.client.gate.clear()
        with web.open_stream() as stream:
            web.wait(lambda: client.running)
            assert stream.recv(1)
        web.wait(lambda: len(lines()) == 2)
        client.gate.set()
    found = [(method, route, status, error) for method, route, status, *_, error in lines()]
    assert found == [
        ("POST", "/v1/chat/completions", "499", "client_gone"),
        ("POST", "/v1/completions", "200", "client_gone"),
    ]


def test_nothing_is_logged_unless_asked_for(lines):
    with running() as web:
        web.complete()
    assert not lines()
