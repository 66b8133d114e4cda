"""Response formats: from the fields of a request to the grammar that the engine follows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import Raw

from jaxllm.server.http.errors import invalid, refusing, unsupported
from jaxllm.server.openai.call_rules import call_rule
from jaxllm.server.openai.decoding import is_given, untyped
from jaxllm.server.openai.grammar_builder import GrammarBuilder
from jaxllm.server.openai.parsing import reasoning
from jaxllm.server.openai.schemas import (
    ChatRequest,
    NamedTool,
    ResponseFormatOption,
    Sampling,
    StructuredOutputsOption,
    Tool,
)
from jaxllm.structured_outputs import StructuredOutputs
from jaxllm.text.tokenizer import Tokenizer

_OLD_NAMES = {"guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar", "grammar": "grammar"}
_FORMATS = ("text", "json_object", "json_schema")


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
    request: ChatRequest,
    tools: Sequence[Tool] | None,
    *,
    prompt: str,
    calls: str | None,
    thoughts: str | None,
    tokenizer: Tokenizer | None,
) -> ResponseFormat | None:
    """The format of an answer to `prompt`: the request's format, or calls of `tools` (in the format `calls`) if the
    request requires or allows them; reasoning may come first. None for plain text."""
    response_format = response_format_of(request)
    must_call = bool(tools) and request.tool_choice not in (None, "none", "auto")
    if response_format is None and not must_call:
        return None
    if thoughts is None and not (tools and calls):
        return response_format
    grammar = GrammarBuilder(tokenizer)
    ways = []
    if response_format is not None and not must_call:
        ways.append(grammar.answer(response_format.wanted, thoughts))
    if tools and calls:
        choice = request.tool_choice
        name = choice.called if isinstance(choice, NamedTool) else None
        chosen = [tool for tool in tools if name in (None, tool.function.name)]
        is_one = name is not None or request.parallel_tool_calls is False
        ways.append(call_rule(grammar, [tool.function for tool in chosen], calls, is_one=is_one))
    start = " | ".join(ways)
    if thoughts == "openai_gptoss":
        start = grammar.after_analysis(start)
    elif thoughts is not None:
        marks = reasoning.MARKS[thoughts]
        start = grammar.after_thoughts(start, marks, is_open=prompt.rstrip().endswith(marks[0]))
    param = "tools" if response_format is None or must_call else response_format.param
    return _make(param, grammar=grammar.text(start))
