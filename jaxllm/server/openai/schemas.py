"""The requests' fields, types and ranges. Unknown fields are ignored, because OpenAI's clients send many."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct, field

from jaxllm.argument_checks import nests_deeper
from jaxllm.sampling_params import MAX_BEAM_WIDTH, MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS, MAX_N, MAX_SALT_LEN
from jaxllm.server.http.errors import invalid
from jaxllm.server.openai.decoding import null, untyped
from jaxllm.structured_outputs import MAX_CHOICES

MAX_DEPTH = 64  # of JSON inside JSON
MAX_BEST_OF = 20
MAX_PROMPTS = 2048
MAX_SEQUENCES = 2048  # of one HTTP request: prompts times samples
MAX_LOGPROB_ENTRIES = 1 << 20  # of an HTTP request for more than one text: some 30 MB of JSON
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_NAME_LEN = 256
MAX_STOP_CHARS = 1024  # each token searches for the stop strings
MAX_PARTS = 8192  # of all messages
# Of lists and objects, so that the memory that they take is bounded; `SamplingParams` and the engine allow less.
MAX_TOKEN_IDS = 1 << 20
MAX_ENTRIES = 4096

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Word = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LEN)]
FunctionName = Annotated[str, Meta(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_.-]+$")]


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    queue_position: bool | None = None  # stream comments while waiting: `: queue N`, N requests before this one


class NamedSchema(Struct, kw_only=True):
    name: str | None = None
    schema: Raw = field(default_factory=null)


class ResponseFormatOption(Struct, kw_only=True):
    type: str
    json_schema: NamedSchema | None = None


class StructuredOutputsOption(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of `StructuredOutputs`, whose schema stays JSON."""

    json: Raw = field(default_factory=null)
    regex: str | None = None
    choice: Annotated[list[str], Meta(max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: Raw = field(default_factory=null)


class Sampling(Struct, kw_only=True):
    """The fields that completions and chats share; None: not given. Sampling parameters have the names of
    `SamplingParams`."""

    model: Name | None = None  # None: the one that is served
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
    stop: Word | Annotated[list[Word], Meta(max_length=MAX_ENTRIES)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ENTRIES)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_ENTRIES)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[Word], Meta(max_length=MAX_ENTRIES)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    beam_width: Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)] | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Response formats; see response_format.py.
    response_format: ResponseFormatOption | None = None
    structured_outputs: StructuredOutputsOption | None = None
    guided_json: Raw = field(default_factory=null)
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(max_length=MAX_CHOICES)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    grammar: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_LEN)] | None = None
    # Refused rather than ignored.
    kv_transfer_params: Raw = field(default_factory=null)
    thinking_token_budget: Raw = field(default_factory=null)
    repetition_detection: Raw = field(default_factory=null)
    logits_processors: Raw = field(default_factory=null)
    use_beam_search: Raw = field(default_factory=null)
    prompt_embeds: Raw = field(default_factory=null)
    vllm_xargs: Raw = field(default_factory=null)
    request_id: Raw = field(default_factory=null)
    detokenize: bool | None = None


class CompletionRequest(Sampling, kw_only=True):
    prompt: str | Annotated[list[str | int | TokenIds], Meta(max_length=MAX_TOKEN_IDS)]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = 16
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None  # the answer is what comes between prompt and suffix
    add_special_tokens: bool | None = None


class ContentPart(Struct, kw_only=True, gc=False):
    type: str
    text: str | None = None
    refusal: str | None = None


Parts = Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)]


class FunctionCall(Struct, kw_only=True):
    name: Name
    arguments: str = ""


class ToolCall(Struct, kw_only=True):
    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Struct, kw_only=True, omit_defaults=True):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | Parts | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # newer vLLM's name of the same
    refusal: str | None = None


def check_parts(contents: Iterable[str | Parts | None]) -> None:
    """Raises `APIError` if the parts of all messages are too many: they take more memory than texts."""
    count = sum(len(content) for content in contents if isinstance(content, list))
    if count > MAX_PARTS:
        raise invalid(f"the messages have {count} parts; at most {MAX_PARTS} are allowed", "messages")


class Function(Struct, kw_only=True):
    name: FunctionName
    description: str | None = None
    parameters: Raw = field(default_factory=null)
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    type: Literal["function"]
    function: Function


class FunctionRef(Struct, kw_only=True):
    name: str


class ToolRef(Struct, kw_only=True, omit_defaults=True):
    """Names a tool."""

    type: str
    name: str | None = None  # in /v1/responses
    function: FunctionRef | None = None  # in chats

    @property
    def called(self) -> str | None:
        """The function's name; None if it is another kind of tool."""
        if self.type != "function":
            return None
        return self.name if self.function is None else self.function.name


ToolRefs = Annotated[list[ToolRef], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Struct, kw_only=True):
    mode: Literal["auto", "required"] = "auto"
    tools: ToolRefs


class NamedTool(ToolRef, kw_only=True, omit_defaults=True):
    """A `tool_choice` that is an object: a tool, or of type allowed_tools some of them."""

    allowed_tools: AllowedTools | None = None  # in chats
    mode: Literal["auto", "required"] | None = None  # in /v1/responses, like the next one
    tools: ToolRefs | None = None


ToolChoice = str | NamedTool


class ChatRequest(Sampling, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[str], Meta(max_length=MAX_ENTRIES)] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Annotated[dict[str, str | int | float | bool | None], Meta(max_length=MAX_ENTRIES)] | None = (
        None
    )
    echo: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    chat_template: Raw = field(default_factory=null)
    documents: Raw = field(default_factory=null)
    functions: Raw = field(default_factory=null)
    function_call: Raw = field(default_factory=null)
    web_search_options: Raw = field(default_factory=null)
    mm_processor_kwargs: Raw = field(default_factory=null)
    audio: Raw = field(default_factory=null)

    def __post_init__(self) -> None:
        check_parts(message.content for message in self.messages)


class TokenizeRequest(Struct, kw_only=True):
    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    def __post_init__(self) -> None:
        check_parts(message.content for message in self.messages or ())


class DetokenizeRequest(Struct, kw_only=True):
    tokens: TokenIds
    model: Name | None = None


def check_stream(request: Sampling) -> None:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is for streams; set stream: true, or leave it out", "stream_options")


def wants_queue_position(request: Sampling) -> bool:
    return request.stream_options is not None and bool(request.stream_options.queue_position)


def check_depth(value: Any, param: str) -> None:
    """Raises `APIError` 400 if `value` nests deeper than `MAX_DEPTH`."""
    if nests_deeper(value, MAX_DEPTH):
        raise invalid(f"{param} is nested more than {MAX_DEPTH} levels deep; flatten it", param)


def parameters_of(function: Function) -> dict[str, Any] | None:
    """The JSON schema of its parameters: not to be kept, as it may take much more memory than its JSON. Raises
    `APIError` 400."""
    parameters = untyped(function.parameters, "tools")
    if not isinstance(parameters, dict | None):
        raise invalid(f"the parameters of {function.name} must be a JSON schema, an object", "tools")
    check_depth(parameters, "tools.function.parameters")
    return parameters


def plain_tool(tool: Tool) -> dict[str, Any]:
    """The tool as templates expect it. Raises `APIError` 400."""
    function = tool.function
    plain: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        plain["description"] = function.description
    parameters = parameters_of(function)
    if parameters is not None:
        plain["parameters"] = parameters
    if function.strict is not None:
        plain["strict"] = function.strict
    return {"type": tool.type, "function": plain}
