"""Hints for requests that are made up of /openapi.json, so that most of them are accepted: narrower schemas of fields,
and what the fields of one request have to do with each other."""

import copy

from tests.fake_server import VOCAB

TEXT = {"type": "string", "minLength": 1, "maxLength": 20}
FLAG = {"enum": [True, False, None]}
TOKEN = {"type": "integer", "minimum": 5, "maximum": VOCAB - 1}
SIZE = {"type": "integer", "minimum": 1, "maximum": 16}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMATS = {  # only one of which a request may have
    "response_format": [
        None,
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    ],
    "structured_outputs": [None, {"json": SCHEMA}, {"choice": ["a", "b"]}, {"regex": "[a-c]+"}],
    "guided_json": [None, SCHEMA],
    "guided_regex": [None, "[a-c]{1,3}"],
    "guided_choice": [None, ["x", "yz"]],
    "guided_grammar": [None, 'start: "a" "b"?'],
    "grammar": [None, 'root ::= "a" | "b"'],
}
MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "user", "developer", "assistant"]},
        "content": {
            "anyOf": [
                TEXT,
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": TEXT},
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                    "minItems": 1,
                    "maxItems": 2,
                },
            ]
        },
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}
TOOL = {
    "name": {"enum": ["find", "get_weather"]},
    "description": TEXT,
    "parameters": {"enum": [SCHEMA, {"type": "object", "properties": {}}]},
    "strict": FLAG,
}
FUNCTION = {"type": "object", "properties": TOOL, "required": ["name"], "additionalProperties": False}
OF_BEAMS = ("model", "prompt", "messages", "max_tokens", "beam_width", "length_penalty", "early_stopping", "logprobs")
FIELDS = {
    "n": {**SIZE, "maximum": 3},
    "best_of": {"const": 3},
    "beam_width": {"const": 2},
    "prompt": {
        "anyOf": [
            TEXT,
            {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
            {"type": "array", "items": TOKEN, "minItems": 1, "maxItems": 9},
            {
                "type": "array",
                "items": {"type": "array", "items": TOKEN, "minItems": 1, "maxItems": 3},
                "minItems": 1,
                "maxItems": 3,
            },
        ]
    },
    "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 4},
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), SIZE),
    "min_tokens": {"const": 1},
    "truncate_prompt_tokens": {"enum": [None, -1, 4]},
    **dict.fromkeys(
        ("stop_token_ids", "allowed_token_ids", "tokens"),
        {"type": "array", "items": TOKEN, "minItems": 1, "maxItems": 5},
    ),
    "stop": {"anyOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": 4}]},
    "bad_words": {"type": "array", "items": TEXT, "maxItems": 3},
    "logit_bias": {
        "type": "object",
        "patternProperties": {"^[1-9][0-9]?$": {"type": "number", "minimum": -9, "maximum": 9}},
        "additionalProperties": False,
    },
    **{name: {"enum": values} for name, values in FORMATS.items()},
    "guided_decoding_backend": {"const": None},
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), {"type": "integer", "minimum": 0, "maximum": 4}),
    "tool_choice": {"enum": [None, "none", "auto", "required"]},
    "modalities": {"enum": [None, ["text"]]},
    "function_call": {"const": None},
    "input": {"anyOf": [TEXT, {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 3}]},
    "text": {
        "enum": [None, {"format": {"type": "text"}}, {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}]
    },
    "truncation": {"enum": [None, "disabled"]},
    "background": {"enum": [None, False]},
    **dict.fromkeys(("previous_response_id", "conversation"), {"const": None}),
    "include": {"enum": [None, []]},
}
INPUT = {
    "anyOf": [
        TEXT,
        {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
        {"type": "array", "items": TOKEN, "minItems": 1, "maxItems": 9},
    ]
}
TEXTS = {"anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 1}]}
PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
FIELDS_OF = {  # where a name means something else
    **dict.fromkeys(("EmbeddingRequest", "PoolRequest", "ClassifyRequest"), {"input": INPUT}),
    "ScoreRequest": dict.fromkeys({name for pair in PAIRS for name in pair}, TEXTS),
    "RerankRequest": {
        "query": TEXT,
        "documents": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
        **dict.fromkeys(("top_n", "max_tokens_per_doc"), SIZE),
    },
    "ChatRequest": {
        "logprobs": {"const": True},
        "tools": {"type": "array", "minItems": 1, "maxItems": 2, "items": {
            "type": "object", "properties": {"type": {"const": "function"}, "function": FUNCTION},
            "required": ["type", "function"], "additionalProperties": False}},
    },
    "ResponsesRequest": {
        "prompt": {"const": None},
        "tools": {"type": "array", "minItems": 1, "maxItems": 2, "items": {
            "type": "object", "properties": TOOL | {"type": {"const": "function"}},
            "required": ["type", "name"], "additionalProperties": False}},
    },
    "TokenizeRequest": {"prompt": TEXT, "tools": {"const": None}},
}  # fmt: skip


def with_hints(document: dict) -> dict:
    """The document with narrower schemas."""
    document = copy.deepcopy(document)
    for name, schema in document["components"]["schemas"].items():
        hints = FIELDS | FIELDS_OF.get(name, {})
        properties = schema.get("properties", {})
        properties.update({field: hints[field] for field in properties.keys() & hints.keys()})
        if name in FIELDS_OF or name.endswith("Request"):
            schema["additionalProperties"] = False
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "header":
                    parameter["schema"] = {"type": "integer", "minimum": 30, "maximum": 60}
                elif parameter["name"] == "name":
                    parameter["schema"] = {"enum": ["fake"]}
    return document


def fit(body: dict) -> dict:
    """The request with fields left out that don't go with the others."""
    body = dict(body)
    formats = [name for name in FORMATS if body.get(name) is not None]
    for name in formats[1:]:
        del body[name]
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("tools") and body.get("tool_choice") != "none":
        body.pop("tool_choice", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if body.get("beam_width"):
        body = {name: value for name, value in body.items() if name in OF_BEAMS}
        if not body.get("max_tokens") and not body.get("max_completion_tokens"):
            body["max_tokens"] = 8  # beams to the context's end may be more than the pool holds
    else:
        body = {name: value for name, value in body.items() if name not in ("length_penalty", "early_stopping")}
    if body.get("prompt") and body.get("messages"):
        del body["messages" if body.get("add_special_tokens") else "prompt"]
    if any(name in body for pair in PAIRS for name in pair) and "query" not in body:
        pair = next(pair for pair in PAIRS if body.keys() & set(pair))
        others = {name for names in PAIRS for name in names} - set(pair)
        return {name: value for name, value in body.items() if name not in others} | {
            name: body.get(name) or "Hi" for name in pair
        }
    known = {"prompt", "messages", "input", "tokens", "query"}
    return body if known & body.keys() else body | {"prompt": "Hi"}
