"""/v1/completions and the routes that need no model, over sockets, with an engine that is scripted."""

import re
import threading

import pytest

from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput
from jaxllm.server import server as server_module
from jaxllm.server.http import exchange
from tests.fake_server import FakeClient, read_answer, running
from tests.server.http.test_errors import refused, retryable


@pytest.fixture(scope="module")
def web():
    with running() as web:
        yield web


def ids(web, text="Hi") -> list[int]:
    return web.server.model.tokenizer.encode(text, add_special_tokens=False)


def test_one_prompt(web):
    answer = web.complete()
    assert answer.status == 200 and answer.headers["x-request-id"].startswith("req_")
    body = answer.json
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-") and body["model"] == "fake"
    choice = body["choices"][0]
    assert (choice["text"], choice["index"], choice["finish_reason"]) == ("Hello, world", 0, "stop")
    assert choice["logprobs"] is None
    assert body["usage"]["prompt_tokens"] == 3  # the tokenizer begins with <s>
    assert body["usage"]["completion_tokens"] == 12 and body["usage"]["total_tokens"] == 15


def test_max_tokens_is_sixteen_unless_given(web):
    web.client.reply, before = "x" * 40, web.client.reply
    try:
        assert len(web.complete().json["choices"][0]["text"]) == 16
        answer = web.complete(max_tokens=3).json["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == ("xxx", "length")
    finally:
        web.client.reply = before


def test_a_stream_adds_up_to_the_whole(web):
    answer = web.complete(stream=True)
    chunks = answer.chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello, world"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("continuous", [False, True])
def test_usage_in_a_stream(web, continuous):
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    *chunks, last = web.complete(stream=True, stream_options=options).chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12
    counts = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == (list(range(1, 13)) if continuous else [None] * 12)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_samples_have_their_own_index(web, stream):
    web.client.says = {"one": "1", "two": "22"}
    answer = web.complete(prompt=["one", "two"], n=2, stream=stream)
    choices = [c for chunk in answer.chunks for c in chunk["choices"]] if stream else answer.json["choices"]
    texts = {}
    for choice in choices:
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "1", 1: "1", 2: "22", 3: "22"}
    if not stream:
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert answer.json["usage"]["completion_tokens"] == 6
    web.client.says = {}


