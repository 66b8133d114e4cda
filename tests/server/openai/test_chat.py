"""/v1/chat/completions and /v1/responses over sockets, with an engine that is scripted."""

import json

import pytest

from tests.chat_model import TEMPLATE
from tests.fake_server import FakeClient, running

TOOL_TEMPLATE = "{% if tools %}<tool_call> {{ tools | tojson }}\n{% endif %}" + TEMPLATE.replace(
    "message.content", "(message.content or '')"
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = 'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.fixture(scope="module")
def web():
    with running() as web:
        yield web


@pytest.fixture
def tools():
    with running(FakeClient(reply=CALL), template=TOOL_TEMPLATE) as web:
        yield web


def seen(web) -> str:
    """The prompt that the engine saw last."""
    return web.server.model.tokenizer.decode(web.client.seen[-1][0], skip_special_tokens=False)


def test_a_conversation(web):
    body = web.chat(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]).json
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert seen(web) == prompt and body["usage"]["prompt_tokens"] == len(web.client.seen[-1][0])
    assert web.client.seen[-1][1].max_tokens is None, "as much as fits"


def test_parts_of_text_are_text(web):
    web.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
    assert "a\nb" in seen(web)


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "http://x"}}, {"type": "input_audio"}])
def test_other_parts_are_refused(web, part):
    answer = web.chat(messages=[{"role": "user", "content": [part]}])
    assert answer.status == 400 and answer.error["param"] == "messages"


def test_a_stream_begins_with_the_role(web):
    chunks = web.chat(stream=True, n=2, stream_options={"include_usage": True}).chunks
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in (0, 1):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == "Hello, world"
        assert own[-1]["delta"] == {} and [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 24
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(web, stream):
    answer = web.chat(logprobs=True, top_logprobs=2, max_tokens=3, stream=stream)
    choices = [c for chunk in answer.chunks for c in chunk["choices"]] if stream else answer.json["choices"]
    content = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in content] == ["H", "e", "l"]
    assert content[0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.5, "bytes": [72]},
            {"token": "A", "logprob": -1.0, "bytes": [65]},
        ],
    }


def test_max_completion_tokens_wins(web):
    assert web.chat(max_tokens=9, max_completion_tokens=2).json["choices"][0]["message"]["content"] == "He"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "pope", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {}}, "stream_options"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "no good"}}]}, "tools[0].function.name"),
        ({"chat_template_kwargs": {"messages": "x"}}, "messages"),
        ({"chat_template_kwargs": {"a": {"b": 1}}}, "chat_template_kwargs[...]"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong(web, fields, param):
    answer = web.chat(**fields)
    assert answer.status == 400 and answer.error["param"] == param, answer.body


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("web_search_options", {"x": 1}),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("chat_template", "{{ 1 }}"),
        ("documents", [{"text": "x"}]),
        ("tools", [WEATHER]),
    ],
)
def test_what_is_not_supported(web, field, value):
    answer = web.chat(**{field: value})
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == ("unsupported_parameter", field)


def test_templates_that_refuse():
    with running(template="{{ raise_exception('no, at /etc/x') }}") as web:
        answer = web.chat()
        assert answer.status == 400 and "refuses the conversation" in answer.error["message"]
    with running(template="{% for i in range(1000000000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}") as web:
        assert web.chat().status == 400
    with running(template=None) as web:
        assert web.chat().status == 400 and web.complete().status == 200


def test_a_tool_call(tools):
    choice = tools.chat(tools=[WEATHER]).json["choices"][0]
    assert '"weather"' in seen(tools)
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"]) == {"city": "Bern"}
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Well."


def test_a_streamed_tool_call(tools):
    chunks = tools.chat(tools=[WEATHER], stream=True).chunks
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["index"] == 0 and calls[0]["function"] == {"name": "weather", "arguments": ""} and calls[0]["id"]
    assert all(set(call) == {"index", "function"} for call in calls[1:]) and len(calls) > 5
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Bern"}
    assert "".join(delta.get("content", "") for delta in deltas) == "Well."
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_no_tools_by_choice(tools):
    message = tools.chat(tools=[WEATHER], tool_choice="none").json["choices"][0]["message"]
    assert message["content"] == CALL and "tool_calls" not in message
    assert "weather" not in seen(tools)


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tool_choice": "auto"}], ids=str)
def test_a_choice_of_tools_that_are_not_there(tools, fields):
    choice = {"type": "function", "function": {"name": "other"}}
    assert tools.chat(tools=[WEATHER], tool_choice=choice).error["code"] == "invalid_value"
    assert tools.chat(**fields).error["param"] == "tool_choice"


