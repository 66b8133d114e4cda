"""Parses and validates requests in JSON lines, before anything runs and without jax."""

import dataclasses
import json
from collections.abc import Iterator
from hashlib import blake2b
from io import BufferedIOBase
from typing import Any, NamedTuple

from jaxllm.argument_checks import a_type
from jaxllm.cli.sampling_options import with_defaults
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.messages import parse_kwargs, parse_messages, parse_tools

MAX_LINE_BYTES = 2**26
_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_IDS = ("id", "custom_id")
_CHAT_FIELDS = ("tools", "chat_template_kwargs")
NOT_SAMPLING = {"output_kind", "stream_interval", "cache_salt"}  # for streams, and for servers with several users
_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams) if field.init} - NOT_SAMPLING


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The command line's settings for all lines. A line's own sampling fields take precedence over `fields`, and these
    over what the model recommends."""

    fields: dict[str, Any]
    recommended: dict[str, Any] = dataclasses.field(default_factory=dict)  # by the model, before the commands' defaults
    chat: bool = False  # prompts are user messages
    system: str | None = None  # for conversations without a system message
    chat_template: str | None = None
    model: str = ""  # part of the digest, so that results of two models are not mixed


class JsonlRequest(NamedTuple):
    """A valid line. `given` identifies it in the results: its id, if any, and its prompt as given."""

    number: int  # from 1
    given: dict[str, Any]
    prompt: Any  # as for `LLM.generate`; None for a conversation
    messages: list[dict[str, Any]] | None
    chat_options: dict[str, Any]  # of `LLM.chat_prompt`
    params: SamplingParams
    digest: str  # of everything that determines the result


class BadJsonlLine(NamedTuple):
    number: int
    given: dict[str, Any]
    error: str
    digest: str


def raw_lines(stream: BufferedIOBase) -> Iterator[tuple[int, bytes]]:
    """The number, from 1, and the bytes of each line that is not blank; of one that is longer than `MAX_LINE_BYTES`
    its beginning, one byte too long."""
    number = 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        rest = raw
        while len(raw) > MAX_LINE_BYTES and rest and not rest.endswith(b"\n"):
            rest = stream.readline(MAX_LINE_BYTES)
        if raw.strip():
            yield number, raw


def read_lines(stream: BufferedIOBase, settings: Settings) -> Iterator[JsonlRequest | BadJsonlLine]:
    """Parses each line of `stream` that is not blank."""
    for number, raw in raw_lines(stream):
        digest = _digest(raw)
        if len(raw) > MAX_LINE_BYTES:
            yield BadJsonlLine(number, {}, f"it is longer than {MAX_LINE_BYTES} bytes", digest)
        else:
            yield _parse(number, raw, digest, settings)


def _parse(number: int, raw: bytes, digest: str, settings: Settings) -> JsonlRequest | BadJsonlLine:
    given: dict[str, Any] = {}
    try:
        value = _load(raw)
        _canonical(value)  # raises for values that JSON or UTF-8 can't represent
        if isinstance(value, str):
            value = {"prompt": value}
        if not isinstance(value, dict):
            kind = "null" if value is None else a_type(value)
            raise ValueError(f"it holds {kind}, not a string or an object")
        given |= _identity(value)
        return _request(number, value, given, settings)
    except ValueError as error:
        return BadJsonlLine(number, given, str(error), digest)
    except RecursionError:
        return BadJsonlLine(number, given, "it is nested too deeply", digest)


def _load(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig").strip(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg} at column {error.colno})") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, which is not JSON")


def _identity(value: dict[str, Any]) -> dict[str, Any]:
    found = [name for name in _IDS if value.get(name) is not None]
    if not found:
        return {}
    if len(found) > 1 or isinstance(value[found[0]], bool) or not isinstance(value[found[0]], str | int):
        raise ValueError(f"{' and '.join(found)} must be one string or integer")
    return {"id": value[found[0]]}


def _request(number: int, value: dict[str, Any], given: dict[str, Any], settings: Settings) -> JsonlRequest:
    unknown = sorted(set(value) - _SAMPLING - {*_PROMPTS, *_IDS, *_CHAT_FIELDS})
    if unknown:
        raise ValueError(f"it has unknown fields: {', '.join(map(repr, unknown))}")
    kinds = [name for name in _PROMPTS if name in value]
    if len(kinds) != 1:
        raise ValueError(f"it must have one of {', '.join(_PROMPTS)}; it has {' and '.join(kinds) or 'none'}")
    (kind,) = kinds
    given[kind] = value[kind]
    messages = _messages(kind, value[kind], settings)
    chat_options = {name: value[name] for name in _CHAT_FIELDS if value.get(name) is not None}
    if messages is None and chat_options:
        raise ValueError(f"{' and '.join(chat_options)} are for messages, or --chat")
    parse_tools(chat_options.get("tools"))
    parse_kwargs(chat_options.get("chat_template_kwargs"))
    if settings.chat_template is not None and messages is not None:
        chat_options["chat_template"] = settings.chat_template
    own = {name: value[name] for name in _SAMPLING if name in value}
    fields = with_defaults(settings.fields | own, settings.recommended)
    params = SamplingParams(**fields)
    digest = _digest(_canonical([given, messages, chat_options, fields, settings.model]))
    prompt = {kind: value[kind]} if messages is None else None
    return JsonlRequest(number, given, prompt, messages, chat_options, params, digest)


def _messages(kind: str, value: Any, settings: Settings) -> list[dict[str, Any]] | None:
    """The conversation of the line; None for a prompt."""
    if kind == "prompt_token_ids":
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise ValueError("prompt_token_ids must be a list of integers")
        return None
    if kind == "prompt" and not isinstance(value, str):
        raise ValueError(f"prompt is {a_type(value)}, not a string")
    if kind == "prompt" and not settings.chat:
        return None
    return conversation(value, settings.system)


def conversation(value: Any, system: str | None) -> list[dict[str, Any]]:
    """Messages from `value`, a user message or messages. Raises `ValueError`."""
    messages = parse_messages([{"role": "user", "content": value}] if isinstance(value, str) else value)
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _canonical(value: Any) -> bytes:
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half of a surrogate pair (\\ud800 to \\udfff), which is not text") from error


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()
