"""Every row of the table of errors over a raw socket, and the limits that hold before any work is done."""

import json
import logging
import re
import time

import pytest

from jaxllm.engine.schedule.plan import NO_TOKEN, NO_TOKEN_ERRORS
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.server.http import body as body_module
from tests.fake_server import CONFIG, VOCAB, FakeClient, read_answer, request, running

LEAKS = re.compile(r"0x[0-9a-f]{6,}|/[a-z]+/[a-z_/]+\.py|Traceback|secret")


@pytest.fixture(scope="module")
def web():
    with running() as web:
        yield web


def refused(answer, status, type="invalid_request_error", code=None, param=None):
    assert answer.status == status, answer.body
    error = answer.error
    assert (error["type"], error["code"], error["param"]) == (type, code, param), error
    assert answer.headers["x-request-id"].startswith("req_")
    assert not LEAKS.search(answer.body.decode())
    return error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        b"{",
        b'{"a":}',
        b'{"model":"fake","prompt":"x","temperature":NaN}',
        b"\xff\xfe",
        b'{"model":"fake","prompt":"\xff"}',
        b'{"model":"fake","prompt":"\\ud800 half of a pair"}',
        b'{"model":"fake","prompt":"x","no_such":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=range(9),
)
def test_no_json(web, body):
    refused(web.post("/v1/completions", body), 400)


@pytest.mark.parametrize("body", [b"[]", b"1", b'"text"', b"null", b"true"])
def test_no_object(web, body):
    refused(web.post("/v1/completions", body), 400, code="invalid_value")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/detokenize"])
def test_a_missing_field(web, path):
    field = {"/v1/completions": "prompt", "/v1/chat/completions": "messages", "/detokenize": "tokens"}[path]
    message = refused(web.post(path, {"model": "fake"}), 400, code="missing_required_parameter", param=field)
    assert field in message


WRONG = [
    ("n", 0),
    ("n", 129),
    ("n", "1"),
    ("n", 1.5),
    ("n", True),
    ("best_of", 21),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", 2),
    ("max_tokens", -1),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("seed", 2**63),
    ("seed", "x"),
    ("logprobs", 21),
    ("logprobs", -1),
    ("stream", "yes"),
    ("stop_token_ids", "1"),
    ("beam_width", 33),
    ("priority", 2**31),
    ("early_stopping", "sometimes"),
    ("prompt", {"text": "x"}),
    ("model", ""),
    ("echo", 1),
    ("logit_bias", [1]),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: str(value)[:20])
def test_a_wrong_field(web, field, value):
    refused(web.complete(**{field: value}), 400, code="invalid_value", param=field)


@pytest.mark.parametrize("written", [b"3.0", b"3.000", b"3"])
def test_whole_numbers_may_have_a_point(web, written):
    body = b'{"model":"fake","prompt":"x","max_tokens":%s,"n":%s,"seed":%s,"top_k":-1.0}' % ((written,) * 3)
    assert web.post("/v1/completions", body).json["usage"]["completion_tokens"] == 9
    params = web.client.seen[-1][1]
    assert (params.max_tokens, params.n, params.seed, params.top_k) == (3, 3, 3, -1)
    assert {type(value) for value in (params.max_tokens, params.n, params.seed, params.top_k)} == {int}
    body = b'{"model":"fake","input":"x","max_output_tokens":%s}' % written
    assert web.post("/v1/responses", body).json["usage"]["output_tokens"] == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", b"1e400"),
        ("n", b"99999999999999999999999999"),
        ("seed", b"1e30"),
        ("logit_bias", b'{"3": -Infinity}'),
    ],
)
def test_numbers_that_are_none(web, field, value):
    body = b'{"model":"fake","prompt":"x","' + field.encode() + b'":' + value + b"}"
    assert web.post("/v1/completions", body).status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"beam_width": 3, "temperature": 0.7}, "temperature"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["x", [1]]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"beam_width": 3, "n": 3}, "beam_width"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_fields_that_do_not_fit_together(web, fields, param):
    refused(web.complete(**fields), 400, code="invalid_value", param=param)


