"""Required tool calls: what each format's grammar lets through is what its parser takes for calls of the tools."""

import json
import random

import jsonschema
import numpy as np
import pytest
from msgspec import Raw

from jaxllm.grammar.compiler import GrammarCompiler
from jaxllm.grammar.matcher import mask_words
from jaxllm.server.http.errors import APIError
from jaxllm.server.openai.parsing.choose import make_parser
from jaxllm.server.openai.parsing.events import CallArguments, CallStart, Reasoning
from jaxllm.server.openai.parsing.tagged import TAGS
from jaxllm.server.openai.response_format import chat_response_format
from jaxllm.server.openai.schemas import (
    ChatRequest,
    Function,
    FunctionRef,
    Message,
    NamedTool,
    ResponseFormatOption,
    Tool,
)
from jaxllm.text.tokenizer import Tokenizer
from tests.chat_model import backend

SCHEMA = {
    "type": "object",
    "$defs": {"unit": {"enum": ["°C", "K"]}},
    "required": ["days"],
    "additionalProperties": False,
    "properties": {
        "city": {"type": "string", "pattern": "^[a-z ü]{1,5}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 31},
        "unit": {"$ref": "#/$defs/unit"},
        "deep": {"type": "array", "maxItems": 2, "items": {"type": "object", "required": ["on"],
                 "properties": {"on": {"type": "boolean"}}, "additionalProperties": False}},
    },
}  # fmt: skip


def function_of(name: str, parameters: dict, **fields) -> Function:
    return Function(name=name, parameters=Raw(json.dumps(parameters).encode()), **fields)


FORECAST, CLOCK = function_of("forecast", SCHEMA), Function(name="clock")
MARKS = {
    "hermes": [],
    "llama": [],
    "mistral": ["[TOOL_CALLS]"],
    "mistral with names": ["[TOOL_CALLS]", "[ARGS]"],
    "qwen3_coder": [],
    "glm45": [],
    "glm45 with tokens": [*("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")],
    "minimax_m2": [],
    "minimax_m2 with tokens": ["<minimax:tool_call>", "</minimax:tool_call>"],
    "deepseek_v3": [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")],
    "deepseek_v31": ["<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"],  # of which some are no special tokens
    "pythonic": [],
    "openai": ["<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"],
}


def make_tokenizer(marks=()) -> Tokenizer:
    made = backend()
    made.add_special_tokens(list(marks))
    return Tokenizer(made, eos_token="</s>")


def grammar_of(calls, tools, tokenizer, **fields):
    request = ChatRequest(model="m", messages=[Message(role="user", content="Hi")], **fields)
    tools = [Tool(type="function", function=function) for function in tools]
    thoughts = "openai_gptoss" if calls == "openai" else None
    wanted = chat_response_format(request, tools, prompt="", calls=calls, thoughts=thoughts, tokenizer=tokenizer)
    return wanted.wanted


def drawn(grammar, tokenizer, rng, most=3000) -> str:
    """A text of random tokens that the grammar allows."""
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])
    matcher, ids = compiler.compile(grammar).matcher(), []
    masks = np.zeros((1, mask_words(tokenizer.vocab_size)), np.int32)
    while not matcher.is_over and len(ids) < most:
        compiler.fill([(matcher, 0)], masks)
        allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")[: tokenizer.vocab_size])
        token = int(rng.choice(list(allowed)))
        if token == tokenizer.eos_token_id or matcher.may_end and rng.random() < 0.5:
            return tokenizer.decode(ids, skip_special_tokens=False)
        ids.append(token)
        matcher.follow(ids)
        assert matcher.error is None
    assert matcher.may_end
    return tokenizer.decode(ids, skip_special_tokens=False)


def read(text, calls, schemas=None) -> list:
    parser = make_parser("", calls=calls, thoughts=None, schemas=schemas)
    found = []
    for event in parser.push(text) + parser.finish():
        if isinstance(event, CallStart):
            found.append([event.name, ""])
        elif isinstance(event, CallArguments):
            found[-1][1] += event.text
        else:
            assert isinstance(event, Reasoning) or not event.text.strip(), f"{event} in {text!r}"
    return [(name, json.loads(arguments)) for name, arguments in found]


@pytest.mark.parametrize("name", MARKS)
def test_what_the_grammar_allows_is_read_as_calls(name):
    calls, tokenizer, rng = name.split()[0], make_tokenizer(MARKS[name]), random.Random(3)
    schema = SCHEMA
    if calls in TAGS:  # whose strings are any text, unless they are of an enum
        schema = SCHEMA | {"properties": SCHEMA["properties"] | {"city": {"enum": ["Bern"]}}}
    tools = [function_of("forecast", schema)]
    grammar = grammar_of(calls, tools, tokenizer, tool_choice="required")
    for _ in range(6):
        text = drawn(grammar, tokenizer, rng)
        found = read(text, calls, {"forecast": schema})
        assert found, text
        for function, arguments in found:
            assert function == "forecast"
            jsonschema.validate(arguments, schema)


