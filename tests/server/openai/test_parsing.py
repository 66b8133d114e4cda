"""Thoughts and tool calls in a model's text, however it is cut."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.server.openai.parsing.calls import MAX_HELD_CHARS
from jaxllm.server.openai.parsing.choose import make_parser, thinks, tool_format
from jaxllm.server.openai.parsing.events import CallArguments, CallStart, Content, Reasoning

WEATHER = '{"name": "get_weather", "arguments": {"city": "Zür{ich", "days": [1, 2, {"a": "\\"}"}]}}'
ARGUMENTS = {"city": "Zür{ich", "days": [1, 2, {"a": '"}'}]}


def parse(parts, *, tools="hermes", thoughts=False, prompt="") -> dict:
    """What the events of a text in `parts` add up to."""
    parser = make_parser(prompt, has_tools=tools, has_thoughts=thoughts)
    found = {"content": "", "reasoning": "", "calls": []}
    events = [event for part in parts for event in parser.push(part)] + parser.finish()
    for event in events:
        match event:
            case Content(text):
                found["content"] += text
            case Reasoning(text):
                found["reasoning"] += text
            case CallStart(index, name):
                assert index == len(found["calls"]), "calls are numbered in their order"
                found["calls"].append([name, ""])
            case CallArguments(index, text):
                assert index == len(found["calls"]) - 1 and text
                found["calls"][index][1] += text
    found["calls"] = [(name, json.loads(arguments)) for name, arguments in found["calls"]]
    return found


def every_way(text, **options) -> dict:
    """The same, whether the text comes at once, by character, or in two parts."""
    whole = parse([text], **options)
    assert parse(list(text), **options) == whole
    for i in range(1, len(text)):
        assert parse([text[:i], text[i:]], **options) == whole, f"cut at {i}"
    return whole


HERMES = [
    (f"<tool_call>\n{WEATHER}\n</tool_call>", "", [("get_weather", ARGUMENTS)]),
    (f"Let me see.\n<tool_call>{WEATHER}</tool_call>", "Let me see.", [("get_weather", ARGUMENTS)]),
    (f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{WEATHER}</tool_call>\n", "", [("get_weather", ARGUMENTS)] * 2),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", {"a": 1})]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    ('<tool_call>{"id": 7, "name": "f", "arguments": {}, "x": [1, {"}": 2}]}</tool_call>', "", [("f", {})]),
    ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", {})]),
    ("no call, a < b and <tool is none", "no call, a < b and <tool is none", []),
    ("<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    ('<tool_call>{"city": "x"}</tool_call>', '<tool_call>{"city": "x"}</tool_call>', []),
    ('<tool_call>{"name": 7}</tool_call>', '<tool_call>{"name": 7}</tool_call>', []),
    ('<tool_call>{"na', '<tool_call>{"na', []),
    ("ends with <tool_ca", "ends with <tool_ca", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), HERMES, ids=range(len(HERMES)))
def test_hermes(text, content, calls):
    assert every_way(text) == {"content": content, "reasoning": "", "calls": calls}


LLAMA = [
    ('{"name": "f", "parameters": {"a": "b"}}', "", [("f", {"a": "b"})]),
    ('\n {"name": "f", "parameters": {"a": "b"}}\n', "", [("f", {"a": "b"})]),
    ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
    ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": 1}}', "", [("f", {}), ("g", {"x": 1})]),
    ('{"type": "function", "name": "f", "arguments": {}}', "", [("f", {})]),
    ("Just a text.", "Just a text.", []),
    ('A text with {"name": "f"}', 'A text with {"name": "f"}', []),
    ('{"answer": 42}', '{"answer": 42}', []),
    ("{not JSON", "{not JSON", []),
    ("  spaces", "  spaces", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), LLAMA, ids=range(len(LLAMA)))
def test_llama(text, content, calls):
    assert every_way(text, tools="llama") == {"content": content, "reasoning": "", "calls": calls}


THOUGHTS = [
    ("<think>\nHm, <b> or </b>?\n</think>\n\nYes.", "", "Hm, <b> or </b>?", "Yes."),
    ("Hm.\n</think>\n\nYes.", "<think>\n", "Hm.", "Yes."),
    ("Yes.", "<think>\n\n</think>\n\n", "", "Yes."),
    ("No thoughts, <think> is a word.", "", "", "No thoughts, <think> is a word."),
    ("\n<think>a\n\nb</think>c", "", "a\n\nb", "c"),
    ("<think>never ends", "", "never ends", ""),
    ("<think></think>x", "", "", "x"),
    ("<thin", "", "", "<thin"),
]


@pytest.mark.parametrize(("text", "prompt", "reasoning", "content"), THOUGHTS, ids=range(len(THOUGHTS)))
def test_thoughts(text, prompt, reasoning, content):
    found = every_way(text, tools=None, thoughts=True, prompt=prompt)
    assert found == {"content": content, "reasoning": reasoning, "calls": []}


def test_thoughts_before_a_call():
    found = every_way(f"<think>\nI need it.\n</think>\n\n<tool_call>\n{WEATHER}\n</tool_call>", thoughts=True)
    assert found == {"content": "", "reasoning": "I need it.", "calls": [("get_weather", ARGUMENTS)]}


def test_arguments_are_told_as_they_come():
    parser = make_parser("", has_tools="hermes", has_thoughts=False)
    parser.push('<tool_call>{"name": "f", "arguments": {"text": "')
    assert parser.push("abc") == [CallArguments(0, "abc")]
    assert parser.push("def") == [CallArguments(0, "def")]


@given(st.text(alphabet='<>/tol_ca{}[]":, name\\k\n', max_size=60), st.sampled_from(["hermes", "llama", None]))
def test_any_text_is_read_alike_however_it_is_cut(text, tools):
    def told(parts):
        parser = make_parser("", has_tools=tools, has_thoughts=True)
        events = [event for part in parts for event in parser.push(part)] + parser.finish()
        return "".join(event.text for event in events if isinstance(event, Content))

    assert told([text]) == told(list(text))


@pytest.mark.parametrize("tools", ["hermes", "llama"])
def test_hostile_text_takes_linear_time_and_bounded_memory(tools):
    start = time.monotonic()
    head = "<tool_call>" if tools == "hermes" else ""
    for text in ('{"' * 10_000, '{"name": "f", "arguments": ' + "[" * 40_000, "<tool_cal" * 10_000, "\n" * 20_000):
        parse_all(head + text, tools)
    assert time.monotonic() - start < 60
    parser = make_parser("", has_tools=tools, has_thoughts=False)
    events = parser.push(head + '{"x": "' + "y" * (MAX_HELD_CHARS + 10))
    assert any(isinstance(event, Content) for event in events), "no call begins so late"


def parse_all(text, tools):
    parser = make_parser("", has_tools=tools, has_thoughts=True)
    for i in range(0, len(text), 1000):
        parser.push(text[i : i + 1000])
    parser.finish()


def test_formats_are_seen_in_templates():
    qwen, llama = "... <tool_call>\n{{ x }}</tool_call>", '{"name": function name, "parameters": dictionary of'
    assert [tool_format("auto", text) for text in (qwen, llama, "plain")] == ["hermes", "llama", None]
    assert tool_format("none", qwen) is None and tool_format("llama", qwen) == "llama"
    assert thinks("auto", "{{ '</think>' }}") and not thinks("none", "</think>") and thinks("think", "")
