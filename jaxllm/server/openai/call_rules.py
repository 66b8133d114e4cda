"""Grammar rules for tool calls, in the syntax of each model."""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxllm.grammar.json_schema import first_unsupported, is_lenient, relaxed, resolved, rewritten
from jaxllm.server.http.errors import APIError, invalid
from jaxllm.server.openai.grammar_builder import GAP, GrammarBuilder, literal
from jaxllm.server.openai.parsing import deepseek, harmony, mistral, tools
from jaxllm.server.openai.parsing.tagged import TAGS, types_of
from jaxllm.server.openai.schemas import Function, parameters_of
from jaxllm.structured_outputs import StructuredOutputs

_ANY_OBJECT = {"type": "object"}
_DEFINITIONS = ("$defs", "definitions")
_COMPOSED = {"anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "propertyNames"}


def call_rule(grammar: GrammarBuilder, functions: Sequence[Function], calls: str, *, is_one: bool) -> str:
    """Adds a rule for calls of `functions` in the format `calls`, one or several where it allows that; returns its
    name. Raises `APIError` for parameters that can't be written in this format."""
    grammar.rule(
        "call", " | ".join(grammar.rule(f"call{i}", _CALLS[calls](grammar, one)) for i, one in enumerate(functions))
    )
    return grammar.rule("calls", _around(grammar, calls, is_one=is_one))


def _around(grammar: GrammarBuilder, calls: str, *, is_one: bool) -> str:
    """One or several of the rule `call`, with what is around and between them."""

    def several(separator: str) -> str:
        return "call" if is_one else f"call ({separator} call)*"

    match calls:
        case "mistral":
            if grammar.special(mistral.ARGUMENTS) is not None:
                return several("")
            return f'{grammar.mark(mistral.OPEN)} " "? "[" {several(literal(", "))} "]"'
        case "deepseek_v3" | "deepseek_v31":
            between = literal("\n") if calls == "deepseek_v3" else ""
            return f"{grammar.mark(deepseek.CALLS_OPEN)} {several(between)} {grammar.mark(deepseek.CALLS_CLOSE)}"
        case "pythonic":
            return f'"[" {several(literal(", "))} "]"'
        case "llama" | "openai":
            return "call"
        case _:
            return several(GAP)


def _json(grammar: GrammarBuilder, function: Function, *, key: str) -> str:
    head = f'{{"name": {json.dumps(function.name)}, "{key}": '
    return f'{literal(head)} {_arguments(grammar, function)} "}}"'


def _hermes(grammar: GrammarBuilder, function: Function) -> str:
    body = _json(grammar, function, key="arguments")
    return f"{grammar.mark(tools.OPEN)} {GAP} {body} {GAP} {grammar.mark(tools.CLOSE)}"


def _mistral(grammar: GrammarBuilder, function: Function) -> str:
    if grammar.special(mistral.ARGUMENTS) is None:
        return _json(grammar, function, key="arguments")
    marks = grammar.mark(mistral.OPEN), grammar.mark(mistral.ARGUMENTS)
    return f"{marks[0]} {literal(function.name)} {marks[1]} {_arguments(grammar, function)}"


def _deepseek_v3(grammar: GrammarBuilder, function: Function) -> str:
    opening, separator = grammar.mark(deepseek.OPEN), grammar.mark(deepseek.SEPARATOR)
    head = f'{opening} "function" {separator} {literal(function.name + deepseek.FENCE)}'
    closing = f"{literal(deepseek.FENCE_CLOSE)} {grammar.mark(deepseek.CLOSE)}"
    return f"{head} {_arguments(grammar, function)} {closing}"


def _deepseek_v31(grammar: GrammarBuilder, function: Function) -> str:
    head = f"{grammar.mark(deepseek.OPEN)} {literal(function.name)} {grammar.mark(deepseek.SEPARATOR)}"
    return f"{head} {_arguments(grammar, function)} {grammar.mark(deepseek.CLOSE)}"


def _openai(grammar: GrammarBuilder, function: Function) -> str:
    head = literal(f"commentary to={harmony.TOOLS}{function.name} ")
    kind = f'{grammar.mark(harmony.CONSTRAIN)} "json" {grammar.mark(harmony.MESSAGE)}'
    return f"{grammar.mark(harmony.CHANNEL)} {head} {kind} {_arguments(grammar, function)}"


def _pythonic(grammar: GrammarBuilder, function: Function) -> str:
    """Values are JSON, which the parser takes for Python."""
    name, required, optional = grammar.fresh(), [], []
    for key, schema, is_required in _parameters(function, "pythonic"):
        if not key.isidentifier():
            raise _unwritable(function, "pythonic", f"{key!r:.50} is no name in Python")
        value = f"{literal(key + '=')} {grammar.add(_wanted(function, schema))}"
        (required if is_required else optional).append(value)
    comma = literal(", ")
    tail = head = '""'
    for i, value in reversed(list(enumerate(optional))):
        rest = tail
        tail = grammar.rule(f"{name}_tail{i}", f"({comma} {value})? {rest}")
        head = grammar.rule(f"{name}_head{i}", f"{value} {rest} | {head}")
    inner = f"{f' {comma} '.join(required)} {tail}" if required else head
    return f'{literal(function.name + "(")} {inner} ")"'


def _tagged(grammar: GrammarBuilder, function: Function, *, calls: str) -> str:
    """Strings are any text, but for those of an enum."""
    tags = TAGS[calls]
    line = "\n" if tags.on_lines else ""
    value_close = line + tags.value_close
    value_open = f"{grammar.mark(tags.key_close)} {literal(chr(10))} {grammar.mark(tags.value)}" if tags.value else ""
    parts = []
    for key, schema, is_required in _parameters(function, calls):
        types = types_of(parameters_of(function), key)
        known = resolved(schema, schema)
        words = known.get("enum", [known["const"]] if "const" in known else None) if isinstance(known, dict) else None
        if types == {"string"} and isinstance(words, list):
            value = f"({' | '.join(literal(word) for word in words)}) {grammar.mark(value_close)}"
        elif not types or "string" in types:
            value = grammar.until(value_close)
        else:
            value = f"{grammar.add(_wanted(function, schema))} {grammar.mark(value_close)}"
        opened = value_open or literal(tags.key_close + line)
        part = f"{grammar.mark(tags.parameter)} {literal(key)} {opened} {value} {literal(chr(10))}"
        parts.append(part if is_required else f"({part})?")
    before = f"\n{tags.function}" if tags.function else ""
    head = literal(before + function.name + tags.named + ("\n" if tags.function else ""))
    end = literal(tags.function_close + "\n") if tags.function_close else ""
    return f"{grammar.mark(tags.open)} {head} {' '.join(parts)} {end} {grammar.mark(tags.close)}"


def _arguments(grammar: GrammarBuilder, function: Function) -> str:
    return grammar.add(_wanted(function, parameters_of(function) or _ANY_OBJECT))


def _wanted(function: Function, schema: dict[str, Any]) -> StructuredOutputs:
    """The schema for a grammar. Keywords that no grammar is made of are not checked unless the tool is `strict`, so
    that one tool does not keep the others from being called."""
    plain = rewritten(schema)
    place = None if is_lenient(plain) else first_unsupported(plain)
    if place is not None and function.strict:
        raise invalid(
            f"the tool {function.name} is strict, and its parameters have {place.keyword!r} at {place.path}, which is "
            f"not supported: {place.remedy}; or leave strict out",
            "tools",
        )
    try:
        return StructuredOutputs(json=plain if function.strict else relaxed(plain))
    except ValueError as error:
        raise invalid(f"the parameters of the tool {function.name} can't be used: {error}", "tools") from error


def _parameters(function: Function, calls: str) -> list[tuple[str, dict[str, Any], bool]]:
    """Each parameter's name, schema, and whether it is required. Raises `APIError` if they can't be told apart."""
    root = parameters_of(function) or _ANY_OBJECT
    schema = resolved(root, root)
    properties = schema.get("properties", {}) if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or set(schema) & _COMPOSED:
        raise _unwritable(function, calls, "its parameters are no plain object with properties")
    if re.search(r'"\$ref": "#(?!/(\$defs|definitions)/)', json.dumps(root)):
        raise _unwritable(function, calls, "its schema refers to others than $defs")
    definitions = {name: root[name] for name in _DEFINITIONS if name in root}
    required = schema.get("required", ())
    inner = {key: one if isinstance(one, dict) else {} for key, one in properties.items()}
    return [(key, {**one, **definitions}, key in required) for key, one in inner.items()]


def _unwritable(function: Function, calls: str, why: str) -> APIError:
    return invalid(
        f"a call of {function.name} can't be required in this model's format of calls ({calls}): {why}. Change that, "
        "or send tool_choice: auto",
        "tools",
    )


_CALLS: dict[str, Callable[[GrammarBuilder, Function], str]] = {
    "hermes": _hermes,
    "llama": lambda grammar, function: _json(grammar, function, key="parameters"),
    "mistral": _mistral,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "openai": _openai,
    "pythonic": _pythonic,
    **{calls: partial(_tagged, calls=calls) for calls in TAGS},
}
