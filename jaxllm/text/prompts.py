"""Normalises the prompts and parameters that users pass."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from jaxllm.sampling_params import SamplingParams


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]  # its text, if known


class Prompt(NamedTuple):
    text: str | None
    token_ids: list[int]


def parse_prompts(prompts: Any, tokenizer: Any) -> list[Prompt]:
    """One prompt, or a list of them. ValueError for anything else."""
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ValueError(f"prompts is a {type(prompts).__name__}; expected a string, a dict or a list of them")
    return [parse_prompt(prompt, tokenizer) for prompt in prompts]


def parse_prompt(prompt: Any, tokenizer: Any) -> Prompt:
    """A string, `{"prompt": str}`, `{"prompt_token_ids": [...]}` or a list of token ids. ValueError otherwise."""
    if _is_ids(prompt):
        return Prompt(None, list(prompt))
    if isinstance(prompt, Mapping):
        ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        unknown = sorted(set(prompt) - {"prompt_token_ids", "prompt"})
        if unknown or (ids is None and text is None):
            raise ValueError(f"a prompt dict has the key 'prompt' or 'prompt_token_ids', not {sorted(prompt)}")
        if ids is not None:
            if isinstance(ids, str) or not isinstance(ids, Sequence):
                raise ValueError(f"prompt_token_ids is a {type(ids).__name__}; expected a list of integers")
            return Prompt(text, list(ids))
        prompt = text
    if not isinstance(prompt, str):
        raise ValueError(f"a prompt is a {type(prompt).__name__}; expected a string or a dict")
    if tokenizer is None:
        raise ValueError("a text prompt needs a tokenizer; pass tokenizer=... or {'prompt_token_ids': [...]}")
    return Prompt(prompt, tokenizer.encode(prompt))


def _is_ids(prompt: Any) -> bool:
    """Whether `prompt` is meant as a list of token ids; the engine checks each id."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], int)


def is_conversation(messages: Any) -> bool:
    """Whether `messages` is meant as one conversation rather than a list of conversations."""
    return not isinstance(messages, Sequence) or not messages or isinstance(messages[0], Mapping | str)


def parse_each(name: str, value: Any, kind: type, count: int) -> list:
    """`count` values, from one value for all prompts or a list with one for each. ValueError otherwise."""
    values = [value] * count if isinstance(value, kind) else value
    if not isinstance(values, Sequence) or not all(isinstance(v, kind) for v in values):
        raise ValueError(f"{name} must be a {kind.__name__} or a list of them, not {value!r}")
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts; give one, or one for each prompt")
    return list(values)


def parse_params(params: Any, count: int) -> list[SamplingParams]:
    return parse_each("sampling_params", SamplingParams() if params is None else params, SamplingParams, count)
