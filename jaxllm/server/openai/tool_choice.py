"""`tool_choice` of type allowed_tools: some of the tools, in the form of chats and of responses."""

from typing import Any

from jaxllm.server.http.errors import APIError, invalid
from jaxllm.server.openai.schemas import ChatRequest

_MODES = ("auto", "required")


def narrow_tools(request: ChatRequest) -> None:
    """Leaves the tools that the request allows, and the mode as its `tool_choice`. The model is shown these alone, as
    it could call any that it sees. Raises `APIError`."""
    choice = request.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return
    allowed = choice.get("allowed_tools", choice)
    mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
    if not isinstance(mode, str) or mode not in _MODES:
        raise _wrong(f"mode must be one of {', '.join(_MODES)}")
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not listed:
        raise _wrong("tools must be a list of at least one tool")
    names = [_name(one) for one in listed]
    known = {tool.function.name: tool for tool in request.tools or ()}
    for name in names:
        if name not in known:
            raise _wrong(f"{name!r:.100} is not one of tools")
    request.tools = [tool for name, tool in known.items() if name in names]
    request.tool_choice = mode


def _name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or tool.get("type") != "function":
        raise _wrong("each tool must be of type function, with a name")
    return name


def _wrong(what: str) -> APIError:
    return invalid(f"tool_choice.allowed_tools: {what}", "tool_choice")
