"""JSON schemas as llguidance takes them: keywords that it lacks are rewritten where that changes nothing, or named with
their place."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
UNSUPPORTED = (
    *("not", "uniqueItems", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
    *("$dynamicRef", "$dynamicAnchor", "$recursiveRef"),
)
_ONE = ("additionalProperties", "items", "additionalItems", *UNSUPPORTED)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NEEDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
# Of patterns: look-around, word boundaries and back-references, of which a regular language has none.
_IRREGULAR = re.compile(r"(?<!\\)(?:\\\\)*(\(\?(?:<?[=!]|>)|\\[bB1-9])")
_CLASS = re.compile(r"(?<!\\)\[\^?\]?(?:\\.|[^\]\\])*\]")  # [a-z], in which all is literal
OPTIONS = "x-guidance"  # llguidance's options, in the schema


class UnsupportedKeyword(NamedTuple):
    keyword: str
    path: str  # a JSON pointer
    remedy: str


def rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema without what needs no grammar: formats that are not known are annotations, as in the standard."""
    return _mapped(schema, lambda one: _simplified(one, schema))


def _simplified(schema: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    simple = {key: value for key, value in schema.items() if not _is_idle(key, schema)}
    if "propertyNames" not in simple or {"properties", "patternProperties"} & set(simple):
        return simple
    names = resolved(simple["propertyNames"], root)
    known = _named(names, simple.get("additionalProperties", True)) if isinstance(names, Mapping) else None
    if known is None:
        return simple
    del simple["propertyNames"]
    return simple | {"additionalProperties": False} | known


def _named(names: Mapping[str, Any], values: Any) -> dict[str, Any] | None:
    """Keywords for an object that has `values` under such names; None if there are none."""
    given = set(names) - {"type", "title", "description"}
    if given == {"pattern"}:
        return {"patternProperties": {names["pattern"]: values}}
    if given == {"enum"} and isinstance(names["enum"], list):
        return {"properties": {name: values for name in names["enum"] if isinstance(name, str)}}
    return {"additionalProperties": values} if not given and names.get("type", "string") == "string" else None


def _is_idle(key: str, schema: Mapping[str, Any]) -> bool:
    """Whether the keyword asks for nothing."""
    value = schema[key]
    return (
        key == "format" and isinstance(value, str) and value not in FORMATS
        or key == "uniqueItems" and (value is False or schema.get("maxItems") in (0, 1))
        or key in ("unevaluatedProperties", "unevaluatedItems") and value is True
        or key in _NEEDS and _NEEDS[key] not in schema
        or key == "if" and not {"then", "else"} & set(schema)
    )  # fmt: skip


def relaxed(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that allows all that `schema` does and that llguidance can follow: what it can't is not checked."""
    loose = _mapped(rewritten(schema), lambda one: {key: one[key] for key in one if _why(key, one[key]) is None})
    options = loose.get(OPTIONS)
    return loose | {OPTIONS: {**(options if isinstance(options, Mapping) else {}), "coerce_one_of": True}}


def is_lenient(schema: Mapping[str, Any]) -> bool:
    """Whether the schema itself asks that unknown keywords be not checked."""
    options = schema.get(OPTIONS)
    return isinstance(options, Mapping) and options.get("lenient") is True


def first_unsupported(schema: dict[str, Any]) -> UnsupportedKeyword | None:
    """Where the schema has a keyword that no grammar is made of, if it has one that counts."""
    for path, one in _reachable(schema):
        for key, value in one.items():
            if (remedy := _why(key, value)) is not None:
                return UnsupportedKeyword(key, f"{path}/{_escaped(key)}", remedy)
    return None


def first_one_of(schema: dict[str, Any]) -> str | None:
    """The path of the first `oneOf`."""
    return next((f"{path}/oneOf" for path, one in _reachable(schema) if "oneOf" in one), None)


def _why(key: str, value: Any) -> str | None:
    """How to do without the keyword; None if it is supported."""
    if key in UNSUPPORTED:
        return f'leave it out, or put "{OPTIONS}": {{"lenient": true}} into the schema, and check the answer for it'
    patterns = [value] if key == "pattern" else list(value) if key == "patternProperties" else []
    if any(isinstance(pattern, str) and _IRREGULAR.search(_CLASS.sub("", pattern)) for pattern in patterns):
        return "write the pattern without look-around, \\b and back-references"
    return None


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """`schema` with `change` applied to it and to every schema in it."""
    if not isinstance(schema, dict):
        return schema
    new = change(schema)
    for key, value in new.items():
        if key in _MAPS and isinstance(value, dict):
            new[key] = {name: _mapped(inner, change) for name, inner in value.items()}
        elif key in _LISTS and isinstance(value, list):
            new[key] = [_mapped(inner, change) for inner in value]
        elif key in _ONE:
            new[key] = _mapped(value, change)
    return new


def _reachable(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema and those in it with their paths; definitions only where something refers to them."""
    waiting: list[tuple[str, Any]] = [("#", schema)]
    seen: set[str] = set()
    while waiting:
        path, one = waiting.pop()
        if not isinstance(one, dict) or path in seen:
            continue
        seen.add(path)
        yield path, one
        inner: list[tuple[str, Any]] = []
        for key, value in one.items():
            if key == "$ref" and isinstance(value, str) and value.startswith("#/"):
                inner.append((value, resolved(one, schema)))
            elif key in _MAPS[:2] and isinstance(value, dict):
                inner += [(f"{path}/{key}/{_escaped(name)}", sub) for name, sub in value.items()]
            elif key in _LISTS and isinstance(value, list):
                inner += [(f"{path}/{key}/{i}", sub) for i, sub in enumerate(value)]
            elif key in _ONE and key not in UNSUPPORTED:
                inner.append((f"{path}/{key}", value))
        waiting += reversed(inner)


def resolved(schema: Any, root: Any) -> Any:
    """What a schema that refers to another stands for: `schema` itself, or a definition of `root`; None if it is not
    there."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str):
        return schema
    for name in reference.removeprefix("#").removeprefix("/").split("/") if reference != "#" else ():
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
