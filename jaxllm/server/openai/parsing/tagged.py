"""Tool calls with a tag for the function and one for each argument, whose text has the type that the tool's schema
gives: those of Qwen3-Coder, GLM-4.5 and MiniMax-M2."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.grammar.json_schema import resolved
from jaxllm.server.openai.parsing.calls import MAX_HELD_CHARS
from jaxllm.server.openai.parsing.events import Event
from jaxllm.server.openai.parsing.literals import as_json
from jaxllm.server.openai.parsing.marked import MarkedCalls, is_name


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Of a format: those around a call (`function_close`: or several), the name, and each argument."""

    open: str
    close: str
    function: str = ""  # empty: the name comes at once
    named: str  # after the name
    function_close: str = ""  # empty: `close` ends the function, too
    parameter: str
    key_close: str
    value: str = ""  # empty: the value follows the key
    value_close: str
    on_lines: bool = False  # values have a newline before and after them, which is not theirs

    @property
    def marks(self) -> dict[str, tuple[str, ...]]:
        """Those that end each state of a parser."""
        ends = tuple(filter(None, (self.function_close, self.close)))
        whole = (f"\n{self.function_close}\n{self.close}",) if self.function_close else ()
        return {
            "content": tuple(filter(None, (self.open, self.function))),
            "opened": (self.function, self.close),
            "name": (self.named,) if self.function else (self.named, self.parameter, self.close),
            "body": (self.parameter, *ends),
            "key": (self.key_close,),
            "between": (self.value, *ends),
            "value": (self.value_close, *whole),  # an argument may lack its end
            "after": (self.close, self.open, self.function),
        }


TAGS = {
    "qwen3_coder": Tags(
        open="<tool_call>",
        close="</tool_call>",
        function="<function=",
        named=">",
        function_close="</function>",
        parameter="<parameter=",
        key_close=">",
        value_close="</parameter>",
        on_lines=True,
    ),
    "glm45": Tags(
        open="<tool_call>",
        close="</tool_call>",
        named="\n",
        parameter="<arg_key>",
        key_close="</arg_key>",
        value="<arg_value>",
        value_close="</arg_value>",
    ),
    "minimax_m2": Tags(
        open="<minimax:tool_call>",
        close="</minimax:tool_call>",
        function='<invoke name="',
        named='">',
        function_close="</invoke>",
        parameter='<parameter name="',
        key_close='">',
        value_close="</parameter>",
    ),
}
_MAX_REFERENCES = 16


class TaggedParser(MarkedCalls):
    """`schemas`: the JSON schemas of the tools' parameters, by name."""

    def __init__(self, tags: Tags, schemas: Mapping[str, Any]):
        super().__init__()
        self._tags, self._marks_of, self._schemas = tags, tags.marks, schemas
        self._name = ""
        self._word: list[str] = []  # a name, so far
        self._value = _Value(frozenset())
        self._num_arguments = 0

    @property
    def _marks(self) -> tuple[str, ...]:
        return self._marks_of[self._state]

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
        tags = self._tags
        match self._state:
            case "content" | "opened" | "after":
                self._open(mark, events)
            case "name":
                self._named(mark, events)
            case "body" if mark == tags.parameter:
                self._word, self._state = [], "key"
            case "key" if tags.value:
                self._state = "between"
            case "key" | "between" if mark in (tags.key_close, tags.value):
                self._begin_value(events)
            case "value":
                self._arguments(self._value.end(), events)
                self._state = "body"
                if mark != tags.value_close:
                    self._end(tags.close, events)
            case "body" | "between":
                self._end(mark, events)

    def _open(self, mark: str, events: list[Event]) -> None:
        tags = self._tags
        if mark == tags.close and self._state == "after":
            self._state = "content"
            return
        self._raw.append(mark)
        if mark == tags.close:
            self._give_up(events)
        else:
            self._word, self._state = [], "opened" if mark == tags.open and tags.function else "name"

    def _named(self, mark: str, events: list[Event]) -> None:
        self._raw.append(mark)
        name = "".join(self._word).strip()
        if not name and mark.isspace():  # before the name
            return
        if not is_name(name):
            self._give_up(events)
            return
        self._name, self._num_arguments, self._word = name, 0, []
        self._state = "key" if mark == self._tags.parameter else "body"
        self._start(name, events)
        self._arguments("{", events)
        if mark == self._tags.close:
            self._end(mark, events)

    def _begin_value(self, events: list[Event]) -> None:
        key = "".join(self._word).strip()
        self._arguments(f"{', ' if self._num_arguments else ''}{json.dumps(key)}: ", events)
        self._num_arguments += 1
        types = types_of(self._schemas.get(self._name), key)
        self._value, self._state = _Value(types, on_lines=self._tags.on_lines), "value"

    def _end(self, mark: str, events: list[Event]) -> None:
        self._arguments("}", events)
        self._state = "after" if mark == self._tags.function_close else "content"

    def _cut(self, rest: str, events: list[Event]) -> None:
        if self._state == "value":
            self._arguments(self._value.push(rest), events)


class _Value:
    """Writes a parameter's text as JSON: strings as they come, all else at its end, when it shows what it is."""

    def __init__(self, types: frozenset[str], *, on_lines: bool = False):
        self._types, self._on_lines = types, on_lines
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
        shown = json.dumps(self._lines(text) if self._on_lines else text, ensure_ascii=False)[1:-1]
        return self._quote() + shown if shown else ""

    def _lines(self, text: str) -> str:
        """Without the newlines around the value."""
        if self._at_start and text:
            text, self._at_start = text.removeprefix("\n"), False
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")

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