def test_one_call_at_a_time(tools):
    tools.client.reply = CALL + CALL
    assert len(tools.chat(tools=[WEATHER]).json["choices"][0]["message"]["tool_calls"]) == 2
    answer = tools.chat(tools=[WEATHER], parallel_tool_calls=False)
    assert len(answer.json["choices"][0]["message"]["tool_calls"]) == 1


def test_a_turn_with_tools_goes_back_in(tools):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
    ]
    assert tools.chat(messages=messages, tools=[WEATHER]).status == 200
    assert "<|im_start|>tool\nRain" in seen(tools)
    call["function"]["arguments"] = "{no JSON"
    assert tools.chat(messages=messages).error["param"] == "messages"


def test_schemas_that_are_too_deep(tools):
    deep = {}
    for _ in range(100):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    assert tools.chat(tools=[tool]).status == 400


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts(stream):
    client = FakeClient(reply="<think>\nHm.\n</think>\n\nYes.")
    with running(client, template=TEMPLATE + "{# </think> #}") as web:
        answer = web.chat(stream=stream)
        choices = [chunk["choices"][0] for chunk in answer.chunks] if stream else answer.json["choices"]
        messages = [choice["delta" if stream else "message"] for choice in choices]
        for name in ("reasoning_content", "reasoning"):
            assert "".join(m.get(name, "") for m in messages) == "Hm."
        assert "".join(m.get("content", "") for m in messages) == "Yes."
        if not stream:
            assert answer.json["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 0


CLOCK = {"type": "function", "function": {"name": "clock"}}


def allowed(*names, mode="auto", is_flat=False) -> dict:
    tools = [{"type": "function", **({"name": name} if is_flat else {"function": {"name": name}})} for name in names]
    inner = {"mode": mode, "tools": tools}
    return {"type": "allowed_tools", **(inner if is_flat else {"allowed_tools": inner})}


def test_some_of_the_tools(tools):
    assert tools.chat(tools=[WEATHER, CLOCK], tool_choice=allowed("weather")).status == 200
    params = tools.client.seen[-1][1]
    assert params.structured_outputs is None
    assert tools.chat(tools=[WEATHER, CLOCK], tool_choice=allowed("weather", mode="required")).status == 200
    grammar = tools.client.seen[-1][1].structured_outputs.grammar
    assert "weather" in grammar and "clock" not in grammar
    flat = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
    choice = allowed("clock", mode="required", is_flat=True)
    assert respond(tools, tools=flat, tool_choice=choice).status == 200
    grammar = tools.client.seen[-1][1].structured_outputs.grammar
    assert "clock" in grammar and "weather" not in grammar


@pytest.mark.parametrize(
    "choice",
    [
        allowed("nope"),
        allowed(),
        allowed("weather", mode="none"),
        allowed("weather", mode=["auto"]),
        {"type": "allowed_tools", "allowed_tools": 7},
        {"type": "allowed_tools", "allowed_tools": {"tools": ["weather"]}},
        {"type": "allowed_tools", "allowed_tools": {"tools": [{"type": "function", "function": "weather"}]}},
        {"type": "allowed_tools", "allowed_tools": {"tools": [{"type": "custom", "name": "weather"}]}},
        {"type": "allowed_tools", "allowed_tools": {"tools": [{"type": "function", "name": ["weather"]}]}},
        {"type": "allowed_tools"},
    ],
    ids=str,
)
def test_wrong_choices_of_tools(tools, choice):
    answer = tools.chat(tools=[WEATHER, CLOCK], tool_choice=choice)
    assert answer.status == 400 and answer.error["param"].startswith("tool_choice")


FORMATS = {
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bern"}}]',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bern</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Bern"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "pythonic": "[weather(city='Bern')]",
    "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Bern"}<|call|>',
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parser", FORMATS)
def test_calls_in_other_formats(parser, stream):
    client = FakeClient(reply=FORMATS[parser], step=3)
    with running(client, tool_call_parser=parser, reasoning_parser="none") as web:
        answer = web.chat(tools=[WEATHER], stream=stream)
        choices = [chunk["choices"][0] for chunk in answer.chunks] if stream else answer.json["choices"]
        messages = [choice["delta" if stream else "message"] for choice in choices]
        calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
        assert "".join(call.get("name", "") for call in calls) == "weather"
        assert json.loads("".join(call["arguments"] for call in calls)) == {"city": "Bern"}
        assert choices[-1]["finish_reason"] == "tool_calls"
        assert "".join(message.get("reasoning", "") for message in messages) == ("Hm." if parser == "openai" else "")
        assert not "".join(message.get("content") or "" for message in messages)
        keeps_tokens = parser not in ("qwen3_coder", "pythonic")
        assert client.seen[-1][1].skip_special_tokens != keeps_tokens, "its marks are special tokens"


def test_gpt_oss_without_tools():
    template = TEMPLATE + "{# <|channel|> <|message|> #}"
    reply = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    with running(FakeClient(reply=reply), template=template) as web:
        message = web.chat().json["choices"][0]["message"]
        assert message["content"] == "Yes." and message["reasoning"] == "Hm."


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_comes_back_under_each_name(name):
    template = "{% for m in messages %}{{ m.reasoning }}|{{ m.reasoning_content }}|{{ m.thinking }}\n{% endfor %}"
    with running(template=template) as web:
        turns = [{"role": "assistant", "content": "x", name: "Hm"}, {"role": "user", "content": "y", name: "no"}]
        assert web.chat(messages=turns).status == 200
        assert "Hm|Hm|Hm\n" in seen(web)


def respond(web, **fields):
    return web.post("/v1/responses", {"model": "fake", "input": "Hi"} | fields)


def events_of(answer) -> list[dict]:
    events = [json.loads(data) for data in answer.data]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [line[7:] for line in answer.body.decode().split("\n") if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    return events


def test_a_response(web):
    body = respond(web, instructions="Be brief.", metadata={"a": "b"}).json
    assert body["object"] == "response" and body["status"] == "completed" and body["metadata"] == {"a": "b"}
    (message,) = body["output"]
    assert message["content"] == [{"type": "output_text", "text": "Hello, world", "annotations": [], "logprobs": []}]
    assert body["usage"]["output_tokens"] == 12 and "Be brief." in seen(web)
    body = respond(web, max_output_tokens=2, model=None).json
    assert body["model"] == "fake"
    assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_response_in_events(web):
    events = events_of(respond(web, stream=True))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    text = "".join(event["delta"] for event in events[4:-4])
    assert text == events[-4]["text"] == events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello, world"


def test_a_response_that_calls_a_tool(tools):
    tool = {"type": "function", **WEATHER["function"]}
    body = respond(tools, tools=[tool]).json
    assert [item["type"] for item in body["output"]] == ["message", "function_call"]
    assert json.loads(body["output"][1]["arguments"]) == {"city": "Bern"}
    events = events_of(respond(tools, tools=[tool], stream=True))
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    done = next(event for event in events if event["type"] == "response.function_call_arguments.done")
    assert "".join(deltas) == done["arguments"]
    turn = [
        {"role": "user", "content": "Weather?"},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "Rain"},
    ]
    assert respond(tools, input=turn).status == 200 and "<|im_start|>tool\nRain" in seen(tools)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("conversation", "c"),
        ("truncation", "auto"),
        ("prompt", {"id": "p"}),
    ],
)
def test_responses_have_no_memory(web, field, value):
    answer = respond(web, **{field: value})
    assert answer.status == 400 and answer.error["code"] == "unsupported_parameter"


