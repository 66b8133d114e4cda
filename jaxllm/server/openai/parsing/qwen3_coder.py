"""Qwen3-Coder's tool calls: <function=NAME> with a <parameter=NAME> for each argument, whose text has the type that the
tool's schema gives."""

import json
from collections.abc import Mapping
from typing import Any

from jaxllm.grammar.json_schema import resolved
from jaxllm.server.openai.parsing.calls import MAX_HELD_CHARS
from jaxllm.server.openai.parsing.events import Event
from jaxllm.server.openai.parsing.literals import as_json
from jaxllm.server.openai.parsing.marked import MarkedCalls, is_name

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_CLOSE = "<function=", "</function>"
PARAMETER, PARAMETER_CLOSE = "<parameter=", "</parameter>"
_MARKS = {
    "content": (OPEN, FUNCTION),
    "opened": (FUNCTION, CLOSE),
    "name": (">",),
    "body": (PARAMETER, FUNCTION_CLOSE, CLOSE),
    "key": (">",),
    "value": (PARAMETER_CLOSE, f"\n{FUNCTION_CLOSE}\n{CLOSE}"),
    "after": (CLOSE, OPEN, FUNCTION),
}
_MAX_REFERENCES = 16


class Qwen3CoderParser(MarkedCalls):
    """`schemas`: the JSON schemas of the tools' parameters, by name."""

    def __init__(self, schemas: Mapping[str, Any]):
        super().__init__()
        self._schemas = schemas
        self._name = ""
        self._word: list[str] = []  # a name, so far
        self._value = _Value(frozenset())
        self._num_arguments = 0

    @property
    def _marks(self) -> tuple[str, ...]:
        return _MARKS[self._state]

    def _text(self, text: str, events: list[Event]) -> int:
        match self._state:
            case "content":
                self._content(text, events)
            case "value":
                self._arguments(self._value.push(text), events)
            case "opened":
                self._keep(text, events)
                if text.strip() and self._raw:
                    self._give_up(events)
            case "name":
                self._word.append(text)
                self._keep(text, events)
            case "key":
                self._word.append(text)
            case "after" if text.strip():
                self._state = "content"
                return 0
        return len(text)

    def _mark(self, mark: str, events: list[Event]) -> None:
        match self._state:
            case "content" | "opened" | "after":
                self._open(mark, events)
            case "name":
                self._named(events)
            case "body" if mark == PARAMETER:
                self._word, self._state = [], "key"
            case "key":
                self._begin_value(events)
            case "value":
                self._arguments(self._value.end(), events)
                self._state = "body"
                if mark != PARAMETER_CLOSE:
                    self._end(CLOSE, events)
            case "body":
                self._end(mark, events)

    def _open(self, mark: str, events: list[Event]) -> None:
        if mark == CLOSE and self._state == "after":
            self._state = "content"
            return
        self._raw.append(mark)
        if mark == CLOSE:
            self._give_up(events)
        else:
            self._word, self._state = [], "opened" if mark == OPEN else "name"

    def _named(self, events: list[Event]) -> None:
        self._raw.append(">")
        name = "".join(self._word).strip()
        if not is_name(name):
            self._give_up(events)
            return
        self._name, self._num_arguments, self._state = name, 0, "body"
        self._start(name, events)
        self._arguments("{", events)

    def _begin_value(self, events: list[Event]) -> None:
        key = "".join(self._word).strip()
        self._arguments(f"{', ' if self._num_arguments else ''}{json.dumps(key)}: ", events)
        self._num_arguments += 1
        self._value, self._state = _Value(types_of(self._schemas.get(self._name), key)), "value"

    def _end(self, mark: str, events: list[Event]) -> None:
        self._arguments("}", events)
        self._state = "after" if mark == FUNCTION_CLOSE else "content"

    def _cut(self, rest: str, events: list[Event]) -> None:
        if self._state == "value":
            self._arguments(self._value.push(rest), events)


class _Value:
    """Writes a parameter's text as JSON: strings as they come, all else at its end, when it shows what it is."""

    def __init__(self, types: frozenset[str]):
        self._types = types
        self._is_string = types <= {"string"}
        self._parts: list[str] = []  # held
        self._num_held = 0
        self._at_start, self._has_quote = True, False
        self._newline = ""  # the last one, which is no part of the value

    def push(self, text: str) -> str:
        if not self._is_string:
            self._parts.append(text)
            self._num_held += len(text)
            if self._num_held <= MAX_HELD_CHARS:
                return ""
            self._is_string, text, self._parts = True, "".join(self._parts), []
        if self._at_start and text:
            text, self._at_start = text.removeprefix("\n"), False
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        shown = json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1]
        return self._quote() + shown if shown else ""

    def end(self) -> str:
        if self._is_string:
            return self._quote() + '"'
        return typed("".join(self._parts).removeprefix("\n").removesuffix("\n"), self._types)

    def _quote(self) -> str:
        had, self._has_quote = self._has_quote, True
        return "" if had else '"'


def typed(text: str, types: frozenset[str]) -> str:
    """The JSON of a parameter's text as one of `types`; a string if it is none of them."""
    known = as_json(text)
    value = None if known is None else _loads(known)
    if known is not None and _type_of(value) & types:
        return known
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return str(int(value))
    if text.strip().lower() in ("true", "false") and "boolean" in types:
        return text.strip().lower()
    return json.dumps(text, ensure_ascii=False)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return ...


def _type_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    kinds = ((int, {"integer", "number"}), (float, {"number"}), (list, {"array"}), (dict, {"object"}))
    return {"null"} if value is None else next((names for kind, names in kinds if isinstance(value, kind)), set())


def reduced(schema: Any) -> dict[str, Any]:
    """What the parser needs of a schema of parameters: their types."""
    plain = resolved(schema, schema)
    properties = plain.get("properties") if isinstance(plain, Mapping) else None
    keys = properties if isinstance(properties, Mapping) else ()
    return {"properties": {key: {"type": sorted(types_of(schema, key))} for key in keys}}


def types_of(schema: Any, key: str) -> frozenset[str]:
    """The JSON types that a parameter may have; empty if the schema does not say."""
    plain = resolved(schema, schema)
    properties = plain.get("properties") if isinstance(plain, Mapping) else None
    return frozenset() if not isinstance(properties, Mapping) else frozenset(_types(properties.get(key), schema))


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return set()
    if isinstance(schema.get("$ref"), str):
        return _types(resolved(schema, root), root, depth + 1)
    named = schema.get("type")
    if named is not None:
        return {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    types = set().union(*({"string"} if isinstance(value, str) else _type_of(value) for value in values))
    for word in ("anyOf", "oneOf"):
        for way in schema[word] if isinstance(schema.get(word), list) else ():
            types |= _types(way, root, depth + 1)
    return types
