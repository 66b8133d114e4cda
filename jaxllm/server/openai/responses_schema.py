"""The request of POST /v1/responses, and its conversion to a chat request."""

from typing import Annotated, Any

from msgspec import Meta, Raw, Struct, field

from jaxllm.sampling_params import MAX_LOGPROBS
from jaxllm.server.http.errors import invalid, unsupported
from jaxllm.server.openai.decoding import decode_field, is_given, null
from jaxllm.server.openai.schemas import (
    MAX_ENTRIES,
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    Count,
    Function,
    FunctionCall,
    FunctionName,
    Message,
    Name,
    NamedSchema,
    Parts,
    Probability,
    ResponseFormatOption,
    Tool,
    ToolCall,
    ToolChoice,
    check_parts,
)


class FlatTool(Struct, kw_only=True):
    """A function tool whose fields are at the top level."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: Raw = field(default_factory=null)
    strict: bool | None = None


class InputItem(Struct, kw_only=True):
    """An item of the input: a message, a tool call, or a tool's result."""

    type: str = "message"
    role: str | None = None
    content: str | Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None


class TextFormat(Struct, kw_only=True):
    """A response format whose schema is at the top level."""

    type: str
    name: str | None = None
    schema: Raw = field(default_factory=null)


class Text(Struct, kw_only=True):
    format: Raw = field(default_factory=null)  # a `TextFormat`; the answer repeats all of it


class ReasoningOptions(Struct, kw_only=True):
    effort: str | None = None


class ResponsesRequest(Struct, kw_only=True):
    model: Name | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_ENTRIES)] | None = None
    truncation: str | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Raw = field(default_factory=null)
    prompt: Raw = field(default_factory=null)
    include: Annotated[list[str], Meta(max_length=MAX_ENTRIES)] | None = None
    cache_salt: Name | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.input, str):
            check_parts(content for item in self.input for content in (item.content, item.output))


_STATE = "this server keeps no responses: send the whole conversation as input"
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = {  # the others are parts of what no response of this server has
    _LOGPROBS,
    *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
    *("web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url"),
    "code_interpreter_call.outputs",
}
_ROLES = {"user", "assistant", "system", "developer"}


def check_stateless(request: ResponsesRequest) -> None:
    """Raises `APIError` for what needs stored state, and for OpenAI's built-in tools."""
    for name in ("previous_response_id", "background"):
        if getattr(request, name):
            raise unsupported(name, f"{name} is not supported: {_STATE}")
    if is_given(request.conversation):
        raise unsupported("conversation", f"conversation is not supported: {_STATE}")
    if is_given(request.prompt):
        raise unsupported("prompt", "stored prompts are not supported; send their text as instructions")
    if request.truncation not in (None, "disabled"):
        raise unsupported("truncation", "what is too long is refused here, not cut; leave truncation out")
    unknown = next((name for name in request.include or () if name not in _INCLUDABLE), None)
    if unknown is not None:
        raise unsupported("include", f"include: {unknown!r:.100} is not known; {_LOGPROBS} can be included")
    for i, tool in enumerate(request.tools or ()):
        if tool.type != "function" or tool.name is None:
            raise unsupported(f"tools[{i}].type", "only tools of type function, with a name, are supported")


def as_chat(request: ResponsesRequest, model: str) -> ChatRequest:
    """The equivalent chat request. Raises `APIError`."""
    check_stateless(request)
    messages = [] if request.instructions is None else [Message(role="system", content=request.instructions)]
    if isinstance(request.input, str):
        messages.append(Message(role="user", content=request.input))
    else:
        for i, item in enumerate(request.input):
            _add_item(messages, item, f"input[{i}]")
    tools = [
        Tool(type="function", function=Function(name=t.name, description=t.description, parameters=t.parameters))
        for t in request.tools or ()
    ]
    choice = request.tool_choice if tools or request.tool_choice != "auto" else None
    has_logprobs = request.top_logprobs is not None or _LOGPROBS in (request.include or ())
    return ChatRequest(
        model=model,
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        stream=request.stream,
        logprobs=has_logprobs,
        top_logprobs=request.top_logprobs,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        response_format=_response_format(request),
        cache_salt=request.cache_salt,
    )


def _response_format(request: ResponsesRequest) -> ResponseFormatOption | None:
    """`text.format` as `response_format`, whose schema is one level deeper."""
    if request.text is None or not is_given(request.text.format):
        return None
    text_format = decode_field(TextFormat, request.text.format, "text.format")
    json_schema = None
    if text_format.type == "json_schema":
        json_schema = NamedSchema(name=text_format.name, schema=text_format.schema)
    return ResponseFormatOption(type=text_format.type, json_schema=json_schema)


def _add_item(messages: list[Message], item: InputItem, param: str) -> None:
    match item.type:
        case "message":
            if item.role not in _ROLES:
                raise invalid(f"{param}.role must be one of {', '.join(sorted(_ROLES))}", f"{param}.role")
            messages.append(Message(role=item.role, content=item.content))
        case "function_call":
            function = FunctionCall(name=item.name or "", arguments=item.arguments or "")
            call = ToolCall(id=item.call_id, function=function)
            if messages and messages[-1].tool_calls:  # calls of one turn are one message
                messages[-1].tool_calls.append(call)
            else:
                messages.append(Message(role="assistant", tool_calls=[call]))
        case "function_call_output":
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=item.output or ""))
        case "reasoning":
            pass  # templates leave out the reasoning of earlier turns
        case _:
            raise unsupported(f"{param}.type", f"items of type {item.type!r:.50} are not supported")


def echo(request: ResponsesRequest) -> dict[str, Any]:
    """The fields of the request that a response repeats."""
    text_format = null() if request.text is None else request.text.format
    return {
        "instructions": request.instructions,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": request.tools or [],
        "max_output_tokens": request.max_output_tokens,
        "previous_response_id": None,
        "background": False,
        "store": False,
        "truncation": "disabled",
        "text": {"format": text_format if is_given(text_format) else {"type": "text"}},
        "reasoning": {"effort": request.reasoning and request.reasoning.effort},
    }
