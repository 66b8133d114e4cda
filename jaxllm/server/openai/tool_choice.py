"""`tool_choice` of type allowed_tools: some of the tools, in the form of chats and of responses."""

from jaxllm.server.http.errors import APIError, invalid
from jaxllm.server.openai.schemas import AllowedTools, ChatRequest, NamedTool, ToolRef


def narrow_tools(request: ChatRequest) -> None:
    """Leaves the tools that the request allows, and the mode as its `tool_choice`. The model is shown these alone, as
    it could call any that it sees. Raises `APIError`."""
    choice = request.tool_choice
    if not isinstance(choice, NamedTool) or choice.type != "allowed_tools":
        return
    allowed = choice.allowed_tools
    if allowed is None and choice.tools is not None:
        allowed = AllowedTools(mode=choice.mode or "auto", tools=choice.tools)
    if allowed is None:
        raise _wrong("tools must be a list of at least one tool")
    names = [_name(one) for one in allowed.tools]
    known = {tool.function.name: tool for tool in request.tools or ()}
    for name in names:
        if name not in known:
            raise _wrong(f"{name!r:.100} is not one of tools")
    request.tools = [tool for name, tool in known.items() if name in names]
    request.tool_choice = allowed.mode


def _name(tool: ToolRef) -> str:
    if tool.called is None:
        raise _wrong("each tool must be of type function, with a name")
    return tool.called


def _wrong(what: str) -> APIError:
    return invalid(f"tool_choice.allowed_tools: {what}", "tool_choice")
