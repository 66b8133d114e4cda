"""The server with a real engine: the official client for every route, text equal to the library's, and nothing left
behind. The model is tiny and random; its tokens are bytes."""

import asyncio
import json
import re
import time

import pytest

from jaxllm import AsyncLLM, SamplingParams
from jaxllm.server.engine.in_process import InProcessClient
from tests.chat_model import TEMPLATE, write_model
from tests.fake_server import read_answer, request, running

openai = pytest.importorskip("openai")

SIZES = dict(max_num_seqs=4, max_num_batched_tokens=16, block_size=4, num_blocks=96, max_model_len=128)
GREEDY = dict(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    llm = AsyncLLM(write_model(tmp_path_factory.mktemp("model")), **SIZES)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def web(llm):
    with running(InProcessClient(llm), template=TEMPLATE, max_queued_requests=300, request_timeout_s=200.0) as web:
        yield web
    assert llm.stats().blocks_used == 0
    llm._engine.scheduler.check()


@pytest.fixture(scope="module")
def client(web):
    with openai.OpenAI(base_url=f"{web.url}/v1", api_key="none", max_retries=0, timeout=200) as client:
        yield client


def said(llm, prompt, **fields) -> str:
    """By the library, without a server."""

    async def main():
        async for output in llm.generate(prompt, SamplingParams(ignore_eos=True, **GREEDY | fields)):
            last = output
        return last.outputs[0].text

    return asyncio.run(main())


EXTRA = {"ignore_eos": True}


def test_completions(client, llm):
    answer = client.completions.create(model="fake", prompt="Hello", extra_body=EXTRA, **GREEDY)
    assert answer.choices[0].text == said(llm, "Hello") and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12 and answer.usage.prompt_tokens == 6
    stream = client.completions.create(model="fake", prompt="Hello", stream=True, extra_body=EXTRA, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def test_sleep_and_wake_up(llm, web, client):
    with running(InProcessClient(llm), template=TEMPLATE, admin_api_key="admin") as asleep:
        admin = {"Authorization": "Bearer admin"}
        with asleep.open_stream(max_tokens=100, ignore_eos=True) as stream:
            asleep.wait(lambda: llm.stats().num_running)
            assert asleep.post("/sleep", b"", admin).status == 200
            assert "request_aborted" in read_answer(stream).data[-1]
        assert asleep.send("GET", "/is_sleeping", headers=admin).json == {"is_sleeping": True}
        assert asleep.complete().status == 503
        assert asleep.post("/wake_up?tags=weights", b"", admin).status == 200
        assert asleep.complete().status == 503
        assert asleep.post("/wake_up?tags=nonsense", b"", admin).status == 400
        assert asleep.post("/wake_up", b"", admin).status == 200
        assert asleep.post("/reset_prefix_cache", b"", admin).status == 200
    answer = client.completions.create(model="fake", prompt="Hello", extra_body=EXTRA, **GREEDY)
    assert answer.choices[0].text == said(llm, "Hello")


def test_several_prompts_samples_and_beams(client, llm):
    answer = client.completions.create(model="fake", prompt=["Hello", "By"], n=2, extra_body=EXTRA, **GREEDY)
    expected = [said(llm, "Hello")] * 2 + [said(llm, "By")] * 2
    assert [choice.text for choice in answer.choices] == expected
    beams = EXTRA | {"beam_width": 3}
    answer = client.completions.create(model="fake", prompt="Hello", n=2, extra_body=beams, **GREEDY)
    assert len(answer.choices) == 2
    answer = client.completions.create(model="fake", prompt="Hello", best_of=3, seed=1, max_tokens=4, extra_body=EXTRA)
    assert len(answer.choices) == 1


def test_seeds_give_the_same_text(client):
    def text() -> str:
        fields = dict(seed=7, temperature=1.0, max_tokens=16, extra_body=EXTRA)
        return client.completions.create(model="fake", prompt="Hello", **fields).choices[0].text

    assert text() == text()


def test_echoed_logprobs_are_the_engines(client, llm):
    prompt = llm.tokenizer.encode("Hello")
    fields = dict(prompt=prompt, echo=True, logprobs=3, max_tokens=1, temperature=0.0)
    scores = client.completions.create(model="fake", **fields).choices[0].logprobs
    assert len(scores.tokens) == len(prompt) + 1 and scores.token_logprobs[0] is None

    async def main():
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=3, logprobs=3)
        async for output in llm.generate({"prompt_token_ids": prompt}, params):
            last = output
        return last

    output = asyncio.run(main())
    own = [entries[token].logprob for entries, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    assert scores.token_logprobs[1:-1] == pytest.approx(own, abs=1e-4)
    assert all(-20 < logprob <= 0 for logprob in scores.token_logprobs[1:])
    assert all(1 <= len(top) <= 4 for top in scores.top_logprobs[1:])


def test_a_salt_keeps_the_prefix_cache_apart(llm, web):
    """A prompt that was cached is found by the same salt alone; keys are salts where the server is told so."""

    def num_cached(web, salt=None, key="k") -> int:
        body = {"model": "fake", "prompt": "a prompt of several blocks", "max_tokens": 1, "cache_salt": salt}
        answer = web.post("/v1/completions", body, [("Authorization", f"Bearer {key}")])
        return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    for salt in ("salt-a", "salt-b"):
        assert num_cached(web, salt) == 0 and num_cached(web, salt) > 0
    with running(InProcessClient(llm), api_keys=("k", "l")) as isolated:
        for key in ("k", "l"):
            assert num_cached(isolated, key=key) == 0 and num_cached(isolated, key=key) > 0
        assert num_cached(isolated, "salt-a", key="l") == 0


def test_chat(client):
    messages = [{"role": "user", "content": "Hi"}]
    fields = dict(model="fake", messages=messages, max_completion_tokens=8, temperature=0)
    fields |= dict(logprobs=True, top_logprobs=2)
    answer = client.chat.completions.create(extra_body=EXTRA, **fields)
    assert len(answer.choices[0].logprobs.content) == 8
    text, usage = "", None
    options = {"include_usage": True}
    stream = client.chat.completions.create(stream=True, stream_options=options, extra_body=EXTRA, **fields)
    for chunk in stream:
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == answer.choices[0].message.content and usage.completion_tokens == 8


def test_responses(client):
    fields = dict(model="fake", input="Hi", max_output_tokens=8, temperature=0)
    answer = client.responses.create(**fields)
    events = list(client.responses.create(stream=True, **fields))
    assert events[0].type == "response.created" and events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text == answer.output_text


def test_models(client):
    assert [model.id for model in client.models.list()] == ["fake", "org/alias"]
    assert client.models.retrieve("org/alias").owned_by == "jaxllm"


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError, match="256|128") as caught:
        client.completions.create(model="fake", prompt="x" * 200)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="fake", prompt="x", temperature=3)


