"""The requests' fields, types and ranges. Unknown fields are ignored, because OpenAI's clients send many."""

import logging
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from jaxllm.argument_checks import nests_deeper
from jaxllm.sampling_params import MAX_BEAM_WIDTH, MAX_LOGPROBS, MAX_N, MAX_SALT_LEN
from jaxllm.server.http.errors import APIError, invalid, unsupported

log = logging.getLogger(__name__)

MAX_DEPTH = 64  # of JSON inside JSON
MAX_BEST_OF = 20
MAX_PROMPTS = 2048
MAX_SEQUENCES = 2048  # of one HTTP request: prompts times samples
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_NAME_LEN = 256
MAX_STOP_CHARS = 1024  # each token searches for the stop strings

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Word = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LEN)]
FunctionName = Annotated[str, Meta(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_.-]+$")]


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    queue_position: bool | None = None  # stream comments while waiting: `: queue N`, N requests before this one


class Sampling(Struct, kw_only=True):
    """The fields that completions and chats share; None: not given. Sampling parameters have the names of
    `SamplingParams`."""

    model: Name
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Meta(ge=0, le=MAX_BEST_OF)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-3, le=1e3)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Word | list[Word] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[Word] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    beam_width: Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)] | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    # Response formats; see response_format.py.
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    grammar: Any = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_LEN)] | None = None
    # Refused rather than ignored.
    kv_transfer_params: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    logits_processors: Any = None
    use_beam_search: bool | None = None


class CompletionRequest(Sampling, kw_only=True):
    prompt: str | list[str | int | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = 16
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: Any = None
    add_special_tokens: bool | None = None


class ContentPart(Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, kw_only=True):
    name: Name
    arguments: str = ""


class ToolCall(Struct, kw_only=True):
    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Struct, kw_only=True, omit_defaults=True):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: Name | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class Function(Struct, kw_only=True, omit_defaults=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    type: Literal["function"]
    function: Function


class ChatRequest(Sampling, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    chat_template: Any = None
    documents: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    mm_processor_kwargs: Any = None


class TokenizeRequest(Struct, kw_only=True):
    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[TokenId]
    model: Name | None = None


_REFUSED = {
    "suffix": "text can't be inserted before a suffix; leave it out",
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
}
_EMPTY = (None, False, [], {})

Request = TypeVar("Request", bound=Struct)


def decode(kind: type[Request], body: bytes) -> Request:
    """Decodes a JSON body. Raises `APIError` 400 with the path of the wrong field."""
    try:
        request = _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        what = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise invalid(f"the body is not sound JSON: {what}", code=None) from error
    for name, message in _REFUSED.items():
        if getattr(request, name, None) not in _EMPTY:
            raise unsupported(name, f"{name} is not supported: {message}")
    if log.isEnabledFor(logging.DEBUG):
        _log_unknown(kind, body)
    return request


def refused_fields() -> frozenset[str]:
    """Fields that are known, and refused whatever they hold."""
    return frozenset(_REFUSED)


_decoders: dict[type, msgspec.json.Decoder] = {}


def _decoder(kind: type) -> msgspec.json.Decoder:
    return _decoders.get(kind) or _decoders.setdefault(kind, msgspec.json.Decoder(kind))


def _explain(message: str) -> APIError:
    """Rewrites a message of msgspec, such as "Expected `int` <= 128 - at `$.n`"."""
    what, _, path = message.partition(" - at `$")
    param = path.rstrip("`").lstrip(".") or None
    if what.startswith("Object missing required field `"):
        name = what.split("`")[1]
        param = f"{param}.{name}" if param else name
        return invalid(f"the required parameter {param} is missing", param, "missing_required_parameter")
    return invalid(f"{param or 'the body'} is invalid: {what[:1].lower()}{what[1:]}", param)


def check_stream(request: Sampling) -> None:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is for streams; set stream: true, or leave it out", "stream_options")


def wants_queue_position(request: Sampling) -> bool:
    return request.stream_options is not None and bool(request.stream_options.queue_position)


def check_depth(value: Any, param: str) -> None:
    """Raises `APIError` 400 if `value` nests deeper than `MAX_DEPTH`."""
    if nests_deeper(value, MAX_DEPTH):
        raise invalid(f"{param} is nested more than {MAX_DEPTH} levels deep; flatten it", param)


def _log_unknown(kind: type, body: bytes) -> None:
    names = {name.encode_name for name in msgspec.structs.fields(kind)}
    unknown = sorted(set(msgspec.json.decode(body, type=dict[str, msgspec.Raw])) - names)
    if unknown:
        log.debug("ignored unknown fields: %.200s", ", ".join(map(repr, unknown)))
