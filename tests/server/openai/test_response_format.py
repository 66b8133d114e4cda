"""Structured outputs and forced tool calls through the server: what the engine is asked for, and what comes of it."""

import contextlib
import json
import logging
import re

import jsonschema
import pytest

from jaxllm.grammar.compiler import GrammarCompiler
from jaxllm.server.engine.in_process import InProcessClient
from jaxllm.server.engine.wire import pack_params, unpack_params
from jaxllm.structured_outputs import StructuredOutputs
from jaxllm.text.tokenizer import Tokenizer
from tests.chat_model import TEMPLATE, backend, write_model
from tests.fake_server import FakeClient, running

openai = pytest.importorskip("openai")

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["city", "days"],
    "properties": {"city": {"enum": ["Bern", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
FORECAST = {"type": "function", "function": {"name": "forecast", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "forecast"}}
ARGUMENTS = {"city": "Rome", "days": 3}
HERMES = f'<tool_call>\n{{"name": "forecast", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
LLAMA = f'{{"name": "forecast", "parameters": {json.dumps(ARGUMENTS)}}}'
CALLING = TEMPLATE + "{# <tool_call> #}"
THINKING = CALLING + "{# </think> #}"
JSON = {"type": "json_object"}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
SIZES = dict(max_num_seqs=4, max_num_batched_tokens=16, block_size=4, num_blocks=256, max_model_len=512)


@pytest.fixture(scope="module")
def web():
    with running() as web:
        yield web


def asked(web) -> StructuredOutputs:
    params = web.client.seen[-1][1]
    assert unpack_params(pack_params(params)) == params
    return params.structured_outputs


FIELDS = [
    ({"response_format": JSON}, {"json_object": True}),
    ({"response_format": JSON_SCHEMA}, {"json": SCHEMA}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, {"json_object": True}),
    ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {"json": SCHEMA, "disable_any_whitespace": True},
    ),
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, {"json": SCHEMA, "whitespace_pattern": " ?"}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
]


@pytest.mark.parametrize(("fields", "expected"), FIELDS, ids=lambda value: str(value)[:40])
def test_every_name_is_known(web, fields, expected):
    for ask in (web.complete, web.chat):
        assert ask(**fields).status == 200
        assert asked(web) == StructuredOutputs(**expected)
    assert web.complete(response_format={"type": "text"}).status == 200
    assert asked(web) is None


def test_a_format_in_responses(web):
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    answer = web.post("/v1/responses", {"model": "fake", "input": "Hi", "text": {"format": form}})
    assert answer.json["text"] == {"format": form} and asked(web) == StructuredOutputs(json=SCHEMA)
    form = {"type": "grammar", "grammar": "x"}
    answer = web.post("/v1/responses", {"model": "fake", "input": "Hi", "text": {"format": form}})
    assert answer.status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": "regex"}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"guided_json": 1}, "guided_json"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"guided_regex": "(a{1000}){1000}"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "start: foo"}, "guided_grammar"),
        ({"guided_regex": "a" * (1 << 20) + "a"}, "guided_regex"),
        ({"guided_regex": "a", "response_format": JSON}, "guided_regex"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_forms_are_refused_before_they_queue(web, fields, param):
    before = len(web.client.seen)
    for ask in (web.complete, web.chat):
        for stream in (False, True):
            answer = ask(stream=stream, **fields)
            assert answer.status == 400 and answer.error["code"] == "invalid_value"
            assert answer.error["param"] == param
    assert len(web.client.seen) == before


HOSTILE = {
    "chained rules": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(20_000)) + '\nr20000: "a"',
    "nested groups": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000,
    "chained tokens": "start: T0\n" + "\n".join(f"T{i}: T{i + 1}" for i in range(20_000)) + '\nT20000: "a"',
}
REFERENCES = {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_end_nothing_but_themselves(web, name):
    """They overflow the stack of the library, or don't end."""
    answer = web.complete(guided_grammar=HOSTILE[name])
    assert answer.status == 400 and re.search("too long|too deep|not sound", answer.error["message"])
    assert web.complete(guided_regex="a").status == 200


def test_hostile_schemas(web):
    REFERENCES["$defs"]["d5000"] = {"type": "null"}
    assert web.complete(guided_json=REFERENCES).status == 400
    assert web.complete(guided_regex="a").status == 200


def follows(web, text) -> bool:
    """Whether the grammar that the engine was asked for takes the text to its end."""
    tokenizer = Tokenizer(backend(), eos_token="</s>")
    grammar = GrammarCompiler(tokenizer, 263, ()).compile(asked(web))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    inner = grammar.matcher().inner
    return inner.validate_tokens(tokens) == len(tokens) and inner.consume_tokens(tokens) and inner.is_accepting()


@contextlib.contextmanager
def calling(reply, **settings):
    with running(FakeClient(reply=reply), **{"template": CALLING} | settings) as web:
        yield lambda **fields: web.chat(**{"tools": [FORECAST, CLOCK]} | fields), web


@pytest.mark.parametrize(("parser", "text"), [("hermes", HERMES), ("llama", LLAMA)])
def test_required_and_named_calls(parser, text):
    key = "arguments" if parser == "hermes" else "parameters"
    clock = text.replace("forecast", "clock").replace(json.dumps(ARGUMENTS), "{}")
    with calling(text, tool_call_parser=parser) as (ask, web):
        choice = ask(tool_choice="required").json["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
        assert follows(web, text) and follows(web, clock)
        assert follows(web, f"{text}\n{clock}") == (parser == "hermes")
        for wrong in ("Hi", f"Hi {text}", text.replace("Rome", "Oslo"), text.replace("forecast", "other"), text[:-1]):
            assert not follows(web, wrong)
        choice = ask(tool_choice=NAMED).json["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["message"]["tool_calls"]
        assert follows(web, text) and not follows(web, clock) and not follows(web, f"{text}\n{text}")
        ask(tool_choice="required", parallel_tool_calls=False)
        assert follows(web, clock) and not follows(web, f"{text}\n{text}")
        assert key in text
        ask(tool_choice="auto")
        assert asked(web) is None


def test_a_format_and_tools_leave_the_choice():
    with calling(HERMES) as (ask, web):
        ask(response_format=JSON)
        assert follows(web, HERMES) and follows(web, '{"a": 1}') and not follows(web, "Hi")
        ask(response_format=JSON, tool_choice="none")
        assert asked(web) == StructuredOutputs(json_object=True)
        ask(response_format=JSON, tool_choice="required")
        assert follows(web, HERMES) and not follows(web, '{"a": 1}')


def test_thoughts_are_free():
    thought = '<think>\nHm, 1 < 2: "</b>"\n</think>\n\n'
    with calling(HERMES, template=THINKING) as (ask, web):
        ask(tool_choice="required")
        assert follows(web, HERMES) and follows(web, thought + HERMES) and not follows(web, thought + "Hi")
        ask(tools=None, response_format=JSON_SCHEMA)
        text = json.dumps(ARGUMENTS)
        assert follows(web, text) and follows(web, thought + text) and not follows(web, thought + thought + text)
        ask(tools=None, structured_outputs={"choice": ["yes", "no"]})
        assert follows(web, thought + "no") and not follows(web, thought)
    with calling(HERMES, template=THINKING + "<think>\n") as (ask, web):
        ask(tools=None, guided_regex="[a-z]{3}")
        assert follows(web, "Hm.</think>abc") and follows(web, "Hm.\n</think>\n\nabc") and not follows(web, "abc")


def test_bad_tools_are_refused():
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
    with calling("Hi") as (ask, web):
        answer = ask(tools=[bad], tool_choice="required")
        assert answer.status == 400 and answer.error["param"] == "tools"
        assert ask(tools=[bad]).status == 200, "nobody looks at a schema that is only shown to the model"


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    client = InProcessClient(write_model(tmp_path_factory.mktemp("model")), **SIZES)
    with running(client, template=TEMPLATE, tool_call_parser="hermes", request_timeout_s=200.0) as web:
        yield web
        web.wait(lambda: client.stats().blocks_used == 0)
        client._llm._engine.scheduler.check()


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=200) as client:
        yield client


CHAT = dict(model="fake", messages=[{"role": "user", "content": "Hi"}], temperature=1.5, max_tokens=300, seed=2)


def test_json_from_a_random_model(client):
    answer = client.chat.completions.create(response_format=JSON_SCHEMA, n=3, **CHAT)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    stream = client.chat.completions.create(response_format=JSON_SCHEMA, stream=True, **CHAT)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert len(pieces) > 5 and "".join(pieces) == answer.choices[0].message.content


def test_extras_from_a_random_model(client):
    ask = dict(model="fake", prompt=["Hi", "Ho"], max_tokens=60, temperature=1.5)
    for extra, right in [
        ({"structured_outputs": {"choice": ["left", "right"]}}, r"left|right"),
        ({"guided_regex": "[a-c]{5}"}, "[a-c]{5}"),
        ({"guided_grammar": 'root ::= "a" | "b" "c"', "beam_width": 2, "temperature": 0}, "a|bc"),
        ({"guided_regex": "[a-c]{5}", "best_of": 3, "n": 2}, "[a-c]{5}"),
    ]:
        answer = client.completions.create(**ask | {"extra_body": extra})
        assert all(re.fullmatch(right, choice.text) for choice in answer.choices)
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_forced_calls_from_a_random_model(client):
    ask = CHAT | dict(tools=[FORECAST, CLOCK], parallel_tool_calls=False)
    required = client.chat.completions.create(tool_choice={"type": "function", "function": {"name": "forecast"}}, **ask)
    (choice,) = required.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "stop" and not choice.message.content and call.function.name == "forecast"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    chunks = list(client.chat.completions.create(tool_choice="required", stream=True, **ask | {"tools": [FORECAST]}))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    jsonschema.validate(json.loads("".join(call.function.arguments for call in calls)), SCHEMA)
    assert calls[0].function.name == "forecast" and chunks[-1].choices[0].finish_reason == "tool_calls"


def test_responses_from_a_random_model(client):
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    answer = client.responses.create(model="fake", input="Hi", text=form, max_output_tokens=300)
    assert answer.status == "completed"
    jsonschema.validate(json.loads(answer.output_text), SCHEMA)
    tool = FORECAST["function"] | {"type": "function", "strict": True}
    answer = client.responses.create(
        model="fake", input="Hi", tools=[tool], tool_choice="required", parallel_tool_calls=False, max_output_tokens=300
    )
    (item,) = answer.output
    assert item.type == "function_call" and item.name == "forecast"
    jsonschema.validate(json.loads(item.arguments), SCHEMA)


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_gives_out(live, stream, caplog):
    """It is sound, and has more ways to go on than the library follows."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "^.{1,9}$"} for i in range(900)}}
    caplog.set_level(logging.INFO, "jaxllm")
    answer = live.complete(guided_json=wide, max_tokens=50, stream=stream, temperature=0)
    error = json.loads(answer.data[-1])["error"] if stream else answer.error
    assert answer.status == (200 if stream else 400) and error["code"] == "invalid_value"
    assert "its grammar can't be followed any further: " in error["message"]
    assert f"{answer.headers['x-request-id']}-0 ended: its grammar" in caplog.text


def test_bad_ones_beside_good_ones(live, client):
    good = client.chat.completions.create(response_format=JSON_SCHEMA, stream=True, **CHAT)
    first = next(iter(good))
    assert live.chat(guided_regex="[a").status == live.chat(response_format={"type": "json_schema"}).status == 400
    text = "".join(chunk.choices[0].delta.content or "" for chunk in [first, *good])
    jsonschema.validate(json.loads(text), SCHEMA)