UNSUPPORTED = [
    ("suffix", "x"),  # of this model
    ("logits_processors", ["os.system"]),
    ("use_beam_search", True),
    ("guided_decoding_backend", "xgrammar"),
    ("prompt_embeds", "AAAA"),
    ("vllm_xargs", {"a": 1}),
    ("request_id", "mine"),
    ("detokenize", False),
]


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_what_asks_for_nothing_is_no_reason_to_refuse(web, value):
    suffix = value if isinstance(value, str) else None
    assert web.complete(suffix=suffix, logits_processors=value, request_id=value).status == 200
    assert web.chat(documents=value, functions=value, audio=value).status == 200


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED, ids=lambda value: str(value)[:20])
def test_what_is_not_supported_is_not_ignored(web, field, value):
    refused(web.complete(**{field: value}), 400, code="unsupported_parameter", param=field)
    assert web.complete(response_format={"type": "text"}).status == 200


@pytest.mark.parametrize("prompt", ["x" * 300, [7] * 300, [[7] * 256]])
def test_a_prompt_that_is_too_long(web, prompt):
    message = refused(web.complete(prompt=prompt), 400, code="context_length_exceeded", param="prompt")
    assert message.startswith("This model's maximum context length is 256 tokens"), "litellm knows it by this"


def test_a_text_that_is_hopelessly_long_is_not_even_tokenized(web, monkeypatch):
    monkeypatch.setattr(type(web.server.model.tokenizer), "encode", lambda *_: pytest.fail("it was tokenized"))
    start = time.monotonic()
    message = refused(web.complete(prompt="x" * 5_000_000), 400, code="context_length_exceeded", param="prompt")
    assert message.startswith("This model's maximum context length is 256 tokens")
    assert time.monotonic() - start < 5


BAD_IDS = [-1, VOCAB, VOCAB + 100, 2**31, 2**63]


@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_token_ids_outside_the_vocabulary(web, field, bad):
    num_seen = len(web.client.seen)
    answer = web.complete(**{field: {str(bad): 1.0} if field == "logit_bias" else [5, bad]})
    assert answer.status == 400 and answer.error["param"].startswith(field)
    assert len(web.client.seen) == num_seen, "the engine never saw it"


@pytest.mark.parametrize("bad", BAD_IDS)
def test_detokenize_checks_ids_too(web, bad):
    assert web.post("/detokenize", {"tokens": [1, bad]}).status == 400


def test_detokenize_and_tokenize_have_the_same_limits(web):
    refused(web.post("/detokenize", {"tokens": [1] * 257}), 400, code="context_length_exceeded", param="tokens")
    answer = web.post("/tokenize", {"prompt": "x" * (CONFIG.max_model_len * 33)})
    refused(answer, 400, code="context_length_exceeded", param="prompt")


def test_too_many_samples_in_all(web):
    refused(web.complete(prompt=["x"] * 20, n=128), 400, code="invalid_value", param="prompt")
    refused(web.complete(prompt=["x"] * 3000), 400, code="invalid_value", param="prompt")


def test_what_the_engine_refuses(web):
    web.client.says = {"Q": ValueError("it has no place for this")}
    refused(web.complete(prompt="Q"), 400, code="invalid_value")
    web.client.says = {}


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v1/completions/", "/v1/../v1/models", "//v1/models"])
def test_unknown_urls(web, path):
    refused(web.send("GET", path), 404)


@pytest.mark.parametrize("name", ["other", "../../etc/passwd", "/etc/passwd", "fake\0", "FAKE"])
def test_unknown_models(web, name):
    refused(web.complete(model=name), 404, code="model_not_found", param="model")


