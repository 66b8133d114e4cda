"""Validates conversations and converts them to what chat templates expect. Raises ValueError."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_OWN_VARIABLES = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
}


def parse_messages(messages: Any) -> list[dict[str, Any]]:
    """One conversation as templates expect it: contents are strings, None values are dropped. Raises ValueError."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"a conversation is a list of at least one message, not {messages!r:.100}")
    return [_parse_message(message, i) for i, message in enumerate(messages)]


def _parse_message(message: Any, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {index} must be a dict with role and content, not {message!r:.100}")
    parsed = {key: value for key, value in message.items() if value is not None}
    if "content" in parsed:
        parsed["content"] = _parse_content(parsed["content"], index)
    elif not parsed.get("tool_calls"):
        raise ValueError(f"message {index} (role {parsed['role']!r:.50}) has neither content nor tool_calls")
    if "tool_calls" in parsed:
        parsed["tool_calls"] = _parse_tool_calls(parsed["tool_calls"], index)
    return parsed


def _parse_content(content: Any, index: int) -> str:
    """Joins text parts with line breaks; templates of text models take a single string."""
    if isinstance(content, str):
        return content
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise ValueError(f"the content of message {index} must be a string or a list of parts, not {content!r:.100}")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"message {index} has a part {part!r:.100}; only text is supported: {{'type': 'text', 'text': '...'}}"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _parse_tool_calls(calls: Any, index: int) -> list[dict[str, Any]]:
    """Decodes function arguments: OpenAI's clients send them as a JSON string, templates expect the object."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"tool_calls of message {index} must be a list of dicts, not {calls!r:.100}")
    parsed = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError) as error:
                raise ValueError(f"message {index} calls a tool with arguments that are not JSON: {error}") from error
            call = {**call, "function": {**function, "arguments": arguments}}
        parsed.append(dict(call))
    return parsed


def parse_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Descriptions of the functions that the model may call; an empty list becomes None."""
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools must be a list of JSON schemas (dicts), not {tools!r:.100}")
    return [dict(tool) for tool in tools] or None


def parse_kwargs(kwargs: Any) -> dict[str, Any]:
    """Additional template variables. Raises ValueError for names that chat sets itself."""
    if not isinstance(kwargs, Mapping | None) or not all(isinstance(key, str) for key in kwargs or ()):
        raise ValueError(f"chat_template_kwargs must be a dict of the template's variables, not {kwargs!r:.100}")
    taken = sorted(_OWN_VARIABLES.intersection(kwargs or ()))
    if taken:
        raise ValueError(f"chat_template_kwargs has {', '.join(taken)}, which chat itself sets; leave it out")
    return dict(kwargs or {})
