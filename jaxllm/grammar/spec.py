"""Converts `StructuredOutputs` to llguidance's own format. Nothing is compiled here."""

import json
import re
from types import ModuleType

from jaxllm.grammar.json_schema import first_unsupported, is_lenient, rewritten
from jaxllm.structured_outputs import StructuredOutputs

_MAX_GBNF_CHARS = 1 << 16
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"  # bounded: without a bound a model may write whitespace for ever


def grammar_text(wanted: StructuredOutputs) -> str:
    """The grammar in llguidance's JSON format. Compiling it finds most errors; those found here raise ValueError."""
    matcher = library().LLMatcher
    if wanted.regex is not None:
        return matcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return matcher.grammar_from_regex("|".join(map(re.escape, dict.fromkeys(wanted.choice))))
    if wanted.grammar is not None:
        return _grammar_text(wanted.grammar)
    schema = rewritten(json.loads(wanted.json or '{"type": "object"}'))
    if (place := None if is_lenient(schema) else first_unsupported(schema)) is not None:
        raise ValueError(
            f"structured_outputs.json has {place.keyword!r} at {place.path}, which is not supported: {place.remedy}"
        )
    options = {"whitespace_flexible": False}
    if not wanted.disable_any_whitespace:
        options = {"whitespace_pattern": wanted.whitespace_pattern or _WHITESPACE}
    try:
        return matcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    except ValueError as error:
        raise ValueError(f"structured_outputs.json is not a JSON schema: {error}") from error


def _grammar_text(source: str) -> str:
    if source.lstrip().startswith("{"):
        try:
            known = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs.grammar begins like JSON but is not JSON: {error}") from error
        if not isinstance(known, dict) or set(known) != {"grammars"}:
            raise ValueError('structured_outputs.grammar in JSON must be {"grammars": [...]}, as llguidance has it')
        return json.dumps(known)
    if "::=" in source:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        if len(source) > _MAX_GBNF_CHARS:
            raise ValueError(
                f"structured_outputs.grammar has {len(source)} characters of GBNF; at most {_MAX_GBNF_CHARS} are "
                "allowed: write it in Lark"
            )
        try:
            source = gbnf_to_lark(source)
        except Exception as error:  # noqa: BLE001 - the converter raises several
            raise ValueError(f"structured_outputs.grammar is not sound GBNF: {error}") from error
    return json.dumps({"grammars": [{"lark_grammar": source}]})


def library() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError("structured outputs need the package llguidance; pip install llguidance") from error
    return llguidance
