"""The page at / and the numbers it shows, without a browser."""

import base64
import dataclasses
import hashlib
import re
import socket
import time

import pytest

from jaxllm.server.http.queue_position import ArrivalQueue
from jaxllm.server.page import page
from tests.fake_server import STATS, FakeClient, read_answer, request, running

BROWSER = [("Accept", "text/html,application/xhtml+xml")]
KEY = [("Authorization", "Bearer the-key")]


@pytest.fixture(scope="module")
def web():
    with running() as web:
        yield web


def policy(answer) -> dict[str, str]:
    parts = answer.headers["content-security-policy"].split("; ")
    return dict(part.split(" ", 1) for part in parts)


def test_the_page_is_served(web):
    answer = web.send("GET", "/", headers=BROWSER)
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.body == page().body and len(answer.body) < 100_000
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["x-frame-options"] == "DENY"
    head = web.send("HEAD", "/")
    assert head.status == 200 and head.body == b""
    assert web.send("POST", "/", {}).status == 405


def test_it_may_run_its_own_script_only(web):
    answer = web.send("GET", "/")
    rules = policy(answer)
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["trusted-types"] == "'none'" and rules["connect-src"] == "'self'"
    for name, tag in (("script-src", "script"), ("style-src", "style")):
        (source,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", answer.body.decode(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"


def test_it_loads_nothing_from_elsewhere_and_writes_no_markup():
    text = page().body.decode()
    urls = set(re.findall(r"https?://[\w./]+", text))
    assert urls == {"http://www.w3.org/2000/svg"}
    loads = re.findall(r"""\b(?:src|href)="([^"#][^"]*)\"""", text)
    assert all(url.startswith("data:") for url in loads) and not re.search(r"@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert not re.search(r'\son\w+="|\sstyle="', text), "the policy forbids them"
    assert "{{" not in text


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_with_a_key_the_page_comes_as_a_401_that_asks_for_it(method):
    with running(api_keys=("the-key",)) as web:
        answer = web.send(method, "/", headers=BROWSER)
        assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["content-type"].startswith("text/html") and "'sha256-" in policy(answer)["script-src"]
        assert b"fake" not in answer.body, "nothing of this server"
        for path in ("//", "/stats", "/index.html", "/page.css"):
            other = web.send(method, path, headers=BROWSER)
            assert other.status == 401 and other.headers["content-type"] == "application/json"
        assert web.send(method, "/", headers=KEY).status == 200
        assert web.send("GET", "/stats", headers=KEY).json["model"] == "fake"


def test_a_foreign_host_gets_no_page(web):
    answer = web.send("GET", "/", headers=[*BROWSER, ("Host", "evil.example")])
    assert answer.status == 403 and answer.headers["content-type"] == "application/json"


def test_stats():
    with running(defaults={"temperature": 0.6}) as web:
        answer = web.send("GET", "/stats")
        assert answer.headers["cache-control"] == "no-store"
        told = answer.json
        assert told["model"] == "fake" and told["is_ready"] and told["has_chat"]
        assert told["defaults"] == {"temperature": 0.6} and told["generation_tokens_per_s"] == 0
        assert told["engine"]["kv_cache_tokens"] == 256 and told["engine"]["kv_cache_usage"] == 0
        assert told["engine"]["max_model_len"] == 256 and told["engine"]["max_num_seqs"] == 2


def test_stats_while_the_model_is_being_loaded():
    with running() as web:
        web.client.info = None
        told = web.send("GET", "/stats").json
        assert told["engine"] is None and told["is_ready"] is False and told["model"] == "fake"


def test_a_model_without_a_template_does_not_chat():
    with running(template=None) as web:
        assert web.send("GET", "/stats").json["has_chat"] is False
        assert web.chat().status == 400


def test_the_rate_counts_tokens_as_they_come():
    client = FakeClient(reply="x" * 200)
    with running(client) as web:
        web.complete(max_tokens=200)
        time.sleep(1.0)  # of whole seconds
        assert web.send("GET", "/stats").json["generation_tokens_per_s"] == pytest.approx(200 / 3)


def test_the_line():
    line = ArrivalQueue()
    with line.join(0) as first, line.join(0) as second, line.join(5) as last, line.join(0) as third:
        assert [place.ahead(4) for place in (first, second, third, last)] == [0, 1, 2, 3]
        assert [place.ahead(2) for place in (first, second, third, last)] == [0, 0, 0, 1], "two of them run"
        assert last.ahead(0) == 0 and last.ahead(100) == 3
        first.leave()
        assert third.ahead(3) == 1 and first.ahead(3) == 0
    assert not line.positions


def test_a_waiting_stream_is_told_its_place():
    client = FakeClient()
    with running(client) as web:
        client.gate.clear()
        client.stats = lambda: _waiting(2)
        body = {"model": "fake", "prompt": "Hi", "stream": True}
        streams = [_open(web, body) for _ in range(2)]
        web.wait(lambda: len(client.running) == 2)
        streams.append(_open(web, body | {"stream_options": {"queue_position": True}}))
        last = streams[-1]
        seen = b""
        while b": queue 1\n\n" not in seen:
            seen += last.recv(1 << 12)
        client.stats = lambda: _waiting(0)
        while b": queue 0\n\n" not in seen:
            seen += last.recv(1 << 12)
        client.gate.set()
        others = [read_answer(stream) for stream in streams[:2]]
        assert all(b": queue" not in answer.body for answer in others)
        while b"[DONE]" not in seen:
            seen += last.recv(1 << 12)
        for stream in streams:
            stream.close()
        assert not web.server.arrivals.positions


def _open(web, body) -> socket.socket:
    connection = web.connect()
    connection.sendall(request("POST", "/v1/completions", body))
    return connection


def _waiting(count):
    return dataclasses.replace(STATS, num_waiting=count)
