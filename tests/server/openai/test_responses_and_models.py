"""OpenAI's own Python client, as it is and asynchronous, on every route: its types, its streams, its helpers and its
exceptions; with an engine that is scripted. test_server_engine.py has it with one that computes."""

import asyncio
import json

import pytest

from tests.fake_server import FakeClient, running
from tests.server.openai.test_chat import CALL, TOOL_TEMPLATE, WEATHER

openai = pytest.importorskip("openai")

HI = [{"role": "user", "content": "Hi"}]
OPTIONS = dict(api_key="none", max_retries=0, timeout=60)


class Sync:
    def __call__(self, url, work, **options):
        """What `work` returns for a client; of a stream, the list of its items."""
        with openai.OpenAI(base_url=f"{url}/v1", **OPTIONS | options) as client:
            answer = work(client)
            return list(answer) if isinstance(answer, openai.Stream) else answer


class Async:
    def __call__(self, url, work, **options):
        async def main():
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", **OPTIONS | options) as client:
                answer = await work(client)
                return [item async for item in answer] if isinstance(answer, openai.AsyncStream) else answer

        return asyncio.run(main())


@pytest.fixture(params=[Sync, Async], ids=["sync", "async"])
def ask(request):
    return request.param()


@pytest.fixture(scope="module")
def web():
    with running() as web:
        yield web


@pytest.fixture(scope="module")
def tools():
    with running(FakeClient(reply=CALL), template=TOOL_TEMPLATE) as web:
        yield web


def test_completions(ask, web):
    fields = dict(model="fake", prompt=["a", "b"], n=2, logprobs=2, max_tokens=5, seed=3, stop=["%"], user="me")
    answer = ask(web.url, lambda client: client.completions.create(**fields))
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(i, "Hello", "length") for i in range(4)]
    scores = answer.choices[0].logprobs
    assert scores.tokens == list("Hello") and scores.token_logprobs == [-0.5] * 5
    assert scores.text_offset == [0, 1, 2, 3, 4] and all(len(top) == 2 for top in scores.top_logprobs)
    assert answer.usage.completion_tokens == 20 and answer.usage.total_tokens == 20 + answer.usage.prompt_tokens


def test_streamed_completions(ask, web):
    options = {"include_usage": True}
    fields = dict(model="fake", prompt="a", n=2, logprobs=1, max_tokens=5, stream=True, stream_options=options)
    chunks = ask(web.url, lambda client: client.completions.create(**fields))
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        assert chunk.usage is None and "".join(choice.logprobs.tokens) == choice.text
    assert texts == {0: "Hello", 1: "Hello"}
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 10
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_chat(ask, web):
    fields = dict(model="fake", messages=HI, n=2, logprobs=True, top_logprobs=2, max_completion_tokens=5)
    answer = ask(web.url, lambda client: client.chat.completions.create(**fields))
    assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
        (0, "Hello", "length"),
        (1, "Hello", "length"),
    ]
    content = answer.choices[1].logprobs.content
    assert [entry.token for entry in content] == list("Hello") and content[0].bytes == [72]
    assert [len(entry.top_logprobs) for entry in content] == [2] * 5
    assert answer.choices[0].message.tool_calls is None and answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_streamed_chat(ask, web):
    options = {"include_usage": True}
    fields = dict(model="fake", messages=HI, stream=True, stream_options=options, logprobs=True)
    first, *chunks, last = ask(web.url, lambda client: client.chat.completions.create(**fields))
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert last.choices == [] and last.usage.completion_tokens == 12


def test_tool_calls(ask, tools):
    fields = dict(model="fake", messages=HI, tools=[WEATHER], tool_choice="auto")
    (choice,) = ask(tools.url, lambda client: client.chat.completions.create(**fields)).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Well."
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Bern"}
    chunks = ask(tools.url, lambda client: client.chat.completions.create(stream=True, **fields))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function.name == "weather" and calls[0].id and {call.index for call in calls} == {0}
    assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "Bern"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_clients_own_accumulation_of_a_stream(tools):
    """`stream()` puts chunks together and complains of any that don't fit."""
    with openai.OpenAI(base_url=f"{tools.url}/v1", **OPTIONS) as client:
        with client.chat.completions.stream(model="fake", messages=HI, tools=[WEATHER]) as stream:
            kinds = {event.type for event in stream}
            message = stream.get_final_completion().choices[0].message
    assert {"chunk", "content.delta", "tool_calls.function.arguments.delta"} <= kinds
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Bern"}


FLAT = {"type": "function", "name": "weather", "parameters": WEATHER["function"]["parameters"], "strict": False}


def test_responses(ask, web, tools):
    fields = dict(model="fake", input="Hi", instructions="Be brief.", max_output_tokens=5, metadata={"a": "b"})
    answer = ask(web.url, lambda client: client.responses.create(**fields))
    assert answer.output_text == "Hello" and answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens" and answer.metadata == {"a": "b"}
    assert answer.usage.output_tokens == 5 and answer.usage.total_tokens == 5 + answer.usage.input_tokens
    answer = ask(tools.url, lambda client: client.responses.create(model="fake", input="Hi", tools=[FLAT]))
    message, call = answer.output
    assert message.content[0].text == "Well." and call.name == "weather" and answer.status == "completed"
    assert json.loads(call.arguments) == {"city": "Bern"}


