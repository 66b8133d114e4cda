"""Chooses the parsers for a model's answers, from its chat template unless configured."""

from collections.abc import Mapping
from typing import Any

from jaxllm.server.openai.parsing import deepseek, harmony, mistral, reasoning, tools
from jaxllm.server.openai.parsing.events import Parser, Plain
from jaxllm.server.openai.parsing.harmony import HarmonyParser
from jaxllm.server.openai.parsing.pythonic import PythonicParser
from jaxllm.server.openai.parsing.reasoning import ThinkParser
from jaxllm.server.openai.parsing.tagged import TAGS, TaggedParser

_PARSERS = {
    "hermes": tools.HermesParser,
    "llama": tools.LlamaParser,
    "mistral": mistral.MistralParser,
    "deepseek_v3": deepseek.DeepSeekParser,
    "deepseek_v31": deepseek.DeepSeekParser,
    "pythonic": PythonicParser,
}
# What shows a format in a template; the first that fits, as Qwen3-Coder's and GLM's have Hermes' tags too.
_SIGNS = (
    ("openai", (harmony.CHANNEL, harmony.MESSAGE)),
    ("qwen3_coder", (TAGS["qwen3_coder"].function, TAGS["qwen3_coder"].parameter)),
    ("glm45", (TAGS["glm45"].parameter,)),
    ("minimax_m2", (TAGS["minimax_m2"].open,)),
    ("hermes", (tools.OPEN,)),
    ("mistral", (mistral.OPEN,)),
    ("deepseek_v3", (deepseek.CALLS_OPEN, "```json")),
    ("deepseek_v31", (deepseek.CALLS_OPEN,)),
    ("pythonic", ("[func_name1(",)),
    ("llama", (tools.PYTHON_TAG,)),
    ("llama", ('"parameters": dictionary',)),
)
# Formats whose marks are special tokens, which the text must keep.
MARKED_BY_TOKENS = frozenset(
    {"openai", "openai_gptoss", "mistral", "deepseek_v3", "deepseek_v31", "glm45", "minimax_m2"}
)


def tool_format(wanted: str, template: str) -> str | None:
    """The name of a format of tool calls; None if the template shows none that is known."""
    if wanted != "auto":
        return None if wanted == "none" else wanted
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), None)


def thought_format(wanted: str, template: str) -> str | None:
    """The name of a format of reasoning, "openai_gptoss" or one of `reasoning.MARKS`; None for none."""
    if wanted != "auto":
        return None if wanted == "none" else wanted
    if tool_format("auto", template) == "openai":
        return "openai_gptoss"
    return next((name for name, (_, close) in reasoning.MARKS.items() if close in template), None)


def make_parser(
    prompt: str, *, calls: str | None, thoughts: str | None, schemas: Mapping[str, Any] | None = None
) -> Parser:
    """The parser for one answer to `prompt`. `calls` and `thoughts` are formats, None for none; `schemas` are those of
    the tools' parameters by name."""
    if calls == "openai" or thoughts == "openai_gptoss":
        return HarmonyParser(prompt, has_tools=calls is not None)
    inner: Parser
    if calls in TAGS:
        inner = TaggedParser(TAGS[calls], schemas or {})
    else:
        inner = Plain() if calls is None else _PARSERS[calls]()
    if thoughts is None:
        return inner
    marks = reasoning.MARKS[thoughts]
    return ThinkParser(inner, is_open=prompt.rstrip().endswith(marks[0]), marks=marks)