def test_an_unknown_model_card(web):
    refused(web.send("GET", "/v1/models/no/such"), 404, code="model_not_found", param="model")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/completions"), ("DELETE", "/v1/models"), ("POST", "/health")]
)
def test_other_methods(web, method, path):
    answer = web.send(method, path)
    refused(answer, 405)
    assert answer.headers["allow"]


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_other_media_types(web, kind):
    refused(web.post("/v1/completions", {"model": "fake", "prompt": "x"}, [("Content-Type", kind)]), 415)


def test_a_body_that_is_too_big():
    with running(max_body_bytes=1000) as web:
        refused(web.complete(prompt="x" * 2000), 413)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        chunk = b"400\r\n" + b" " * 1024 + b"\r\n"
        refused(web.raw(head + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunk), 413)
        with web.connect() as connection:  # told before it is sent
            connection.sendall(head + b"Content-Length: 99999999\r\nConnection: close\r\n\r\n")
            refused(read_answer(connection), 413)


def test_headers_that_are_too_big(web):
    with web.connect() as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 20))
            answer = read_answer(connection)
            assert answer.status == 400
        except (BrokenPipeError, ConnectionResetError, AssertionError):
            pass  # closed while it was being sent
    assert web.send("GET", "/health").status == 200


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x00\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"], ids=range(3))
def test_what_is_no_http(web, data):
    answer = web.raw(data)
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
    with web.connect() as connection:  # in the middle of a request
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n")
        assert read_answer(connection).status == 400
    assert web.send("GET", "/health").status == 200


def test_the_second_head_of_a_connection_is_given_up_too():
    with running(header_timeout_s=0.3) as web, web.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in connection.recv(1000)
        connection.sendall(b"GET /health HT")
        try:
            while connection.recv(1000):
                pass
        except ConnectionResetError:
            pass


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def until(connection, end: bytes) -> None:
    data = b""
    while not data.endswith(end):
        part = connection.recv(1000)
        assert part, data
        data += part


def test_idle_connections_stay_as_long_as_they_may():
    """Longer than a head may take, and not longer than the keep-alive timeout."""
    with running(header_timeout_s=0.1, keep_alive_timeout_s=30) as web, web.connect() as connection:
        for _ in range(2):
            connection.sendall(HEALTH)
            until(connection, b'"ok"}')
            time.sleep(0.5)
    with running(keep_alive_timeout_s=1) as web, web.connect() as connection:
        connection.sendall(HEALTH)
        until(connection, b'"ok"}')
        assert connection.recv(1000) == b""


def test_the_log_is_not_anyones_to_fill(caplog):
    upgrade = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with running() as web:
        assert web.raw(b"\x16\x03 nonsense\r\n\r\n").status == 400
        with web.connect() as connection:
            connection.sendall(upgrade)
            until(connection, b'"ok"}')
        logging.getLogger("asyncio").warning("socket.send() raised exception.")
        logging.getLogger("asyncio").warning("something else")
    assert caplog.messages == ["something else"]


def test_slow_bodies_and_heads_are_given_up():
    with running(body_timeout_s=0.2, header_timeout_s=0.3) as web:
        with web.connect() as connection:
            connection.sendall(request("POST", "/v1/completions", b"{" * 10)[:-5])
            refused(read_answer(connection), 408)
        with web.connect() as connection:
            connection.sendall(b"GET /health HT")
            assert connection.recv(100) == b"", "closed"


def test_a_body_of_which_nothing_comes_is_given_up(monkeypatch):
    monkeypatch.setattr(body_module, "_IDLE_S", 0.2)
    with running() as web, web.connect() as connection:
        connection.sendall(request("POST", "/v1/completions", b"{" * 1000)[:-1000])
        refused(read_answer(connection), 408)
        web.wait(lambda: web.server.bodies.num_bytes == 0)


def test_connections_have_a_limit():
    with running(max_connections=3) as web:
        held = [web.connect() for _ in range(3)]
        for connection in held:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        with web.connect() as connection:
            try:
                connection.sendall(request("GET", "/health"))
                assert connection.recv(100) == b""
            except ConnectionError:
                pass
        for connection in held:
            connection.close()
        web.wait(lambda: not len(web.client.running))
        assert web.send("GET", "/health").status == 200


