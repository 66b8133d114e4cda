"""From a JSON body to a request: field by field, so that the size of each is known before it becomes objects."""

import logging
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, Struct

from jaxllm.server.http.errors import APIError, invalid, unsupported

log = logging.getLogger(__name__)

MAX_FIELD_BYTES = 1 << 20
# Texts and token ids: their objects take little more memory than their JSON, and the body's limit is theirs.
UNBOUNDED = frozenset(
    {"prompt", "messages", "input", "instructions", "tokens", "suffix"}
    | {"query", "queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"}
)


def null() -> Raw:
    """A field of type `Raw` that was not given."""
    return Raw(b"null")


_ABSENT = Raw(b"")
_UNSOUND = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_WHOLE = re.compile(rb"(-?\d{1,19})\.0{1,19}")
_EMPTY = (None, False, "", [], {})
_EMPTY_JSON = frozenset({b"null", b"false", b'""', b"[]", b"{}"})
_REFUSED = {
    "kv_transfer_params": "keys and values can't be moved between servers; leave it out",
    "thinking_token_budget": "thinking can't be limited by itself; use max_completion_tokens",
    "repetition_detection": "repetitions don't end a text here; use frequency_penalty",
    "logits_processors": "code is not taken from requests; use logit_bias or allowed_token_ids",
    "use_beam_search": "give beam_width, the number of beams, instead",
    "chat_template": "templates are not taken from requests; the server has --chat-template",
    "documents": "documents are not supported; put their text into a message",
    "functions": "functions is an old name; use tools",
    "web_search_options": "this server has no access to the web",
    "mm_processor_kwargs": "this server takes text only",
    "prompt_embeds": "prompts are text or token ids; leave it out",
    "vllm_xargs": "there are no plugins that it could be for; leave it out",
    "request_id": "ids are made by the server; send the header x-request-id, which comes back as x-client-request-id",
    "audio": "this server writes text only; leave audio out",
}

Request = TypeVar("Request", bound=Struct)


class _Field(NamedTuple):
    name: str
    decoder: msgspec.json.Decoder | None  # None: it stays `Raw`
    is_whole: bool  # takes whole numbers only
    is_required: bool


class _Fields(NamedTuple):
    """How the fields of a request are decoded."""

    slicer: msgspec.json.Decoder  # of the body, into the JSON of each field
    fields: tuple[_Field, ...]


def decode(kind: type[Request], body: bytes | bytearray) -> Request:
    """Decodes a JSON body. Raises `APIError` 400 with the path of the wrong field."""
    plan = _plan(kind)
    try:
        if not body.isascii():
            body.decode()  # fields that stay JSON must be UTF-8 too
        slices = plan.slicer.decode(body)
        given = [(field, raw) for field in plan.fields if (raw := getattr(slices, field.name)) is not _ABSENT]
        values = {field.name: _value(field, raw) for field, raw in given}
    except msgspec.ValidationError as error:
        raise explain(str(error)) from error
    except _UNSOUND as error:
        what = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise invalid(f"the body is not sound JSON: {what}", code=None) from error
    for field in plan.fields:
        if field.is_required and field.name not in values:
            raise _missing(field.name)
    request = kind(**values)
    refuse_unsupported(request)
    if log.isEnabledFor(logging.DEBUG):
        _log_unknown(kind, body)
    return request


@cache
def _plan(kind: type[Struct]) -> _Fields:
    annotations = msgspec.structs.fields(kind)
    kinds = msgspec.inspect.multi_type_info([field.type for field in annotations])
    slices = [(field.name, Raw, _ABSENT) for field in annotations]
    fields = [
        _Field(
            field.name, None if field.type is Raw else msgspec.json.Decoder(field.type), _is_whole(one), field.required
        )
        for field, one in zip(annotations, kinds, strict=True)
    ]
    return _Fields(msgspec.json.Decoder(msgspec.defstruct(kind.__name__, slices)), tuple(fields))


def _is_whole(kind: Any) -> bool:
    """Whether a number of this type must be an integer."""
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    names = {type(one) for one in kinds}
    return msgspec.inspect.IntType in names and msgspec.inspect.FloatType not in names


def _value(field: _Field, raw: Raw) -> Any:
    if field.name not in UNBOUNDED:
        size = memoryview(raw).nbytes
        if size > MAX_FIELD_BYTES:
            raise invalid(f"{field.name} has {size} bytes; at most {MAX_FIELD_BYTES} are allowed", field.name)
        raw = raw.copy()  # or what stays raw in it would keep the whole body
    if field.decoder is None:
        return raw
    if field.is_whole and (match := _WHOLE.fullmatch(raw)):
        raw = Raw(match[1])  # 5.0, as JavaScript's and Python's clients may send
    try:
        return field.decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise explain(str(error), field.name) from error


def decode_field(kind: type[Request], raw: Raw, param: str) -> Request:
    """A field that was kept as JSON. Raises `APIError` 400."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise explain(str(error), param) from error


def untyped(raw: Raw, param: str) -> Any:
    """The objects of a field that was kept as JSON, which may take much more memory: not to be kept. Raises `APIError`
    400 for numbers and nesting that are too much."""
    try:
        return msgspec.json.decode(raw)
    except _UNSOUND as error:
        what = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise invalid(f"{param} is invalid: {what}", param) from error


def is_given(raw: Raw) -> bool:
    return bytes(raw) != b"null"


def explain(message: str, field: str | None = None) -> APIError:
    """Rewrites a message of msgspec about the body or one of its fields, such as "Expected `int` <= 9 - at `$[0]`"."""
    what, _, path = message.partition(" - at `$")
    param = ((field or "") + path.rstrip("`")).lstrip(".") or None
    if what.startswith("Object missing required field `"):
        name = what.split("`")[1]
        return _missing(f"{param}.{name}" if param else name)
    return invalid(f"{param or 'the body'} is invalid: {what[:1].lower()}{what[1:]}", param)


def _missing(param: str) -> APIError:
    return invalid(f"the required parameter {param} is missing", param, "missing_required_parameter")


def refused_fields(kind: type[Struct]) -> frozenset[str]:
    """Fields that requests of this kind may not have, though they are known."""
    return frozenset(_refused(kind))


def _refused(kind: type[Struct]) -> Mapping[str, str]:
    return getattr(kind, "REFUSED", _REFUSED)


def refuse_unsupported(request: Struct) -> None:
    """Raises `APIError` 400 for fields that are refused rather than ignored."""
    for name, message in _refused(type(request)).items():
        value = getattr(request, name, None)
        is_empty = bytes(value) in _EMPTY_JSON if isinstance(value, Raw) else value in _EMPTY
        if not is_empty:
            raise unsupported(name, f"{name} is not supported: {message}")
    if getattr(request, "detokenize", None) is False:
        raise unsupported("detokenize", "detokenize: false is not supported: answers have text; leave it out")


def _log_unknown(kind: type[Struct], body: bytes | bytearray) -> None:
    names = {name.encode_name for name in msgspec.structs.fields(kind)}
    unknown = sorted(set(msgspec.json.decode(body, type=dict[str, Raw])) - names)
    if unknown:
        log.debug("ignored unknown fields: %.200s", ", ".join(map(repr, unknown)))
