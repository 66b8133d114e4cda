"""Chooses the parsers for a model's answers, from its chat template unless configured."""

from jaxllm.server.openai.parsing import reasoning, tools
from jaxllm.server.openai.parsing.events import Parser, Plain
from jaxllm.server.openai.parsing.reasoning import ThinkParser


def tool_format(wanted: str, template: str) -> str | None:
    """A name in `tools.PARSERS`; None if the template shows no known format of tool calls."""
    if wanted != "auto":
        return None if wanted == "none" else wanted
    if tools.OPEN in template:
        return "hermes"
    if tools.PYTHON_TAG in template or '"parameters": dictionary' in template:
        return "llama"
    return None


def thinks(wanted: str, template: str) -> bool:
    return wanted == "think" or wanted == "auto" and reasoning.CLOSE in template


def make_parser(prompt: str, *, has_tools: str | None, has_thoughts: bool) -> Parser:
    """The parser for one answer to `prompt`. `has_tools`: the format of its tool calls, None for none."""
    inner = Plain() if has_tools is None else tools.PARSERS[has_tools]()
    if not has_thoughts:
        return inner
    return ThinkParser(inner, is_open=prompt.rstrip().endswith(reasoning.OPEN))
