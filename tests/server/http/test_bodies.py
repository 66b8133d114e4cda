"""The memory that request bodies take: each field's size is known before it becomes objects, and all bodies together
have a budget."""

import tracemalloc

import pytest

from jaxllm.server.config import ServerConfig
from jaxllm.server.http.body import SMALL_BODY_BYTES, BodyBudget
from jaxllm.server.http.errors import APIError
from jaxllm.server.openai.decoding import MAX_FIELD_BYTES, decode
from jaxllm.server.openai.responses_schema import ResponsesRequest
from jaxllm.server.openai.schemas import ChatRequest, CompletionRequest
from tests.fake_server import FakeClient, read_answer, request, running
from tests.server.http.test_errors import refused, retryable

MIB = 1 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"


def many(item: bytes, size: int = 4 * MIB) -> bytes:
    return b",".join([item] * (size // (len(item) + 1)))


HEAVY = {  # what would take twenty times its size as objects
    "structured_outputs": b'{"json":{"enum":[%s]}}' % many(b"{}"),
    "guided_json": b"[%s]" % many(b"[]"),
    "response_format": b'{"type":"json_schema","json_schema":{"schema":{"enum":[%s]}}}' % many(b"{}"),
    "logit_bias": b"{%s}" % b",".join(b'"%d":1' % i for i in range(300_000)),
    "stop": b"[%s]" % many(b'""'),
    "allowed_token_ids": b"[%s]" % many(b"1000"),
    "no_such_field": b"[%s]" % many(b"{}"),
}


@pytest.mark.parametrize("field", HEAVY)
def test_what_is_too_much_never_becomes_objects(field):
    body = b'{"model":"fake","prompt":"a","%s":%s}' % (field.encode(), HEAVY[field])
    decode(CompletionRequest, b'{"model":"fake","prompt":"a"}')  # makes the decoder
    tracemalloc.start()
    try:
        if field == "no_such_field":
            decode(CompletionRequest, body)
        else:
            with pytest.raises(APIError, match=f"{field} has {len(HEAVY[field])} bytes; at most {MAX_FIELD_BYTES} are"):
                decode(CompletionRequest, body)
        assert tracemalloc.get_traced_memory()[1] < MIB // 4
    finally:
        tracemalloc.stop()


TOOL = b'{"type":"function","function":{"name":"f","parameters":{"enum":[%s]}}}'
FLAT_TOOL = b'{"type":"function","name":"f","parameters":{"enum":[%s]}}'


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, b'{"model":"a","prompt":"a","guided_json":{"enum":[%s]}}'),
        (CompletionRequest, b'{"model":"a","prompt":"a","structured_outputs":{"json":{"enum":[%s]}}}'),
        (
            CompletionRequest,
            b'{"model":"a","prompt":"a","response_format":{"type":"x","json_schema":{"schema":{"enum":[%s]}}}}',
        ),
        (ChatRequest, b'{"model":"a","messages":[{"role":"user"}],"tools":[' + TOOL + b"]}"),
        (ResponsesRequest, b'{"model":"a","input":"a","tools":[' + FLAT_TOOL + b"]}"),
        (ResponsesRequest, b'{"model":"a","input":"a","text":{"format":{"type":"json_schema","schema":[%s]}}}'),
    ],
)
def test_schemas_stay_json_while_the_request_lives(kind, body):
    body = body % many(b"{}", MIB // 2)
    decode(kind, body)
    tracemalloc.start()
    try:
        kept = decode(kind, bytearray(body))
        assert tracemalloc.get_traced_memory()[0] < 2 * len(body), kept
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("value", [b'{"a":"\xff"}', b'{"a":1e999}', b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"])
def test_schemas_that_are_no_sound_json(value):
    """They are refused, though they stay JSON for long, and are never repeated."""
    form = b'{"type":"json_schema","name":"x","schema":%s}' % value
    tool = b'{"type":"function","name":"f","parameters":%s}' % value
    with running(tool_call_parser="hermes") as web:
        for body in (
            b'{"model":"fake","prompt":"a","guided_json":%s}' % value,
            b'{"model":"fake","prompt":"a","structured_outputs":{"json":%s}}' % value,
        ):
            assert web.post("/v1/completions", body).status == 400
        for more in (b'"text":{"format":%s}' % form, b'"tools":[%s]' % tool):
            assert web.post("/v1/responses", b'{"model":"fake","input":"a",%s}' % more).status == 400
        body = b'{"model":"fake","input":"a","text":{"format":{"type":"text","a":%s}}}' % value
        answer = web.post("/v1/responses", body)
        assert answer.status == 400 or answer.json["text"]["format"]["type"] == "text"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stop", ["x"] * 5000, "length <= 4096"),
        ("logit_bias", {str(i): 1 for i in range(5000)}, "length <= 4096"),
        ("logprob_token_ids", [1] * 129, "length <= 128"),
        ("structured_outputs", {"choice": ["x"] * 50_001}, "length <= 50000"),
        ("prompt", [1] * (MIB + 1), "length <= 1048576"),
    ],
)
def test_lists_are_bounded(field, value, message):
    with running() as web:
        assert message in refused(web.complete(**{field: value}), 400, code="invalid_value", param=_path(field))


def _path(field: str) -> str:
    return "structured_outputs.choice" if field == "structured_outputs" else field


def test_parts_of_messages_are_bounded_together():
    message = {"role": "user", "content": [{"type": "text", "text": ""}] * 5000}
    with running() as web:
        refused(web.chat(messages=[message] * 2), 400, code="invalid_value", param="messages")
        answer = web.post("/v1/responses", {"input": [message, message]})
        refused(answer, 400, code="invalid_value", param="messages")
        refused(web.post("/tokenize", {"messages": [message] * 2}), 400, code="invalid_value", param="messages")


def test_the_budget_counts_what_is_held():
    budget = BodyBudget(4 * SMALL_BODY_BYTES)
    with budget.open() as first, budget.open() as second:
        first.reserve(2 * SMALL_BODY_BYTES)  # announced
        first.append(b"x" * 100)
        assert budget.num_bytes == 2 * SMALL_BODY_BYTES, "counted once"
        second.append(b"x" * SMALL_BODY_BYTES)
        with pytest.raises(APIError, match="try again later") as error:
            second.append(b"x")  # big now: a quarter is for small ones
        assert error.value.status == 503 and error.value.headers["Retry-After"]
        with budget.open() as third:
            third.append(b"x" * SMALL_BODY_BYTES)
            with budget.open() as fourth, pytest.raises(APIError):
                fourth.append(b"x")
        assert bytes(first.take()) == b"x" * 100 and len(first) == 0
        assert budget.num_bytes == 3 * SMALL_BODY_BYTES, "the request has it still"
    assert budget.num_bytes == 0


def test_all_bodies_share_a_budget():
    """Unfinished ones count with the length that they announce, and finished ones until they are answered."""
    with running(max_body_memory_bytes=12 * MIB) as web:
        bodies, unfinished = web.server.bodies, web.connect()
        unfinished.sendall(HEAD + b"Content-Length: %d\r\n\r\n{" % (8 * MIB))
        web.wait(lambda: bodies.num_bytes == 8 * MIB)
        web.client.gate.clear()
        held = web.open_stream(prompt="x" * 100, user="x" * 500_000)
        web.wait(lambda: web.client.running)
        assert 8 * MIB + 500_000 < bodies.num_bytes < 8 * MIB + 501_000
        big = {"model": "fake", "prompt": "x", "user": "x" * MIB}
        answer = web.post("/v1/completions", big)
        retryable(answer, "server_is_overloaded")
        assert answer.headers["connection"] == "close"
        with web.connect() as chunked:  # which says no length
            chunk = b"10000\r\n" + b" " * (1 << 16) + b"\r\n"
            chunked.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 16)
            retryable(read_answer(chunked), "server_is_overloaded")
        text = web.send("GET", "/metrics").body.decode()
        assert 'jaxllm:admission_rejections_total{engine="0",model_name="fake",reason="max_body_memory"} 2.0' in text
        web.client.gate.set()
        assert read_answer(held).chunks and web.complete().status == 200, "small ones have room"
        unfinished.close()
        held.close()
        web.wait(lambda: bodies.num_bytes == 0)
        assert web.post("/v1/completions", big).status == 200
    with pytest.raises(ValueError, match="max_body_memory_bytes=8388608 is too little .* give 12582912 or more"):
        ServerConfig(max_body_memory_bytes=8 * MIB)