def test_async_streams_and_a_cancelled_one(web, llm):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{web.url}/v1", api_key="none", max_retries=0) as client:

            async def one(prompt: str) -> str:
                options = dict(model="fake", prompt=prompt, stream=True, extra_body=EXTRA, **GREEDY)
                return "".join([chunk.choices[0].text async for chunk in await client.completions.create(**options)])

            left = await client.completions.create(
                model="fake", prompt="leaving", max_tokens=110, stream=True, extra_body=EXTRA
            )
            await anext(aiter(left))
            await left.close()
            return await asyncio.gather(*(one(f"prompt {i}") for i in range(6)))

    texts = asyncio.run(main())
    assert texts == [said(llm, f"prompt {i}") for i in range(6)]


def test_token_ids_at_the_edge_hurt_nobody(web, llm):
    """While one client sends ids outside the vocabulary, another's text stays as it is."""
    expected, vocab = said(llm, "neighbour", max_tokens=40), llm.vocab
    body = {"model": "fake", "prompt": "neighbour", "ignore_eos": True, "temperature": 0, "max_tokens": 40}
    with web.connect() as connection:
        connection.sendall(request("POST", "/v1/completions", body))
        for field in ("prompt", "stop_token_ids", "allowed_token_ids", "logit_bias"):
            for bad in (-1, vocab, 2**31 - 1, 2**63):
                value = {str(bad): 1.0} if field == "logit_bias" else [bad]
                assert web.complete(**{field: value}).status == 400
            good = {str(vocab - 1): 1.0} if field == "logit_bias" else [vocab - 1]
            assert web.complete(**{"max_tokens": 1, field: good}).status == 200
        assert read_answer(connection).json["choices"][0]["text"] == expected