def test_a_response_that_fails(web):
    web.client.says = {"poison": RuntimeError("secret")}
    events = events_of(respond(web, input="poison", stream=True))
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert "secret" not in json.dumps(events)
    assert respond(web, input="poison").status == 500
    web.client.says = {}


def test_a_response_that_takes_too_long():
    client = FakeClient()
    with running(client, request_timeout_s=1.5) as web:  # the stream has begun by then, on a busy machine too
        client.gate.clear()
        events = events_of(respond(web, stream=True))
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert events[-1]["response"]["error"]["code"] == "deadline_exceeded"


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\\n' + m['content'] }}<|im_end|>{% endfor %}{# <tool_call> #}"
)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_loop_of_tools_with_a_template_that_adds_contents(content):
    """A turn that only calls tools has an empty content, not none."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [call]} | content,
        {"role": "tool", "tool_call_id": "call_1", "content": "20"},
    ]
    with running(template=CHATML) as web:
        answer = web.chat(messages=turns, tools=[WEATHER])
        assert answer.status == 200, answer.body
        assert "<|im_start|>assistant\n<|im_end|><|im_start|>tool\n20" in seen(web)


WRONG_CHOICES = [
    *(
        {"type": "function", "function": value}
        for value in ("weather", None, ["weather"], {"name": ["weather"]}, {}, 1)
    ),
    *({"type": "function", "name": value} for value in (["weather"], None, {}, 1)),
    *({"type": ["function"]}, {"type": None}, {}, [], 1, True, "weather", {"function": {"name": "weather"}}),
]


@pytest.mark.parametrize("choice", WRONG_CHOICES, ids=str)
def test_a_choice_of_tools_of_the_wrong_shape(tools, choice):
    flat = {"type": "function", "name": "weather", "parameters": {}}
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER]}),
        ("/v1/responses", {"input": "Hi", "tools": [flat]}),
    ):
        answer = tools.post(path, {"model": "fake", "tool_choice": choice} | body)
        assert answer.status == 400 and answer.error["param"].startswith("tool_choice"), (path, answer.body)


def test_an_answer_that_begins_with_the_last_message(web):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well: "}]
    fields = {"messages": turns, "echo": True, "add_generation_prompt": False, "continue_final_message": True}
    assert web.chat(**fields).json["choices"][0]["message"]["content"] == "Well: Hello, world"
    chunks = web.chat(stream=True, **fields).chunks
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Well: Hello, world"
    turns[1]["content"] = [{"type": "text", "text": "Well: "}]
    assert web.chat(**fields).json["choices"][0]["message"]["content"] == "Well: Hello, world"
    assert web.chat(echo=True).json["choices"][0]["message"]["content"] == "Hello, world", "the user's is not repeated"


def test_special_tokens_and_the_end_of_a_conversation(web):
    web.chat()
    plain = web.client.seen[-1][0]
    web.chat(add_special_tokens=True)
    assert web.client.seen[-1][0] == web.server.model.tokenizer.encode("", add_special_tokens=True) + plain
    web.chat(truncate_prompt_tokens=3)
    assert web.client.seen[-1][0] == plain[-3:]


def test_logprobs_of_given_tokens(web):
    b, h = web.server.model.tokenizer.encode("bH", add_special_tokens=False)
    answer = web.chat(logprobs=True, logprob_token_ids=[b], return_tokens_as_token_ids=True, max_tokens=1)
    (entry,) = answer.json["choices"][0]["logprobs"]["content"]
    assert entry["token"] == f"token_id:{h}" and entry["bytes"] == [72]
    assert [top["token"] for top in entry["top_logprobs"]] == [f"token_id:{b}"]
    assert web.chat(logprob_token_ids=[b]).error["param"] == "logprob_token_ids"


def test_prompt_logprobs_are_not_for_streams(web):
    answer = web.chat(prompt_logprobs=1, stream=True)
    assert answer.status == 400 and answer.error["param"] == "prompt_logprobs"


def test_what_a_response_includes(web):
    def ask(*names):
        return web.post("/v1/responses", {"model": "fake", "input": "Hi", "include": names, "max_output_tokens": 2})

    def logprobs(answer):
        return answer.json["output"][0]["content"][0]["logprobs"]

    assert [entry["token"] for entry in logprobs(ask("message.output_text.logprobs"))] == ["H", "e"]
    assert logprobs(ask("reasoning.encrypted_content")) == []
    answer = ask("everything")
    assert answer.status == 400 and answer.error["param"] == "include"