def test_a_client_that_goes_gives_its_share_back():
    client = FakeClient()
    with running(client) as web:
        client.gate.clear()
        for _ in range(3):
            web.open_stream(user="x" * 1000).close()
        with web.connect() as connection:
            connection.sendall(request("POST", "/v1/completions", b"{" * 1000)[:-5])
        web.wait(lambda: web.server.bodies.num_bytes == 0 and not client.running)


def test_big_bodies_are_decoded_beside_the_event_loop(monkeypatch):
    import threading

    from jaxllm.server import server

    names = []

    def noting(kind, body):
        names.append(threading.current_thread().name)
        return decode(kind, body)

    monkeypatch.setattr(server, "decode", noting)
    with running() as web:
        assert web.complete(user="x" * SMALL_BODY_BYTES).status == web.complete().status == 200
    assert names[0].startswith("jaxllm-decode") and not names[1].startswith("jaxllm-decode")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Content-Encoding", "gzip")], 415),
        ([("Content-Encoding", "identity")], 200),
        ([("content-type", "text/plain")], 415),  # beside the other
    ],
)
def test_other_encodings_and_two_types(headers, status):
    with running() as web:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers).encode()
        body = b'{"model":"fake","prompt":"x"}'
        answer = web.raw(HEAD + lines + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert answer.status == status
        if status == 415:
            assert headers[0][1] in refused(answer, 415)


def test_two_ways_to_say_where_a_body_ends():
    """The connection ends, or what a proxy takes for the body would be answered as the next request."""
    body = b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = HEAD.replace(b"Connection: close\r\n", b"") + b"Transfer-Encoding: chunked\r\n"
    with running() as web:
        answer = web.raw(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        refused(answer, 400)
        assert answer.body.count(b"HTTP/1.1") == 0 and answer.headers["connection"] == "close"


@pytest.mark.parametrize("lines", [b"X: " + b"x" * 70_000 + b"\r\n", b"X: yyyy\r\n" * 9000])
def test_heads_that_are_too_long_though_they_come_at_once(lines):
    with running() as web:
        answer = web.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n")
        assert answer.status in (400, 431) and answer.headers["connection"] == "close"
    with running(max_header_bytes=1000) as web:
        assert web.send("GET", "/health").status == 200
        refused(web.send("GET", "/health?" + "x" * 980), 431)