def test_streamed_responses(ask, web, tools):
    events = ask(web.url, lambda client: client.responses.create(model="fake", input="Hi", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello, world"
    assert events[-1].response.output_text == "Hello, world"
    fields = dict(model="fake", input="Hi", stream=True, tools=[FLAT])
    events = ask(tools.url, lambda client: client.responses.create(**fields))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == {"city": "Bern"}


def test_the_clients_own_accumulation_of_a_response(web):
    with openai.OpenAI(base_url=f"{web.url}/v1", **OPTIONS) as client:
        with client.responses.stream(model="fake", input="Hi") as stream:
            assert sum(event.type == "response.output_text.delta" for event in stream) == 12
            assert stream.get_final_response().output_text == "Hello, world"


def test_models(ask, web):
    async def names(client):
        return [model.id async for model in client.models.list()]

    work = (lambda client: [model.id for model in client.models.list()]) if isinstance(ask, Sync) else names
    assert ask(web.url, work) == ["fake", "org/alias"]
    assert ask(web.url, lambda client: client.models.retrieve("org/alias")).id == "org/alias"


ERRORS = [
    ("BadRequestError", 400, dict(temperature=3), "invalid_value", "temperature"),
    ("BadRequestError", 400, dict(prompt="x" * 300), "context_length_exceeded", "prompt"),
    ("BadRequestError", 400, dict(stream=True, n=0), "invalid_value", "n"),
    ("NotFoundError", 404, dict(model="other"), "model_not_found", "model"),
    ("InternalServerError", 500, dict(prompt="poison"), "internal_error", None),
]


@pytest.mark.parametrize(("kind", "status", "fields", "code", "param"), ERRORS, ids=range(len(ERRORS)))
def test_errors(ask, web, kind, status, fields, code, param):
    web.client.says = {"poison": RuntimeError("a bug")}
    with pytest.raises(getattr(openai, kind)) as caught:
        ask(web.url, lambda client: client.completions.create(**{"model": "fake", "prompt": "Hi"} | fields))
    error = caught.value
    assert (error.status_code, error.code, error.param) == (status, code, param)
    assert error.request_id.startswith("req_")
    with pytest.raises(openai.NotFoundError):
        ask(web.url, lambda client: client.models.retrieve("no/such"))
    with pytest.raises(openai.NotFoundError):
        ask(web.url, lambda client: client.files.retrieve("file-1"))


def test_keys(ask):
    with running(api_keys=("k",)) as web:
        with pytest.raises(openai.AuthenticationError) as caught:
            ask(web.url, lambda client: client.models.list())
        assert caught.value.code == "invalid_api_key"
        fields = dict(model="fake", prompt="Hi")
        assert ask(web.url, lambda client: client.completions.create(**fields), api_key="k").choices[0].text


def test_a_bug_is_not_tried_again(ask):
    """A 5xx is sent three times by the client, unless it is told that there is no use in it."""
    client = FakeClient(says={"poison": RuntimeError("a bug")})
    with running(client) as web, pytest.raises(openai.InternalServerError):
        fields = dict(model="fake", prompt="poison")
        ask(web.url, lambda client: client.completions.create(**fields), max_retries=2)
    assert len(client.seen) == 1


def test_a_full_queue_is_tried_again(ask):
    client = FakeClient()
    with running(client) as web:
        limit = web.server.limit
        real, limit.max_running, limit.max_queued = limit.max_running, 0, 1
        web.server.limit.num_admitted = 1
        tries = []
        rejected = web.server.metrics.rejected

        def count() -> None:
            tries.append(1)
            limit.num_admitted, limit.max_running = 0, real
            rejected()

        web.server.metrics.rejected = count
        fields = dict(model="fake", prompt="Hi")
        assert ask(web.url, lambda client: client.completions.create(**fields), max_retries=1).choices[0].text
        assert len(tries) == 1


@pytest.mark.parametrize("route", ["completions", "chat", "responses"])
def test_an_error_in_the_middle_of_a_stream(ask, route):
    """An exception, but for responses: there the client hands on the events that tell of it."""
    client = FakeClient(reply="x" * 100)
    with running(client) as web:

        def work(api):
            if route == "completions":
                return api.completions.create(model="fake", prompt="Hi", stream=True, max_tokens=100)
            if route == "chat":
                return api.chat.completions.create(model="fake", messages=HI, stream=True)
            return api.responses.create(model="fake", input="Hi", stream=True)

        async def die():
            while not client.running:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            client.die()

        client.gate.clear()
        dying = asyncio.run_coroutine_threadsafe(die(), web.loop)
        if route == "responses":
            *_, error, failed = ask(web.url, work)
            assert (error.type, error.code) == ("error", "engine_dead")
            assert failed.type == "response.failed" and failed.response.error.message == error.message
        else:
            with pytest.raises(openai.APIError, match="engine stopped"):
                ask(web.url, work)
        dying.result()


def test_a_deadline(ask):
    client = FakeClient()
    with running(client, request_timeout_s=0.2) as web:
        client.gate.clear()
        with pytest.raises(openai.InternalServerError) as caught:
            ask(web.url, lambda client: client.completions.create(model="fake", prompt="Hi"))
        assert caught.value.status_code == 504 and caught.value.code == "deadline_exceeded"
