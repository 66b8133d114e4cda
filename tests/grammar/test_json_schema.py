"""JSON schemas with keywords that llguidance lacks: rewritten, named with their place, or left out where asked."""

import json

import jsonschema
import pytest

from jaxllm.grammar.compiler import GrammarCompiler
from jaxllm.grammar.json_schema import FORMATS, UNSUPPORTED, first_unsupported, is_lenient, relaxed, rewritten
from jaxllm.grammar.spec import library
from jaxllm.structured_outputs import StructuredOutputs
from jaxllm.text.tokenizer import Tokenizer
from tests.chat_model import backend

TOKENIZER = Tokenizer(backend(), eos_token="</s>")
COMPILER = GrammarCompiler(TOKENIZER, 0, [257])
LENIENT = {"x-guidance": {"lenient": True}}


def accepts(schema, value) -> bool:
    inner = COMPILER.compile(StructuredOutputs(json=schema)).matcher().inner
    tokens = TOKENIZER.encode(json.dumps(value), add_special_tokens=False)
    return inner.validate_tokens(tokens) == len(tokens) and inner.consume_tokens(tokens) and inner.is_accepting()


SAME = [
    ({"type": "string", "format": "binary"}, ["a"], [1]),
    ({"type": "array", "uniqueItems": False}, [[1, 1]], ["a"]),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1}, [[1], []], [[1, 1]]),
    ({"type": "integer", "then": {"minimum": 5}}, [1], ["a"]),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, [{"ab": 1}, {}], [{"b": 1}]),
    ({"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "integer"}},
     [{"x": 1, "y": 2}], [{"z": 1}, {"x": "a"}]),
    ({"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"const": "x", "enum": ["x"]}}},
     None, None),
    ({"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"enum": ["x"], "title": "N"}}},
     [{"x": 1}], [{"y": 1}]),
    ({"type": "object", "properties": {"d": {"type": "object", "propertyNames": {"type": "string"}}}},
     [{"d": {"a": 1}}], []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), SAME, ids=range(len(SAME)))
def test_what_can_be_said_otherwise_is(schema, right, wrong):
    if right is None:
        assert first_unsupported(rewritten(schema)).keyword == "propertyNames"
        return
    for value in right:
        jsonschema.validate(value, schema)
        assert accepts(schema, value)
    assert not any(accepts(schema, value) for value in wrong)


VALUES = {
    "minContains": 1,
    "maxContains": 1,
    "dependentRequired": {"a": ["b"]},
    "dependencies": {},
    "uniqueItems": True,
}
BESIDE = {"then": {"if": {}}, "else": {"if": {}}, "if": {"then": {}}, "minContains": {"contains": {}},
          "maxContains": {"contains": {}}, "propertyNames": {"properties": {}}}  # fmt: skip


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_each_unsupported_keyword_is_named_with_its_place_and_a_way_out(keyword):
    value = "#x" if keyword.startswith("$") else VALUES.get(keyword, {"type": "string"})
    inner = {"type": ["array", "object"], keyword: value} | BESIDE.get(keyword, {})
    schema = {"type": "object", "properties": {"a/b": {"anyOf": [{"type": "null"}, inner]}}}
    with pytest.raises(ValueError, match='is not supported: leave it out, or put "x-guidance"') as error:
        COMPILER.compile(StructuredOutputs(json=schema))
    first = first_unsupported(schema)
    assert f"has {first.keyword!r} at #/properties/a~1b/anyOf/1/{first.keyword}," in str(error.value)
    assert COMPILER.compile(StructuredOutputs(json=schema | LENIENT)) and is_lenient(schema | LENIENT)
    assert COMPILER.compile(StructuredOutputs(json=relaxed(schema)))


def test_the_lists_are_the_librarys():
    """Else a new version supports more, and the lists are to be shortened."""
    trie = library().LLTokenizer(TOKENIZER.json, eos_token=[257])

    def error_of(schema):
        matcher = library().LLMatcher
        made = matcher(trie, matcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
        return made.get_error() if made.is_error() else ""

    for keyword in UNSUPPORTED:
        assert "Unimplemented keys" in error_of({"type": "object", keyword: VALUES.get(keyword, {})}), keyword
    for known in FORMATS:
        assert not error_of({"type": "string", "format": known})
    assert "Unknown format" in error_of({"type": "string", "format": "binary"})


@pytest.mark.parametrize("pattern", ["^(?!a)b", "(?<=a)b", r"(a)\1", r"\bword", "(?=a)"])
def test_look_around_is_named_with_its_place(pattern):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    with pytest.raises(ValueError, match="'pattern' at #/properties/a/pattern, .* without look-around"):
        COMPILER.compile(StructuredOutputs(json=schema))
    assert COMPILER.compile(StructuredOutputs(json=relaxed(schema)))


@pytest.mark.parametrize("pattern", [r"^(?:a|b)+$", r"\\b", r"[(?=]", r"[](?=]", r"\(\?=", r"\d{3}"])
def test_other_patterns_are_not(pattern):
    assert first_unsupported({"pattern": pattern}) is None


def test_alternatives_that_overlap():
    schema = {
        "type": "object",
        "properties": {"a": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}},
    }
    with pytest.raises(ValueError, match=r"oneOf \(the first at #/properties/a/oneOf\).*coerce_one_of"):
        COMPILER.compile(StructuredOutputs(json=schema))
    assert accepts(schema | {"x-guidance": {"coerce_one_of": True}}, {"a": "b"})
    assert accepts({"oneOf": [{"type": "string"}, {"type": "integer"}]}, 1), "these do not overlap"


def test_definitions_count_where_they_are_used():
    unused = {"type": "integer", "$defs": {"a": {"not": {}}}}
    assert accepts(unused, 1)
    used = {
        "anyOf": [{"$ref": "#/$defs/a"}],
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"not": {}, "$ref": "#/$defs/a"}},
    }
    assert first_unsupported(used).path == "#/$defs/b/not"


def test_names_of_properties_are_no_keywords():
    schema = {
        "type": "object",
        "properties": {"not": {"type": "integer"}, "if": {"enum": [{"not": 1}]}},
        "required": ["not"],
    }
    assert accepts(schema, {"not": 1}) and relaxed(schema)["properties"] == schema["properties"]
