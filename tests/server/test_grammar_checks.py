"""Grammars that are checked beside everything else: who waits for them, and how many may."""

import threading

import pytest

from jaxllm.grammar.sandbox import GrammarSandbox
from jaxllm.server import grammar_checks
from jaxllm.structured_outputs import StructuredOutputs
from tests.fake_server import request, running
from tests.server.http.test_errors import refused, retryable

KEYS = ("key-one", "key-two")


class Slow:
    """In the place of a sandbox: every check waits for `gate`."""

    def __init__(self):
        self.gate, self.checked = threading.Event(), []

    def knows(self, wanted):
        return False

    def check(self, wanted):
        assert self.gate.wait(30)
        self.checked.append(wanted.regex)


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 5)
    monkeypatch.setattr(grammar_checks, "MAX_WAITING_OF_A_KEY", 3)
    return Slow()


def ask(web, regex="a", key=None):
    connection = web.connect()
    body = {"model": "fake", "prompt": "Hi", "guided_regex": regex}
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    connection.sendall(request("POST", "/v1/completions", body, headers))
    return connection


def test_plain_requests_do_not_wait_for_grammars(slow):
    with running() as web:
        web.server.model.__dict__["grammars"] = slow
        held = [ask(web) for _ in range(5)]
        web.wait(lambda: web.server.grammars.num_waiting == 5)
        assert web.complete().status == web.chat().status == 200
        assert web.post("/tokenize", {"prompt": "x"}).status == 200
        retryable(web.complete(guided_regex="a"), "server_is_overloaded")
        retryable(web.chat(guided_regex="a"), "server_is_overloaded")
        text = web.send("GET", "/metrics").body.decode()
        assert 'model_name="fake",reason="max_waiting_grammars"} 2.0' in text
        for connection in held:
            connection.close()
        web.wait(lambda: web.server.grammars.num_waiting == 0)
        slow.gate.set()
        assert web.complete(guided_regex="b").status == 200
        assert slow.checked in (["b"], ["a", "b"]), "nobody checks for clients that went"


def test_each_key_has_its_share_of_the_places(slow):
    with running(api_keys=KEYS) as web:
        web.server.model.__dict__["grammars"] = slow
        held = [ask(web, key=KEYS[0]) for _ in range(3)]
        web.wait(lambda: web.server.grammars.num_waiting == 3)

        def complete(key):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"model": "fake", "prompt": "Hi", "guided_regex": "a"}
            return web.post("/v1/completions", body, headers)

        message = complete(KEYS[0])
        retryable(message, "server_is_overloaded")
        assert "3 of your grammars" in message.error["message"]
        held.append(ask(web, key=KEYS[1]))
        web.wait(lambda: web.server.grammars.num_waiting == 4)
        slow.gate.set()
        assert complete(KEYS[1]).status == 200
        for connection in held:
            connection.close()


def test_what_was_found_out_is_remembered(monkeypatch):
    asked = []
    real = GrammarSandbox._request
    monkeypatch.setattr(GrammarSandbox, "_request", lambda self, line: asked.append(line) or real(self, line))
    with running() as web:
        for _ in range(3):
            message = refused(web.complete(guided_regex="[a"), 400, code="invalid_value", param="guided_regex")
            assert "the regular expression is not sound" in message
            assert web.complete(guided_regex="[a]").status == 200
        refused(web.chat(guided_regex="(a{1000}){1000}"), 400, code="invalid_value", param="guided_regex")
        refused(web.chat(guided_regex="(a{1000}){1000}"), 400, code="invalid_value", param="guided_regex")
        assert len(asked) == 3


def test_memories_are_bounded_and_a_starved_check_is_none(monkeypatch):
    monkeypatch.setattr("jaxllm.grammar.sandbox._KEPT", 2)
    answers = {"a": {}, "b": {"error": "b is wrong"}, "c": -9, "d": -24}
    sandbox = GrammarSandbox(None)
    asked = []

    def answer(line):
        asked.append(next(name for name in answers if f'"regex": "{name}"'.encode() in line))
        return answers[asked[-1]]

    sandbox._request = answer
    wanted = {name: StructuredOutputs(regex=name) for name in answers}
    sandbox.check(wanted["a"])
    with pytest.raises(ValueError, match="b is wrong"):
        sandbox.check(wanted["b"])
    assert sandbox.knows(wanted["a"])
    with pytest.raises(ValueError, match="b is wrong"):
        sandbox.knows(wanted["b"])
    for name, count in (("c", 2), ("d", 1)):  # killed by the clock, and by its processor time
        for _ in range(2):
            with pytest.raises(ValueError, match="takes too long to compile"):
                sandbox.check(wanted[name])
        assert asked.count(name) == count
    assert not sandbox.knows(wanted["a"]), "the oldest is forgotten"