def retryable(answer, code):
    refused(answer, 503, type="service_unavailable_error", code=code)
    assert int(answer.headers["retry-after"]) > 0


def test_a_full_queue():
    client = FakeClient()
    with running(client, max_queued_requests=1) as web:
        client.gate.clear()
        held = [web.open_stream() for _ in range(3)]  # two run, one waits
        web.wait(lambda: len(client.running) == 3)
        web.server.model.tokenizer.encode = None  # nothing is worked on
        for _ in range(4):
            retryable(web.complete(), "server_is_overloaded")
        retryable(web.chat(), "server_is_overloaded")
        del web.server.model.tokenizer.encode
        text = web.send("GET", "/metrics").body.decode()
        labels = '{engine="0",model_name="fake",reason="max_num_queued_reqs"}'
        assert f"jaxllm:admission_rejections_total{labels} 5.0" in text
        client.gate.set()
        for connection in held:
            assert read_answer(connection).chunks
            connection.close()
        assert web.complete().status == 200
        refused(web.complete(prompt=["x"] * 4), 400, code="invalid_value", param="prompt")


def test_a_model_that_is_being_loaded():
    client = FakeClient()
    with running(client) as web:
        client.info, info = None, client.info
        retryable(web.complete(), "model_loading")
        assert web.send("GET", "/health").status == 200 and web.send("GET", "/ready").status == 503
        client.info = info
        assert web.complete().status == 200 and web.send("GET", "/ready").status == 200


def test_a_server_that_shuts_down():
    with running() as web:
        web.server.limit.is_draining = True
        retryable(web.complete(), "server_is_overloaded")
        retryable(web.post("/tokenize", {"prompt": "x"}), "server_is_overloaded")
        assert web.send("GET", "/ready").status == 503 and web.send("GET", "/health").status == 200


@pytest.mark.parametrize("by_header", [False, True])
def test_a_deadline(by_header):
    client = FakeClient()
    with running(client, request_timeout_s=600.0 if by_header else 0.2) as web:
        client.gate.clear()
        headers = [("X-Request-Timeout", "0.2")] if by_header else []
        answer = web.post("/v1/completions", {"model": "fake", "prompt": "x"}, headers)
        refused(answer, 504, type="timeout_error", code="deadline_exceeded")
        assert answer.headers["x-should-retry"] == "false"
        answer = web.post("/v1/completions", {"model": "fake", "prompt": "x", "stream": True}, headers)
        assert answer.status == 200
        assert json.loads(answer.data[-1])["error"]["code"] == "deadline_exceeded"
        web.wait(lambda: not client.running)
        assert len(client.aborted) == 2 and web.server.limit.num_admitted == 0


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon", ""])
def test_a_deadline_that_is_none(web, value):
    answer = web.post("/v1/completions", {"model": "fake", "prompt": "x"}, [("X-Request-Timeout", value)])
    refused(answer, 400, code="invalid_value")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", [RuntimeError("a secret at 0xdeadbeef"), ("x", "error")])
def test_the_poison_request_alone_fails(web, stream, failure):
    web.client.says = {"poison": failure}
    answer = web.complete(prompt="poison", stream=stream)
    if stream and answer.status == 200:
        error = json.loads(answer.data[-1])["error"]
        assert all("finish_reason" not in data or '"finish_reason":null' in data for data in answer.data)
    else:
        refused(answer, 500, type="server_error", code="internal_error")
        assert answer.headers["x-should-retry"] == "false"
        error = answer.error
    assert error["code"] == "internal_error" and not LEAKS.search(answer.body.decode())
    assert answer.headers["x-request-id"] in error["message"]
    web.client.says = {}
    assert web.complete().status == 200