def test_token_ids_as_prompts(web):
    assert web.complete(prompt=[72, 105]).status == 200
    assert web.client.seen[-1][0] == [72, 105]
    assert len(web.complete(prompt=[[72], [105]]).json["choices"]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(web, stream):
    fields = dict(prompt=ids(web), echo=True, logprobs=2, max_tokens=2)
    answer = web.complete(stream=stream, **fields)
    choices = [chunk["choices"][0] for chunk in answer.chunks] if stream else answer.json["choices"]
    assert "".join(choice["text"] for choice in choices) == "HiHe"
    merged = {
        name: [item for choice in choices for item in choice["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    assert merged["tokens"] == ["H", "i", "H", "e"]
    assert merged["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert merged["text_offset"] == [0, 1, 2, 3]
    assert merged["top_logprobs"] == [None, {"i": -0.5}, {"H": -0.5, "A": -1.0}, {"e": -0.5, "A": -1.0}]


def test_every_sample_of_a_stream_echoes_the_scores():
    """The engine tells those of the prompt once, with the first of the samples that has a token."""
    client = FakeClient()

    async def generate(token_ids, params, *, request_id, priority):
        scores = [None, *({token: Logprob(-0.5, 1, "p")} for token in token_ids[1:])]
        for index in (0, 1):
            piece = CompletionOutput(
                index=index, text="x", token_ids=[1], logprobs=[{1: Logprob(-1.0, 1, "x")}], finish_reason="stop"
            )
            yield RequestOutput(
                request_id=request_id,
                prompt=None,
                prompt_token_ids=[],
                outputs=[piece],
                finished=index == 1,
                prompt_logprobs=scores if index == 0 else None,
            )

    client.generate = generate
    with running(client) as web:
        chunks = web.complete(prompt=[72, 105], echo=True, logprobs=1, n=2, stream=True).chunks
        assert [c["choices"][0]["logprobs"]["token_logprobs"] for c in chunks] == [[None, -0.5, -1.0]] * 2


def test_scoring_without_output(web):
    answer = web.complete(prompt=ids(web), echo=True, logprobs=1, max_tokens=0).json
    choice = answer["choices"][0]
    assert choice["text"] == "Hi" and choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_and_token_ids(web):
    fields = dict(prompt_logprobs=1, return_token_ids=True, max_tokens=1)
    choice = web.complete(prompt=ids(web), **fields).json["choices"][0]
    first, second = ids(web)
    assert choice["prompt_logprobs"] == [None, {str(second): {"logprob": -0.5, "rank": 1, "decoded_token": "i"}}]
    assert choice["token_ids"] == [first] and choice["prompt_token_ids"] == [first, second]


def test_parameters_reach_the_engine(web):
    fields = dict(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        seed=5,
        stop=["a", "b"],
        repetition_penalty=1.5,
        min_tokens=2,
        stop_token_ids=[3],
        ignore_eos=True,
        logit_bias={"65": 1.5},
        allowed_token_ids=[72, 73],
        bad_words=["z"],
        include_stop_str_in_output=True,
        n=2,
        best_of=3,
    )
    assert web.complete(priority=4, user="me", **fields).status == 200
    _, params, priority = web.client.seen[-1]
    assert priority == 4
    assert params.logit_bias == {65: 1.5}
    for name in set(fields) - {"logit_bias"}:
        assert getattr(params, name) == fields[name], name
    web.complete(beam_width=2, length_penalty=0.5, n=2, max_tokens=4)
    params = web.client.seen[-1][1]
    assert (params.beam_width, params.length_penalty, params.n) == (2, 0.5, 2)


def test_what_the_model_recommends_is_the_default():
    client = FakeClient()
    with running(client, defaults={"temperature": 0.25, "top_k": 9}) as web:
        web.complete(top_k=5)
        params = client.seen[-1][1]
        assert (params.temperature, params.top_k) == (0.25, 5)
        assert web.complete(beam_width=2).status == 200  # which takes no temperature


def test_models(web):
    answer = web.send("GET", "/v1/models").json
    assert [card["id"] for card in answer["data"]] == ["fake", "org/alias"]
    assert answer["data"][0] == {
        "id": "fake",
        "object": "model",
        "created": 7,
        "owned_by": "jaxllm",
        "max_model_len": 256,
    }
    assert web.send("GET", "/v1/models/org/alias").json["id"] == "org/alias"
    assert web.complete(model="org/alias").json["model"] == "org/alias"


def test_tokenize_and_back(web):
    answer = web.post("/tokenize", {"model": "fake", "prompt": "Hi", "return_token_strs": True}).json
    assert answer["count"] == 3 and answer["max_model_len"] == 256 and answer["token_strs"][1:] == ["H", "i"]
    plain = web.post("/tokenize", {"prompt": "Hi", "add_special_tokens": False}).json["tokens"]
    assert plain == answer["tokens"][1:]
    assert web.post("/detokenize", {"tokens": plain}).json == {"prompt": "Hi"}
    chat = web.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json["tokens"]
    text = web.post("/detokenize", {"tokens": chat}).json["prompt"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_the_small_routes(web):
    assert web.send("GET", "/health").status == 200
    assert web.send("GET", "/ready").status == 200
    assert web.send("GET", "/version").json["version"]
    info = web.send("GET", "/tokenizer_info").json
    assert info["model_max_length"] == 256 and "im_start" in info["chat_template"]


def test_unknown_fields_are_ignored(web):
    assert web.complete(store=True, metadata={"a": "b"}, no_such_field={"deep": [1]}).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
    ],
)
def test_the_model_that_is_served_need_not_be_named(web, path, body):
    answer = web.post(path, body)
    assert answer.status == 200 and answer.json["model"] == "fake"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 128, "echo": True, "logprobs": 20},
        {"n": 64, "prompt_logprobs": 20, "prompt": [[7] * 100] * 8, "max_tokens": 1},
        {
            "n": 2,
            "beam_width": 2,
            "logprobs": 1,
            "logprob_token_ids": [*range(128)],
            "prompt": [[7]] * 40,
            "max_tokens": 110,
        },
        {"best_of": 20, "logprobs": 20, "prompt": [[7]] * 10, "max_tokens": None},
        {"logprobs": 20, "prompt": [[7]] * 200, "max_tokens": None},
    ],
    ids=["echo", "prompts", "beams", "samples", "single samples"],
)
def test_more_log_probabilities_than_an_answer_may_have(web, fields):
    """Those of all samples, or beams, of all prompts; of which each alone is within its own limit."""
    body = {"prompt": [[7] * 200] * 2, **fields}
    message = refused(web.post("/v1/completions", body), 400, code="invalid_value", param="logprobs")
    assert re.search(r"may have \d{7,} log-probabilities, more than 1048576", message)


def test_answers_that_are_made_share_a_limit_of_log_probabilities(monkeypatch):
    monkeypatch.setattr(server_module, "_MOST_LOGPROBS", 50)
    client, many = FakeClient(), {"n": 2, "logprobs": 2, "max_tokens": 5}  # 2 samples of 5 tokens with 3 each
    with running(client) as web:
        client.gate.clear()
        with web.open_stream(**many) as held:
            web.wait(lambda: client.running)
            retryable(web.complete(**many), "server_is_overloaded")
            with web.open_stream(logprobs=2) as one:  # which is not counted
                web.wait(lambda: len(client.running) > 1)
                client.gate.set()
                assert read_answer(one).chunks and read_answer(held).chunks
        assert web.complete(**many).status == 200, "its share is back"
        text = web.send("GET", "/metrics").body.decode()
    assert 'admission_rejections_total{engine="0",model_name="fake",reason="max_logprobs"} 1.0' in text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answers_with_log_probabilities_are_made_beside_the_event_loop(web, path, monkeypatch):
    threads, encode = [], exchange._encode
    monkeypatch.setattr(exchange, "_encode", lambda x: [threads.append(threading.current_thread().name), encode(x)][1])
    message = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    loop = {False: None, True: None}
    for wanted in loop:
        threads.clear()
        asked = {"logprobs": (1 if "prompt" in message else True)} if wanted else {}
        assert web.post(path, message | asked | {"max_tokens": 2}).status == 200
        (loop[wanted],) = set(threads)
    assert loop[False] != loop[True]


def test_ids_are_made_here_and_the_clients_is_echoed(web):
    answer = web.send("GET", "/v1/models", headers={"X-Request-Id": "mine-1"}.items())
    assert answer.headers["x-request-id"] != "mine-1" and answer.headers["x-client-request-id"] == "mine-1"
    answer = web.send("GET", "/v1/models", headers={"X-Request-Id": "no good\x7f"}.items())
    assert "x-client-request-id" not in answer.headers


def test_the_offset_of_what_follows_a_token_that_is_not_in_the_text(web):
    """The tokenizer begins with <s>, which the echoed text lacks."""
    choice = web.complete(echo=True, logprobs=0, max_tokens=1).json["choices"][0]
    assert choice["text"] == "HiH" and choice["logprobs"]["tokens"] == ["<s>", "H", "i", "H"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]
    choice = web.complete(prompt="<s>Hi", add_special_tokens=False, echo=True, logprobs=0, max_tokens=1).json[
        "choices"
    ][0]
    assert choice["logprobs"]["text_offset"] == [0, 3, 4, 5]


@pytest.mark.parametrize(("keep", "kept"), [(2, "lo"), (5, "Hello"), (99, "Hello"), (-1, "Hello")])
def test_the_end_of_a_prompt(web, keep, kept):
    answer = web.complete(
        prompt="Hello", add_special_tokens=False, truncate_prompt_tokens=keep, echo=True, max_tokens=1
    )
    assert web.client.seen[-1][0] == ids(web, kept) and answer.json["choices"][0]["text"] == f"{kept}H"
    assert answer.json["usage"]["prompt_tokens"] == len(kept)


def test_the_end_of_a_prompt_that_does_not_fit(web):
    assert web.complete(prompt="x" * 300, truncate_prompt_tokens=-1, max_tokens=1).json["usage"]["prompt_tokens"] == 255
    refused(web.complete(truncate_prompt_tokens=0), 400, code="invalid_value", param="truncate_prompt_tokens")
    answer = web.complete(prompt="x" * 300, truncate_prompt_tokens=270)
    refused(answer, 400, code="context_length_exceeded", param="prompt")


def test_logprobs_of_given_tokens_and_tokens_as_ids(web):
    b, c = ids(web, "bc")
    scores = web.complete(logprobs=1, logprob_token_ids=[b, c], max_tokens=1).json["choices"][0]["logprobs"]
    assert scores["top_logprobs"] == [{"b": -1.0, "c": -1.5, "H": -0.5}]
    params = web.client.seen[-1][1]
    assert params.logprob_token_ids == [b, c] and params.logprobs is None
    scores = web.complete(logprobs=1, return_tokens_as_token_ids=True, max_tokens=1).json["choices"][0]["logprobs"]
    (h,) = ids(web, "H")
    assert scores["tokens"] == [f"token_id:{h}"] and scores["top_logprobs"] == [{f"token_id:{h}": -0.5}]
    assert scores["text_offset"] == [0]
    refused(web.complete(logprob_token_ids=[b]), 400, code="invalid_value", param="logprob_token_ids")
