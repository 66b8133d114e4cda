"""Thoughts and tool calls in a model's text, however it is cut."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.server.openai.parsing.calls import MAX_HELD_CHARS
from jaxllm.server.openai.parsing.choose import make_parser, thought_format, tool_format
from jaxllm.server.openai.parsing.events import CallArguments, CallStart, Content, Reasoning
from jaxllm.server.openai.parsing.literals import as_json
from jaxllm.text.chat_template import ChatTemplates

TEMPLATES = Path(__file__).parents[2] / "chat_templates"

WEATHER = '{"name": "get_weather", "arguments": {"city": "Zür{ich", "days": [1, 2, {"a": "\\"}"}]}}'
ARGUMENTS = {"city": "Zür{ich", "days": [1, 2, {"a": '"}'}]}


THINK = {False: None, True: "think", "mistral": "mistral", "openai_gptoss": "openai_gptoss"}
# Beginnings of calls.
HEADS = {
    "hermes": ["<tool_call>", '<tool_call>{"x": "', '<tool_call>{"name": "f", "arguments": {"a": "'],
    "llama": ["", '{"x": "', '{"name": "f", "arguments": {"a": "'],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] [",
        '[TOOL_CALLS][{"name": "f", "arguments": {"',
        '[TOOL_CALLS]f[ARGS]{"',
    ],
    "qwen3_coder": [
        "<tool_call>",
        "<function=",
        "<function=f>",
        "<function=f><parameter=",
        "<function=f><parameter=a>",
    ],
    "glm45": [
        "<tool_call>",
        "<tool_call>f\n<arg_key>",
        "<tool_call>f\n<arg_key>a</arg_key>",
        "<tool_call>f\n<arg_key>a</arg_key><arg_value>",
    ],
    "minimax_m2": ["<minimax:tool_call>", '<invoke name="', '<invoke name="f"><parameter name="a">'],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{",
    ],
    "deepseek_v31": ["<｜tool▁call▁begin｜>f<｜tool▁sep｜>", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "'],
    "pythonic": ["[", "[f(", "[f(a=", '[f(a="', "[f(a=[", "[f(a=b, "],
    "openai": [
        "<|start|>assistant",
        "<|channel|>analysis<|message|>",
        "<|channel|>commentary to=functions.f<|message|>",
    ],
}
HOSTILE = (
    *('{"' * 1000, '{"name": "f", "arguments": ' + "[" * 2000, "<tool_cal" * 1000, "\n" * 2000),
    *("<｜tool▁c" * 1000, "<parameter=" * 1000, "\n</function>\n" * 500, "[TOOL_CALLS]" * 500, "<|start|" * 1000),
    *("<arg_key>" * 1000, "</arg_key>" * 1000, '<parameter name="' * 1000),
    *("\\" * 2000, "'" * 2000, "1" * 2000, "f(a=" * 1000, "<|start|>" * 1000),
)


def parse(parts, *, tools="hermes", thoughts=False, prompt="", schemas=None) -> dict:
    """What the events of a text in `parts` add up to."""
    parser = make_parser(prompt, calls=tools, thoughts=THINK[thoughts], schemas=schemas)
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


def test_thoughts_of_mistrals():
    found = every_way(f"[THINK]Hm, [TH]?[/THINK]Yes.[TOOL_CALLS][{WEATHER}]", tools="mistral", thoughts="mistral")
    assert found == {"content": "Yes.", "reasoning": "Hm, [TH]?", "calls": [("get_weather", ARGUMENTS)]}
    assert every_way("Hm[/THINK]Yes", tools=None, thoughts="mistral", prompt="[/INST][THINK]")["reasoning"] == "Hm"
    assert thought_format("auto", "[THINK] [/THINK]") == "mistral"


MISTRAL = [
    (f"[TOOL_CALLS][{WEATHER}]", "", [("get_weather", ARGUMENTS)]),
    (f"[TOOL_CALLS] [{WEATHER}, {WEATHER}]", "", [("get_weather", ARGUMENTS)] * 2),
    (f"Well. [TOOL_CALLS] [{WEATHER}]\n", "Well.", [("get_weather", ARGUMENTS)]),
    ('[TOOL_CALLS][{"arguments": {"name": "x"}, "name": "f", "id": "abcdefghi"}]', "", [("f", {"name": "x"})]),
    ('[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", {})]),
    ('[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]}"}', "", [("f", {"a": "[TOOL_CALLS]}"})]),
    ('[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}', "", [("f", {"a": 1}), ("g", {})]),
    (
        '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": [{"b": "\\""}]}[TOOL_CALLS]g[ARGS]{}',
        "",
        [("f", {"a": [{"b": '"'}]}), ("g", {})],
    ),
    ("no call [TOOL", "no call [TOOL", []),
    ("[TOOL_CALLS] I will not", "[TOOL_CALLS] I will not", []),
    ("[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]", []),
    ('[TOOL_CALLS][{"na', '[TOOL_CALLS][{"na', []),
    ("[TOOL_CALLS]two words{}", "[TOOL_CALLS]two words{}", []),
    ("Some [ARGS] alone {}", "Some [ARGS] alone {}", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), MISTRAL, ids=range(len(MISTRAL)))
def test_mistral(text, content, calls):
    assert every_way(text, tools="mistral") == {"content": content, "reasoning": "", "calls": calls}


CODER_SCHEMAS = {
    "f": {
        "$defs": {"n": {"type": "integer"}},
        "properties": {
            "s": {"type": "string"},
            "n": {"$ref": "#/$defs/n"},
            "x": {"type": "number"},
            "b": {"type": "boolean"},
            "o": {"type": "object"},
            "l": {"anyOf": [{"type": "array"}, {"type": "null"}]},
            "e": {"enum": ["1", "2"]},
            "u": {"type": ["integer", "string"]},
        },
    }
}


def coder(**values) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


CODER = [
    (coder(s="Zürich"), "", [("f", {"s": "Zürich"})]),
    (coder(s='a "b"\n\nc\n', n="3"), "", [("f", {"s": 'a "b"\n\nc\n', "n": 3})]),
    (
        coder(s="<b> </p> </parameter", n="-4.0", x="2.5", b="True"),
        "",
        [("f", {"s": "<b> </p> </parameter", "n": -4, "x": 2.5, "b": True})],
    ),
    (
        coder(o='{"a": [1, null]}', l="None", e="1", u="7"),
        "",
        [("f", {"o": {"a": [1, None]}, "l": None, "e": "1", "u": 7})],
    ),
    (
        coder(o="{'a': True}", l="[1,]", u="seven", b="no"),
        "",
        [("f", {"o": {"a": True}, "l": [1], "u": "seven", "b": "no"})],
    ),
    (coder(other="5", s=""), "", [("f", {"other": "5", "s": ""})]),
    (f"I look.\n{coder(s='a')}\n{coder(s='b')}\n", "I look.", [("f", {"s": "a"}), ("f", {"s": "b"})]),
    ("<function=f>\n<parameter=n>5</parameter>\n</function>", "", [("f", {"n": 5})]),
    ("<tool_call>\n<function=f>\n</function>\n</tool_call>Done", "Done", [("f", {})]),
    ("<tool_call>\n<function=f>\n<parameter=n>\n5\n</function>\n</tool_call>", "", [("f", {"n": 5})]),
    ("<tool_call> nothing", "<tool_call> nothing", []),
    ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ("<function=a b>x", "<function=a b>x", []),
    ("1 < 2 <func", "1 < 2 <func", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), CODER, ids=range(len(CODER)))
def test_qwen3_coder(text, content, calls):
    found = every_way(text, tools="qwen3_coder", schemas=CODER_SCHEMAS)
    assert found == {"content": content, "reasoning": "", "calls": calls}


def glm(**values) -> str:
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>f\n{inner}</tool_call>"


GLM = [
    (glm(s="Zürich", n="3", o='{"a": [1, null]}'), "", [("f", {"s": "Zürich", "n": 3, "o": {"a": [1, None]}})]),
    (glm(s="\nline\n", other="5"), "", [("f", {"s": "\nline\n", "other": "5"})]),
    (glm(s="a </arg_key> <b> </tool_call"), "", [("f", {"s": "a </arg_key> <b> </tool_call"})]),
    (f"I look.\n{glm(s='a')}\n{glm(b='true')}\n", "I look.", [("f", {"s": "a"}), ("f", {"b": True})]),
    ("<tool_call>f</tool_call>Done", "Done", [("f", {})]),
    ("<tool_call>\nf <arg_key>n</arg_key> <arg_value>5</arg_value> </tool_call>", "", [("f", {"n": 5})]),
    ("<tool_call>f<arg_key>n</arg_key><arg_value>5</arg_value><arg_key>s</arg_key></tool_call>", "", [("f", {"n": 5})]),
    ('<tool_call>\n{"name": "f"}\n</tool_call>', '<tool_call>\n{"name": "f"}\n</tool_call>', []),
    ("<tool_call>two words\n", "<tool_call>two words\n", []),
    ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ("a <tool_ca", "a <tool_ca", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), GLM, ids=range(len(GLM)))
def test_glm45(text, content, calls):
    found = every_way(text, tools="glm45", schemas=CODER_SCHEMAS)
    assert found == {"content": content, "reasoning": "", "calls": calls}


def invoke(**values) -> str:
    inner = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
    return f'<invoke name="f">\n{inner}</invoke>\n'


def minimax(*invokes) -> str:
    return f"<minimax:tool_call>\n{''.join(invokes)}</minimax:tool_call>"


MINIMAX = [
    (minimax(invoke(s="Zürich", n="3", l="null")), "", [("f", {"s": "Zürich", "n": 3, "l": None})]),
    (minimax(invoke(s="\na\n"), invoke()), "", [("f", {"s": "\na\n"}), ("f", {})]),
    (f"See.\n\n{minimax(invoke(b='True'))}\n", "See.", [("f", {"b": True})]),
    (minimax(invoke(s="a")) + minimax(invoke(s="b")), "", [("f", {"s": "a"}), ("f", {"s": "b"})]),
    ("<minimax:tool_call>\nno", "<minimax:tool_call>\nno", []),
    ('<invoke name="a b">x', '<invoke name="a b">x', []),
]


@pytest.mark.parametrize(("text", "content", "calls"), MINIMAX, ids=range(len(MINIMAX)))
def test_minimax_m2(text, content, calls):
    found = every_way(text, tools="minimax_m2", schemas=CODER_SCHEMAS)
    assert found == {"content": content, "reasoning": "", "calls": calls}


V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n%s\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
ALL = "<｜tool▁calls▁begin｜>%s<｜tool▁calls▁end｜>"
FENCED = '{"code": "```json\\n```"}'
DEEPSEEK = [
    (ALL % (V3 % '{"a": 1}'), "", [("f", {"a": 1})]),
    (ALL % (V3 % FENCED + "\n" + V3 % "{}"), "", [("f", {"code": "```json\n```"}), ("f", {})]),
    ("Let me see.\n" + ALL % (V3 % "{}"), "Let me see.", [("f", {})]),
    (ALL % (V31 % '{"a": 1}'), "", [("f", {"a": 1})]),
    (ALL % (V31 % FENCED + V31 % "{}") + "\n", "", [("f", {"code": "```json\n```"}), ("f", {})]),
    (V31 % "{}", "", [("f", {})]),
    ("<｜tool▁calls▁begin｜>no", "<｜tool▁calls▁begin｜>no", []),
    (ALL % "", ALL % "", []),
    ("<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>", []),
    ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>g", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>g", []),
    ("a <｜tool▁ca", "a <｜tool▁ca", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), DEEPSEEK, ids=range(len(DEEPSEEK)))
def test_deepseek(text, content, calls):
    assert every_way(text, tools="deepseek_v3") == {"content": content, "reasoning": "", "calls": calls}


PYTHONIC = [
    ("[f(a=1)]", "", [("f", {"a": 1})]),
    ("[f(a='x', b=\"y\"), g()]", "", [("f", {"a": "x", "b": "y"}), ("g", {})]),
    ("<|python_start|>[f(a=1)]<|python_end|>", "", [("f", {"a": 1})]),
    (
        "[user.add(name='Do\\'e', age=9, at={'city': 'LA', 1: (2, 3,)}, role=None, ok=True, x=-1.5e3, l=[])]",
        "",
        [
            (
                "user.add",
                {
                    "name": "Do'e",
                    "age": 9,
                    "at": {"city": "LA", "1": [2, 3]},
                    "role": None,
                    "ok": True,
                    "x": -1500,
                    "l": [],
                },
            )
        ],
    ),
    ("[f(s='\\n\\x41\\u00fc\\q\\\\', t=true, n=null)]\n", "", [("f", {"s": "\nAü\\q\\", "t": True, "n": None})]),
    ("[ f ( a = 1 , ) ]", "[ f ( a = 1 , ) ]", []),
    ("[f( a = 1, )]", "", [("f", {"a": 1})]),
    ("[f(a=1)] and more", " and more", [("f", {"a": 1})]),
    ("[1, 2, 3]", "[1, 2, 3]", []),
    ("[note] (x=1)", "[note] (x=1)", []),
    ("[f(1)]", "[f(1)]", []),
    ("A list: [f(a=1)]", "A list: [f(a=1)]", []),
    ("  Hello", "  Hello", []),
    ("[f(a", "[f(a", []),
    ("<|python_st", "<|python_st", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), PYTHONIC, ids=range(len(PYTHONIC)))
def test_pythonic(text, content, calls):
    assert every_way(text, tools="pythonic") == {"content": content, "reasoning": "", "calls": calls}


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine draws slowly
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    )
)
def test_literals_of_python_become_json(value):
    assert json.loads(as_json(repr(value))) == value


THOUGHT = "<|channel|>analysis<|message|>Hm, 1 < 2.<|end|>"
CALLED = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "<|x"}<|call|>'
GPT_OSS = [
    (f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>Yes.<|return|>", "Hm, 1 < 2.", "Yes.", []),
    (f"{THOUGHT}{CALLED}", "Hm, 1 < 2.", "", [("f", {"a": "<|x"})]),
    (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", "", [("f", {"a": 1})]),
    (f"<|channel|>commentary<|message|>I plan.<|end|>{CALLED}{CALLED}", "", "I plan.", [("f", {"a": "<|x"})] * 2),
    (f"{THOUGHT}<|start|>assistant{THOUGHT}", "Hm, 1 < 2.\nHm, 1 < 2.", "", []),
    (
        f"{THOUGHT}<|start|>assistant<|channel|>analysis to=python<|message|>print()<|call|>",
        "Hm, 1 < 2.\nprint()",
        "",
        [],
    ),
    ("<|channel|>final<|message|>Cut <|en", "", "Cut <|en", []),
    ("No channels at all", "", "No channels at all", []),
    ("<|channel|>analysis<|message|>Cut", "Cut", "", []),
    ("<|channel|>anal", "", "", []),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), GPT_OSS, ids=range(len(GPT_OSS)))
def test_gpt_oss(text, reasoning, content, calls):
    found = every_way(text, tools="openai", prompt="<|start|>user<|message|>Hi<|end|><|start|>assistant")
    assert found == {"content": content, "reasoning": reasoning, "calls": calls}


def test_gpt_oss_in_the_middle_of_a_message():
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>Well"
    found = every_way(", yes.<|end|>", tools=None, thoughts="openai_gptoss", prompt=prompt)
    assert found == {"content": "", "reasoning": ", yes.", "calls": []}
    ended = "<|start|>assistant<|channel|>analysis<|message|>Well<|end|>"
    found = every_way("<|start|>assistant<|channel|>final<|message|>Yes", tools="openai", prompt=ended)
    assert found == {"content": "Yes", "reasoning": "", "calls": []}


def test_gpt_oss_without_tools_has_no_calls():
    assert every_way(CALLED, tools=None, thoughts="openai_gptoss")["content"] == '{"a": "<|x"}'


def test_thoughts_before_a_call():
    found = every_way(f"<think>\nI need it.\n</think>\n\n<tool_call>\n{WEATHER}\n</tool_call>", thoughts=True)
    assert found == {"content": "", "reasoning": "I need it.", "calls": [("get_weather", ARGUMENTS)]}


def test_arguments_are_told_as_they_come():
    parser = make_parser("", calls="hermes", thoughts=None)
    parser.push('<tool_call>{"name": "f", "arguments": {"text": "')
    assert parser.push("abc") == [CallArguments(0, "abc")]
    assert parser.push("def") == [CallArguments(0, "def")]


@given(st.text(alphabet='<>/tol_ca{}[]":, name\\k\n', max_size=60), st.sampled_from([*HEADS, None]))
def test_any_text_is_read_alike_however_it_is_cut(text, tools):
    def told(parts):
        parser = make_parser("", calls=tools, thoughts="think")
        events = [event for part in parts for event in parser.push(part)] + parser.finish()
        return "".join(event.text for event in events if isinstance(event, Content))

    assert told([text]) == told(list(text))


@pytest.mark.parametrize("tools", HEADS)
def test_hostile_text_takes_linear_time_and_bounded_memory(tools):
    start = time.monotonic()
    for head in HEADS[tools]:
        for text in HOSTILE:
            parse_all(head + text, tools)
            parse_all(text + head * 10, tools)
    assert time.monotonic() - start < 60
    if tools != "openai":  # which knows from its head on what follows
        parser = make_parser("", calls=tools, thoughts=None)
        events = parser.push(HEADS[tools][0] + "y" * (MAX_HELD_CHARS + 10))
        assert any(isinstance(event, Content) for event in events), "no call begins so late"


MANY = {
    "hermes": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "llama": '{"name": "f", "parameters": {}}; ',
    "mistral": "[TOOL_CALLS]f{}",
    "qwen3_coder": "<function=f></function>",
    "glm45": "<tool_call>f</tool_call>",
    "minimax_m2": '<invoke name="f"></invoke>',
    "deepseek_v31": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "openai": "<|start|>assistant to=functions.f<|message|>{}<|call|>",
}


@pytest.mark.parametrize("tools", MANY)
def test_many_calls_at_once(tools):
    assert parse([MANY[tools] * 1000], tools=tools)["calls"] == [("f", {})] * 1000


def parse_all(text, tools):
    parser = make_parser("", calls=tools, thoughts="think")
    for i in range(0, len(text), 1000):
        parser.push(text[i : i + 1000])
    parser.finish()


def test_formats_are_seen_in_templates():
    qwen, llama = "... <tool_call>\n{{ x }}</tool_call>", '{"name": function name, "parameters": dictionary of'
    assert [tool_format("auto", text) for text in (qwen, llama, "plain")] == ["hermes", "llama", None]
    assert tool_format("none", qwen) is None and tool_format("llama", qwen) == "llama"
    coder = "<tool_call>\n<function=example>\n<parameter=a>\n"
    assert tool_format("auto", coder) == "qwen3_coder"
    assert tool_format("auto", "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>") == "glm45"
    assert tool_format("auto", "{%- set begin = '<minimax:tool_call>' -%}") == "minimax_m2"
    assert tool_format("auto", "Write [func_name1(a=b), func_name2()]") == "pythonic"
    assert tool_format("auto", "<｜tool▁calls▁begin｜>\n```json\n") == "deepseek_v3"
    assert tool_format("auto", "<｜tool▁calls▁begin｜>") == "deepseek_v31"
    harmony = "<|start|>assistant<|channel|>final<|message|>"
    assert tool_format("auto", harmony) == "openai" and thought_format("auto", harmony) == "openai_gptoss"
    assert thought_format("auto", "{{ '</think>' }}") == "think" and thought_format("think", "") == "think"
    assert thought_format("none", "</think>") is None and thought_format("auto", "") is None


CALL = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
TURN = {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "type": "function", "function": CALL}]}


@pytest.mark.parametrize(
    ("file", "calls", "end"),
    [("qwen", "hermes", "<|im_end|>"), ("mistral", "mistral", "</s>"), ("llama3", "llama", "<|eot_id|>")],
)
def test_what_templates_write_of_calls_is_what_parsers_read(file, calls, end):
    template = (TEMPLATES / f"{file}.jinja").read_text()
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    chat = ChatTemplates({"default": template}, {"bos_token": "<s>", "eos_token": "</s>"})
    asked = [{"role": "user", "content": "Weather?"}]
    prompt = chat.render(asked, tools=tools, add_generation_prompt=calls != "mistral")
    whole = chat.render([*asked, TURN], tools=tools, add_generation_prompt=False)
    assert whole.startswith(prompt) and whole.rstrip().endswith(end)
    text = whole[len(prompt) :].rstrip().removesuffix(end)
    thoughts = thought_format("auto", template) is not None
    assert every_way(text, tools=calls, thoughts=thoughts, prompt=prompt)["calls"] == [("get_weather", ARGUMENTS)]


@pytest.mark.parametrize(
    ("file", "known"), [("qwen", "hermes"), ("mistral", "mistral"), ("llama3", None), ("gemma", None)]
)
def test_formats_of_whole_templates(file, known):
    assert tool_format("auto", (TEMPLATES / f"{file}.jinja").read_text()) == known
