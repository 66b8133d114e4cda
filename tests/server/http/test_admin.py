"""Routes for operators: absent unless switched on, closed but for a key of their own, and what they do to requests."""

import pytest

from jaxllm.cli.environment import admin_api_key
from jaxllm.server.config import ServerConfig
from jaxllm.server.engine.client import EngineCommand
from jaxllm.server.http.middleware import ADMIN_PATHS
from tests.fake_server import FakeClient, read_answer, request, running
from tests.server.http.test_errors import refused

ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture
def web():
    client = FakeClient()
    with running(client, admin_api_key="admin", shutdown_timeout_s=5.0) as web:
        yield web
        client.gate.set()


@pytest.mark.parametrize("keys", [(), ("key",)])
def test_they_are_absent_unless_switched_on(keys):
    with running(api_keys=keys) as web:
        for path in ADMIN_PATHS:
            for method in ("GET", "POST"):
                for key in ("key", "admin"):
                    answer = web.send(method, path, headers={"Authorization": f"Bearer {key}"})
                    assert answer.status == (404 if key == "key" or not keys else 401)


@pytest.mark.parametrize("keys", [(), ("key",)])
def test_each_needs_the_admin_key(keys):
    client = FakeClient()
    with running(client, api_keys=keys, admin_api_key="admin") as web:
        for path in ADMIN_PATHS:
            for method in ("GET", "POST"):
                for headers in (
                    {},
                    {"Authorization": "Bearer key"},
                    {"Authorization": "Bearer nope"},
                    {"x-admin": "admin"},
                ):
                    refused(web.send(method, path, headers=headers), 401, code="invalid_api_key")
                assert web.send(method, path, headers=ADMIN).status in (200, 405)
        assert web.send("GET", "/v1/models", headers=ADMIN).status == (401 if keys else 200)
    assert {command.name for command in client.commands} == {"sleep", "wake_up", "reset_prefix_cache"}


def test_the_prefix_cache_is_reset_beside_running_requests(web):
    web.client.gate.clear()
    with web.open_stream() as stream:
        web.wait(lambda: web.client.running)
        assert web.post("/reset_prefix_cache", b"", ADMIN).status == 200
        assert web.client.commands == [EngineCommand("reset_prefix_cache")]
        web.client.gate.set()
        assert read_answer(stream).data[-1] == "[DONE]"


def asleep(web) -> bool:
    answers = [web.send(method, "/is_sleeping", headers=ADMIN).json for method in ("GET", "POST")]
    assert answers[0] == answers[1]
    return answers[0]["is_sleeping"]


def test_sleep_ends_running_requests_and_refuses_new_ones(web):
    web.client.gate.clear()
    with web.open_stream() as stream:
        web.wait(lambda: web.client.running)
        assert not asleep(web) and web.post("/sleep", b"", ADMIN).status == 200
        assert asleep(web) and web.client.commands == [EngineCommand("sleep")]
        assert "request_aborted" in read_answer(stream).data[-1]
    answer = web.complete()
    assert answer.status == 503 and answer.error["code"] == "engine_asleep" and answer.headers["retry-after"]
    assert web.send("GET", "/ready").status == 503 and web.send("GET", "/health").status == 200
    web.client.gate.set()
    assert web.post("/wake_up?tags=weights", b"", ADMIN).status == 200
    assert asleep(web) and web.complete().status == 503, "it has its weights, and no cache"
    assert web.post("/wake_up?tags=weights&tags=kv_cache", b"", ADMIN).status == 200
    assert not asleep(web) and web.complete().status == 200 and web.send("GET", "/ready").status == 200


def test_sleep_waits_for_running_requests_where_asked(web):
    web.client.gate.clear()
    with web.open_stream() as stream, web.connect() as sleeping:
        web.wait(lambda: web.client.running)
        sleeping.sendall(request("POST", "/sleep?mode=wait", b"", ADMIN))
        web.wait(lambda: web.server.is_asleep)
        assert web.complete().status == 503 and not web.client.commands
        web.client.gate.set()
        assert read_answer(stream).data[-1] == "[DONE]"
        assert read_answer(sleeping).status == 200
    assert web.client.commands == [EngineCommand("sleep")]


@pytest.mark.parametrize("query", ["?level=2", "?level=x", "?mode=maybe"])
def test_bad_sleep(web, query):
    refused(web.post(f"/sleep{query}", b"", ADMIN), 400, code="invalid_value", param=query[1:].split("=")[0])
    assert web.complete().status == 200


def test_what_the_engine_refuses_is_told(web):
    assert "wrong" in refused(web.post("/wake_up?tags=wrong", b"", ADMIN), 400, code="invalid_value", param=None)
    assert web.complete().status == 200


def test_a_sleep_that_fails_leaves_the_server_awake(web, monkeypatch):
    async def fail(command):
        raise RuntimeError("a bug")

    monkeypatch.setattr(web.client, "command", fail)
    assert web.post("/sleep", b"", ADMIN).status == 500
    assert web.complete().status == 200


def test_load_and_ping():
    client = FakeClient()
    with running(client, api_keys=("key",)) as web:
        for method in ("GET", "POST"):
            assert web.send(method, "/ping").json == web.send("GET", "/health").json == {"status": "ok"}
        assert web.send("GET", "/load").status == 401
        key = {"Authorization": "Bearer key"}
        assert web.send("GET", "/load", headers=key).json == {"server_load": 0}
        client.gate.clear()
        with web.connect() as stream:
            stream.sendall(request("POST", "/v1/completions", {"model": "fake", "prompt": "a"}, key))
            web.wait(lambda: client.running)
            assert web.send("GET", "/load", headers=key).json == {"server_load": 1}
            client.gate.set()
            assert read_answer(stream).status == 200
        web.wait(lambda: web.server.limit.num_admitted == 0)
        client.is_alive = False
        assert web.send("GET", "/ping").status == 503
        client.is_alive = True


def test_the_keys_of_the_command(monkeypatch):
    monkeypatch.delenv("JAXLLM_ADMIN_API_KEY", raising=False)
    assert admin_api_key(False, None) is None and admin_api_key(True, "k") == "k"
    for options in ((True, None), (True, ""), (False, "k")):
        with pytest.raises(ValueError, match="--enable-admin"):
            admin_api_key(*options)
    monkeypatch.setenv("JAXLLM_ADMIN_API_KEY", "e")
    assert admin_api_key(True, None) == "e" and admin_api_key(False, None) is None
    for bad in ("", " ", "k"):
        with pytest.raises(ValueError, match="admin API key"):
            ServerConfig(api_keys=("k",), admin_api_key=bad)