TEXTS = {
    "mistral": '[TOOL_CALLS] [{"name": "forecast", "arguments": {"days": 3}}, {"name": "clock", "arguments": {}}]',
    "mistral with names": '[TOOL_CALLS]forecast[ARGS]{"days": 3}[TOOL_CALLS]clock[ARGS]{}',
    "qwen3_coder": "<tool_call>\n<function=forecast>\n<parameter=city>\nNew <b>\nYork\n</parameter>\n<parameter=days>\n"
    "3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    **dict.fromkeys(
        ["glm45", "glm45 with tokens"],
        "<tool_call>forecast\n<arg_key>city</arg_key>\n<arg_value>New <b>\nYork</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>clock\n</tool_call>",
    ),
    **dict.fromkeys(
        ["minimax_m2", "minimax_m2 with tokens"],
        '<minimax:tool_call>\n<invoke name="forecast">\n<parameter name="city">New <b>\nYork</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>\n'
        '<minimax:tool_call>\n<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
    ),
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>forecast\n```json\n"
    '{"days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>forecast<｜tool▁sep｜>{"days": 3}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "pythonic": '[forecast(days=3, unit="K"), clock()]',
    "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.forecast "
    '<|constrain|>json<|message|>{"days": 3}',
}


def accepts(grammar, tokenizer, text) -> bool:
    inner = GrammarCompiler(tokenizer, 0, [257]).compile(grammar).matcher().inner
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return inner.validate_tokens(tokens) == len(tokens) and inner.consume_tokens(tokens) and inner.is_accepting()


@pytest.mark.parametrize("name", TEXTS)
def test_the_models_own_syntax_is_allowed(name):
    calls, tokenizer, text = name.split()[0], make_tokenizer(MARKS[name]), TEXTS[name]
    grammar = grammar_of(calls, [FORECAST, CLOCK], tokenizer, tool_choice="required")
    assert accepts(grammar, tokenizer, text)
    for wrong in ("Hi", f"Hi{text}", text.replace("days", "weeks"), text.replace("forecast", "other"), text[:-1]):
        assert not accepts(grammar, tokenizer, wrong), wrong
    one = grammar_of(calls, [FORECAST, CLOCK], tokenizer, tool_choice="required", parallel_tool_calls=False)
    assert accepts(one, tokenizer, text) == (calls == "openai")
    named = NamedTool(type="function", function=FunctionRef(name="clock"))
    assert not accepts(grammar_of(calls, [FORECAST, CLOCK], tokenizer, tool_choice=named), tokenizer, text)
    assert len(read(text, calls, {"forecast": SCHEMA})) == (1 if calls == "openai" else 2)


def test_a_format_of_gpt_oss_answers_is_for_its_final_channel():
    tokenizer = make_tokenizer(MARKS["openai"])
    grammar = grammar_of("openai", [CLOCK], tokenizer, response_format=ResponseFormatOption(type="json_object"))
    thought = "<|channel|>analysis<|message|>{Hm<|end|><|start|>assistant"
    assert accepts(grammar, tokenizer, thought + '<|channel|>final<|message|>{"a": 1}')
    assert accepts(grammar, tokenizer, "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}")
    assert not accepts(grammar, tokenizer, thought) and not accepts(grammar, tokenizer, '{"a": 1}')


ODD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}}}


@pytest.mark.parametrize("calls", ["hermes", "pythonic", "qwen3_coder"])
def test_one_tool_with_unsupported_keywords_does_not_keep_the_others_from_being_called(calls):
    tokenizer = make_tokenizer()
    odd = function_of("odd", ODD)
    grammar = grammar_of(calls, [odd, FORECAST], tokenizer, tool_choice="required")
    texts = {
        "hermes": '<tool_call>\n{"name": "odd", "arguments": {"a": [%s]}}\n</tool_call>',
        "pythonic": "[odd(a=[%s])]",
        "qwen3_coder": "<tool_call>\n<function=odd>\n<parameter=a>\n[%s]\n</parameter>\n</function>\n</tool_call>",
    }
    assert accepts(grammar, tokenizer, texts[calls] % "1, 1") and not accepts(grammar, tokenizer, texts[calls] % "true")
    odd.strict = True
    with pytest.raises(APIError, match="tool odd is strict, .* 'uniqueItems' at #/"):
        grammar_of(calls, [odd, FORECAST], tokenizer, tool_choice="required")


@pytest.mark.parametrize(
    ("calls", "parameters", "why"),
    [
        ("pythonic", {"properties": {"a-b": {}}}, "no name in Python"),
        ("pythonic", {"anyOf": [{"type": "object"}]}, "no plain object"),
        ("qwen3_coder", {"oneOf": [{"type": "object"}]}, "no plain object"),
        ("qwen3_coder", {"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, "refers to others"),
    ],
)
def test_what_a_format_can_not_require_is_said_with_the_tools_name(calls, parameters, why):
    tools = [function_of("odd", parameters | {"type": "object"})]
    with pytest.raises(APIError, match=why) as error:
        grammar_of(calls, tools, make_tokenizer(), tool_choice="required")
    assert "odd" in str(error.value)
