"""`StructuredOutputs`: the format that a generated text must have, with the checks that need no grammar library."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxllm.argument_checks import a_type, nests_deeper
from jaxllm.from_vllm.rules import check_names

MAX_GRAMMAR_CHARS = 1 << 20  # of a schema, an expression, a grammar, or all choices together
MAX_CHOICES = 50_000
MAX_SCHEMA_DEPTH = 64
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """Exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`, with vLLM's names. Raises `ValueError`.

    Tokens that violate the format are never generated. The text ends with reason "stop" when nothing may follow, or
    when the model ends it at a point where it may end. A text that `max_tokens` cuts is a prefix of a valid text. JSON
    may have several spaces or line breaks in a row, up to a bound, unless `disable_any_whitespace`.
    """

    json: Any = None  # a JSON schema as a dict or as text; stored as text
    regex: Any = None  # str of Rust's regex crate, without look-around and back-references; matches the whole text
    choice: Any = None  # list of str; the text is one of them
    grammar: Any = None  # str: llguidance's Lark dialect, GBNF ("root ::= ..."), or llguidance's JSON
    json_object: Any = None  # True: any JSON object
    disable_any_whitespace: Any = False  # True: no whitespace in JSON
    disable_additional_properties: Any = False  # True: objects have only the properties that the schema names
    whitespace_pattern: Any = None  # str: regular expression of the whitespace between JSON's tokens
    structural_tag: Any = None  # vLLM's; None

    def __new__(cls, *args: Any, **given: Any) -> "StructuredOutputs":
        check_names(cls, given)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if self.structural_tag is not None:
            raise ValueError(
                "structured_outputs.structural_tag is not supported: the whole text has one format; give a grammar"
            )
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"structured_outputs must have exactly one of {', '.join(_KINDS)}, not {given or 'none'}")
        self._check_options(given[0])
        check = getattr(self, f"_check_{given[0]}")
        check()

    def _check_options(self, kind: str) -> None:
        for name in _JSON_OPTIONS[:2]:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"structured_outputs.{name}={getattr(self, name)!r:.100} must be True or False")
        if self.whitespace_pattern is not None:
            _check_text("whitespace_pattern", self.whitespace_pattern)
            if self.disable_any_whitespace:
                raise ValueError("disable_any_whitespace and whitespace_pattern exclude each other; leave one out")
        if kind not in ("json", "json_object"):
            for name in _JSON_OPTIONS:
                if getattr(self, name):
                    raise ValueError(f"structured_outputs.{name} is for json and json_object, not for {kind}")

    def _check_json(self) -> None:
        schema = self.json
        if isinstance(schema, str):
            _check_text("json", schema)
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"structured_outputs.json is not JSON: {error}") from error
        if not isinstance(schema, dict):
            raise ValueError(f"structured_outputs.json is {a_type(schema)}; give a JSON schema, an object")
        if nests_deeper(schema, MAX_SCHEMA_DEPTH):
            raise ValueError(f"structured_outputs.json is nested more than {MAX_SCHEMA_DEPTH} levels deep; flatten it")
        if self.disable_additional_properties:
            schema = _closed(schema)
        try:
            text = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"structured_outputs.json is not a JSON schema: {error}") from error
        _check_text("json", text)
        object.__setattr__(self, "json", text)

    def _check_regex(self) -> None:
        _check_text("regex", self.regex)

    def _check_grammar(self) -> None:
        _check_text("grammar", self.grammar)

    def _check_json_object(self) -> None:
        if self.json_object is not True:
            raise ValueError(f"structured_outputs.json_object={self.json_object!r:.100} must be True or False")

    def _check_choice(self) -> None:
        choice = self.choice
        if not isinstance(choice, list | tuple) or not choice or not all(isinstance(text, str) for text in choice):
            raise ValueError("structured_outputs.choice must be a list of at least one string")
        if len(choice) > MAX_CHOICES or sum(map(len, choice)) > MAX_GRAMMAR_CHARS:
            raise ValueError(
                f"structured_outputs.choice has {len(choice)} strings of {sum(map(len, choice))} characters; at most "
                f"{MAX_CHOICES} and {MAX_GRAMMAR_CHARS} are allowed"
            )
        object.__setattr__(self, "choice", list(choice))


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise ValueError(f"structured_outputs.{name}={text!r:.100} must be a non-empty string")
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ValueError(
            f"structured_outputs.{name} has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed"
        )


def _closed(schema: Any) -> Any:
    """The schema, with additional properties forbidden at every depth."""
    if isinstance(schema, list | tuple):
        return [_closed(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: value if key in ("enum", "const") else _closed(value) for key, value in schema.items()}
    if closed.get("type") == "object" or isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def as_structured_outputs(value: Any) -> StructuredOutputs | None:
    """`value`, made from a dict of fields if it is one. ValueError for anything else."""
    if isinstance(value, StructuredOutputs | None):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"structured_outputs is {a_type(value)}; give StructuredOutputs(json=...), say")
    known = [field.name for field in fields(StructuredOutputs)]
    if unknown := [name for name in value if name not in known]:
        raise ValueError(f"structured_outputs has no {unknown[0]!r:.100}; it has {', '.join(known)}")
    return StructuredOutputs(**value)
