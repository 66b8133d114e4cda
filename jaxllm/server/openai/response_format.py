"""Response formats: from the fields of a request to the grammar that the engine follows."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import Raw

from jaxllm.grammar.spec import grammar_text
from jaxllm.server.http.errors import invalid, refusing, unsupported
from jaxllm.server.openai.decoding import is_given, untyped
from jaxllm.server.openai.parsing import reasoning, tools
from jaxllm.server.openai.schemas import (
    ChatRequest,
    NamedTool,
    ResponseFormatOption,
    Sampling,
    StructuredOutputsOption,
    Tool,
)
from jaxllm.structured_outputs import StructuredOutputs

_OLD_NAMES = {"guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar", "grammar": "grammar"}
_FORMATS = ("text", "json_object", "json_schema")
_GAP = r"/\n{1,4}/"


class ResponseFormat(NamedTuple):
    """The format that a request asks for, and the field that asks for it."""

    wanted: StructuredOutputs
    param: str


def response_format_of(request: Sampling) -> ResponseFormat | None:
    """The format that a request asks for, None for plain text. Raises `APIError` 400 for an invalid format or two."""
    if request.guided_decoding_backend is not None:
        raise unsupported("guided_decoding_backend", "this server has one backend; leave guided_decoding_backend out")
    formats = [] if (parsed := _parse_format(request.response_format)) is None else [parsed]
    if request.structured_outputs is not None:
        formats.append(ResponseFormat(_structured(request.structured_outputs), "structured_outputs"))
    whitespace = request.guided_whitespace_pattern
    if is_given(request.guided_json):
        formats.append(
            _make("guided_json", json=untyped(request.guided_json, "guided_json"), whitespace_pattern=whitespace)
        )
    elif whitespace is not None:
        raise invalid("guided_whitespace_pattern needs guided_json", "guided_whitespace_pattern")
    for name, kind in _OLD_NAMES.items():
        if (value := getattr(request, name)) is not None:
            formats.append(_make(name, **{kind: value}))
    if len(formats) > 1:
        names = " and ".join(one.param for one in formats)
        raise invalid(f"{names} exclude each other; leave all but one out", formats[1].param)
    return formats[0] if formats else None


def _make(param: str, **fields: Any) -> ResponseFormat:
    with refusing(param):
        return ResponseFormat(StructuredOutputs(**fields), param)


def _structured(given: StructuredOutputsOption) -> StructuredOutputs:
    values = {name: getattr(given, name) for name in given.__struct_fields__}
    fields = {
        name: untyped(value, "structured_outputs") if isinstance(value, Raw) else value
        for name, value in values.items()
        if value is not None and not (isinstance(value, Raw) and not is_given(value))
    }
    return _make("structured_outputs", **fields).wanted


def _parse_format(wanted: ResponseFormatOption | None, param: str = "response_format") -> ResponseFormat | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type not in _FORMATS:
        raise invalid(f"{param}.type must be one of {', '.join(_FORMATS)}, not {wanted.type!r:.100}", f"{param}.type")
    if wanted.type == "json_object":
        return _make(param, json_object=True)
    if wanted.json_schema is None:
        raise invalid(f"{param}.json_schema must be an object with name and schema", f"{param}.json_schema")
    schema_param = f"{param}.json_schema.schema"
    schema = untyped(wanted.json_schema.schema, schema_param)
    if schema is None:
        return _make(param, json_object=True)
    if not isinstance(schema, dict):
        raise invalid(f"{schema_param} must be a JSON schema, an object", schema_param)
    return _make(schema_param, json=schema)


def chat_response_format(
    request: ChatRequest, tools: Sequence[Tool] | None, *, prompt: str, calls: str | None, has_thoughts: bool
) -> ResponseFormat | None:
    """The format of an answer to `prompt`: the request's format, or calls of `tools` (in the format `calls`) if the
    request requires or allows them; reasoning may come first. None for plain text."""
    response_format = response_format_of(request)
    must_call = bool(tools) and request.tool_choice not in (None, "none", "auto")
    if response_format is None and not must_call:
        return None
    if not has_thoughts and not (tools and calls):
        return response_format
    grammar = _GrammarBuilder()
    ways = []
    if response_format is not None and not must_call:
        ways.append(grammar.add(response_format.wanted))
    if tools and calls:
        choice = request.tool_choice
        name = choice.called if isinstance(choice, NamedTool) else None
        chosen = [tool for tool in tools if name in (None, tool.function.name)]
        ways.append(grammar.add_calls(chosen, calls, is_one=name is not None or request.parallel_tool_calls is False))
    start = " | ".join(ways)
    if has_thoughts:
        start = grammar.after_thoughts(start, is_open=prompt.rstrip().endswith(reasoning.OPEN))
    param = "tools" if response_format is None or must_call else response_format.param
    return _make(param, grammar=grammar.text(start))


class _GrammarBuilder:
    """Builds one grammar from several."""

    def __init__(self) -> None:
        self._rules: list[str] = []
        self._others: list[dict[str, Any]] = []

    def add(self, wanted: StructuredOutputs) -> str:
        """Adds a grammar; returns the name by which rules refer to it."""
        with refusing(None):
            first, *others = json.loads(grammar_text(wanted))["grammars"]
        name = wanted.grammar and first.get("name") or f"part{len(self._others)}"  # it may refer to itself by name
        self._others += [first | {"name": name}, *others]
        return f"@{name}"

    def add_calls(self, chosen: Sequence[Tool], calls: str, *, is_one: bool) -> str:
        """Adds a rule for calls of `chosen` tools: one, or several where the format allows it."""
        arguments = "parameters" if calls == "llama" else "arguments"
        ways = []
        for i, tool in enumerate(chosen):
            with refusing("tools"):
                schema = StructuredOutputs(json=untyped(tool.function.parameters, "tools") or {"type": "object"})
            head = f'{{"name": {json.dumps(tool.function.name)}, "{arguments}": '
            self._rules.append(f'call{i}: {json.dumps(head)} {self.add(schema)} "}}"')
            ways.append(f"call{i}")
        self._rules.append(f"call: {' | '.join(ways)}")
        if calls == "llama":
            return "call"
        self._rules.append(f"tagged: {json.dumps(tools.OPEN)} {_GAP} call {_GAP} {json.dumps(tools.CLOSE)}")
        self._rules.append("tagged_all: tagged" + ("" if is_one else f" ({_GAP} tagged)*"))
        return "tagged_all"

    def after_thoughts(self, start: str, *, is_open: bool) -> str:
        """`start` after reasoning that the prompt has begun (`is_open`) or that may come first."""
        close = reasoning.CLOSE.replace("/", r"\/")
        self._rules.append(f"thoughts[lazy]: /(.|\\n)*{close}/")
        self._rules.append(f"answer: {start}")
        thoughts = f"thoughts {_GAP}? answer"
        return thoughts if is_open else f"{json.dumps(reasoning.OPEN)} {thoughts} | answer"

    def text(self, start: str) -> str:
        source = "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"
        return json.dumps({"grammars": [{"lark_grammar": source}, *self._others]})