def test_a_dead_engine():
    client = FakeClient()
    with running(client) as web:
        client.gate.clear()
        with web.open_stream() as connection:
            web.wait(lambda: client.running)
            client.die()
            error = json.loads(read_answer(connection).data[-1])["error"]
        assert error["code"] == "engine_dead" and error["type"] == "server_error"
        answer = web.complete()
        refused(answer, 500, type="server_error", code="engine_dead")
        assert answer.headers["x-should-retry"] == "false"
        assert web.send("GET", "/health").status == 503 and web.send("GET", "/ready").status == 503


def test_a_hung_engine_and_its_return():
    client = FakeClient()
    with running(client, watchdog_s=2.0) as web:
        client.gate.clear()
        client.silent_s = 1.0
        with web.open_stream() as connection:
            web.wait(lambda: client.running)
            assert web.send("GET", "/health").status == 200
            client.silent_s = 3.0
            error = json.loads(read_answer(connection).data[-1])["error"]
        assert error["code"] == "request_aborted" and error["type"] == "service_unavailable_error"
        assert "no progress for 2 s" in error["message"] and "restart" not in error["message"]
        assert web.send("GET", "/health").status == 503
        retryable(web.complete(), "server_is_overloaded")
        client.silent_s = 0.0
        client.gate.set()
        web.wait(lambda: web.server.is_live)
        assert web.complete().status == 200


def test_labels_come_from_closed_sets(web):
    def series() -> int:
        return len(web.send("GET", "/metrics").body.splitlines())

    def hostile(i: int) -> None:
        web.send(f"M{i}", f"/path{i}")
        web.complete(model=f"model-{i}", user=f"user-{i}")

    hostile(99)
    series()  # which is counted itself
    before = series()
    for i in range(50):
        hostile(i)
    assert series() == before


def test_an_abort_is_no_success():
    client = FakeClient()
    output = RequestOutput(
        request_id="x",
        prompt=None,
        prompt_token_ids=[],
        finished=True,
        outputs=[CompletionOutput(index=0, text="half", finish_reason="abort")],
    )

    async def generate(*_, **__):
        yield output

    client.generate = generate
    with running(client) as web:
        retryable(web.complete(), "request_aborted")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("its grammar can't be followed any further: Parser Error: too many items", 400),
        ("no token of the model's is allowed by its grammar", 400),
        (NO_TOKEN_ERRORS[NO_TOKEN], 400),
        ("the model's logits are not finite (NaN or infinity)", 500),
        ("decoding its text failed: a secret", 500),
    ],
)
def test_a_request_that_ends_with_an_error(error, status, stream, caplog):
    """What its own grammar or parameters lead to is told; the rest is in the log."""
    caplog.set_level(logging.INFO, "jaxllm")
    client = FakeClient()

    async def generate(*_, request_id, **__):
        for text, reason in (("half", None), ("", "error")):
            yield RequestOutput(
                request_id=request_id,
                prompt=None,
                prompt_token_ids=[],
                finished=reason is not None,
                outputs=[CompletionOutput(index=0, text=text, finish_reason=reason)],
                error=None if reason is None else error,
            )

    client.generate = generate
    with running(client) as web:
        answer = web.complete(stream=stream)
        told = json.loads(answer.data[-1])["error"] if stream else answer.error
        assert answer.status == (200 if stream else status)
        assert told["code"] == ("invalid_value" if status == 400 else "internal_error")
        assert (error in told["message"]) == (status == 400)
    request_id = answer.headers["x-request-id"]
    assert f"request cmpl-{request_id}-0 ended: {error}" in caplog.text


def test_a_bug_in_a_route_is_told_like_any_other(monkeypatch):
    def broken():
        raise RuntimeError("a secret at /srv/x.py")

    with running() as web:
        monkeypatch.setattr(web.server.metrics, "render", broken)
        refused(web.send("GET", "/metrics"), 500, type="server_error", code="internal_error")
        assert web.complete().status == 200