def test_leaving_frees_the_blocks(web, llm):
    for stream in (False, True):
        with web.open_stream(stream=stream, max_tokens=100, ignore_eos=True):
            web.wait(lambda: llm.stats().blocks_used > 0)
        web.wait(lambda: llm.stats().blocks_used == 0)
    assert llm.stats().num_running == llm.stats().num_waiting == 0


def test_a_storm_of_clients_that_go(web, llm, monkeypatch):
    """Their blocks are free two steps after the engine was told of the last one."""
    engine, steps, aborts = llm._engine, [], []
    step, drop, pause_s = engine.step, engine.drop, [0.05]  # so that nobody is done before all have come

    def slow_step():
        time.sleep(pause_s[0])
        return [step(), steps.append(engine.stats().blocks_used)][0]

    monkeypatch.setattr(engine, "step", slow_step)
    monkeypatch.setattr(engine, "drop", lambda request_id: [drop(request_id), aborts.append(len(steps))][0])
    connections = [web.open_stream(prompt=f"{i}", max_tokens=100, ignore_eos=True) for i in range(64)]
    web.wait(lambda: llm.stats().num_running == 4 and llm.stats().num_waiting == 60)
    pause_s[0] = 0.0
    connections[0].recv(100)
    for connection in connections:
        connection.close()
    web.wait(lambda: len(aborts) == 64 and llm.stats().blocks_used == 0)
    assert len(steps) <= aborts[-1] + 2 and not any(steps[aborts[-1] + 1 :])
    engine.scheduler.check()
    assert web.complete(max_tokens=3).status == 200


def test_many_at_once(web, llm):
    """More than fit the pool at once: they wait, are preempted, and all finish alike."""

    async def one(i: int) -> dict:
        reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
        body = {"model": "fake", "prompt": f"prompt {i % 6}", "ignore_eos": True, **GREEDY}
        writer.write(request("POST", "/v1/completions", body))
        data = await reader.read()
        writer.close()
        await writer.wait_closed()
        return json.loads(data.partition(b"\r\n\r\n")[2])

    async def all_of_them() -> list[dict]:
        return await asyncio.gather(*(one(i) for i in range(48)))

    answers = asyncio.run(all_of_them())
    expected = [said(llm, f"prompt {i}") for i in range(6)]
    assert [answer["choices"][0]["text"] for answer in answers] == [expected[i % 6] for i in range(48)]


def test_metrics_tell_the_truth(web):
    def value(name: str) -> float:
        lines = web.send("GET", "/metrics").body.decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"jaxllm:{name}[{{ ]", line))

    before = [value("prompt_tokens_total"), value("generation_tokens_total")]
    usage = [web.complete(prompt="x" * i, max_tokens=i, ignore_eos=True).json["usage"] for i in (3, 5, 9)]
    stop = time.monotonic() + 10
    while value("num_requests_running") and time.monotonic() < stop:
        time.sleep(0.05)
    assert value("prompt_tokens_total") - before[0] == sum(each["prompt_tokens"] for each in usage)
    assert value("generation_tokens_total") - before[1] == sum(each["completion_tokens"] for each in usage)
    assert value("num_requests_running") == value("kv_cache_usage_perc") == 0
