"""The request of POST /v1/responses, and its conversion to a chat request."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from jaxllm.sampling_params import MAX_LOGPROBS
from jaxllm.server.http.errors import invalid, unsupported
from jaxllm.server.openai.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    ContentPart,
    Count,
    Function,
    FunctionCall,
    FunctionName,
    Message,
    Name,
    Probability,
    Tool,
    ToolCall,
)


class FlatTool(Struct, kw_only=True):
    """A function tool whose fields are at the top level."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputItem(Struct, kw_only=True):
    """An item of the input: a message, a tool call, or a tool's result."""

    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class Text(Struct, kw_only=True):
    format: dict[str, Any] | None = None


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
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    include: list[str] | None = None
    cache_salt: Name | None = None


_STATE = "this server keeps no responses: send the whole conversation as input"
_ROLES = {"user", "assistant", "system", "developer"}


def check_stateless(request: ResponsesRequest) -> None:
    """Raises `APIError` for what needs stored state, and for OpenAI's built-in tools."""
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(request, name):
            raise unsupported(name, f"{name} is not supported: {_STATE}")
    if request.prompt is not None:
        raise unsupported("prompt", "stored prompts are not supported; send their text as instructions")
    if request.truncation not in (None, "disabled"):
        raise unsupported("truncation", "what is too long is refused here, not cut; leave truncation out")
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
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
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
        logprobs=None if request.top_logprobs is None else True,
        top_logprobs=request.top_logprobs,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        response_format=_response_format(request),
        cache_salt=request.cache_salt,
    )


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    """`text.format` as `response_format`, whose schema is one level deeper."""
    text_format = None if request.text is None else request.text.format
    if text_format is None or text_format.get("type") != "json_schema":
        return text_format
    json_schema = {name: text_format[name] for name in ("name", "schema") if name in text_format}
    return {"type": "json_schema", "json_schema": json_schema}


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
    return {
        "instructions": request.instructions,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": msgspec.to_builtins(request.tools or []),
        "max_output_tokens": request.max_output_tokens,
        "previous_response_id": None,
        "background": False,
        "store": False,
        "truncation": "disabled",
        "text": {"format": (request.text and request.text.format) or {"type": "text"}},
        "reasoning": {"effort": request.reasoning and request.reasoning.effort},
    }
