"""Normalises the prompts and parameters that users pass."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NotRequired, TypedDict

from jaxllm.argument_checks import a_type, plain_number
from jaxllm.from_vllm.request_arguments import PROMPT_KEYS
from jaxllm.from_vllm.rules import translate
from jaxllm.sampling_params import SamplingParams


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]  # as in `SamplingParams`


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]  # its text, if known
    cache_salt: NotRequired[str]


class Prompt(NamedTuple):
    text: str | None
    token_ids: list[int]  # what stands for them: the engine checks each
    cache_salt: str | None = None


_KEYS = ("prompt_token_ids", "prompt", "cache_salt")
_CONVERSATION = "a message of a conversation; conversations go to llm.chat([{'role': 'user', 'content': '...'}])"


def parse_prompts(prompts: Any, tokenizer: Any) -> list[Prompt]:
    """One prompt, or a list of them. ValueError for anything else."""
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        prompts = [prompts]
    if getattr(prompts, "ndim", 0) > 2:
        raise ValueError(
            f"prompts is an array of the shape {prompts.shape}; expected token ids, [len] or [prompts, len]"
        )
    if getattr(prompts, "ndim", 0) == 2:
        prompts = list(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ValueError(f"prompts is {_kind(prompts)}; expected a string, a dict or a list of them")
    return [parse_prompt(prompt, tokenizer) for prompt in prompts]


def parse_prompt(prompt: Any, tokenizer: Any) -> Prompt:
    """A string, `{"prompt": str}`, `{"prompt_token_ids": [...]}`, or token ids. ValueError otherwise."""
    if _is_ids(prompt):
        return Prompt(None, _as_list(prompt))
    salt = None
    if isinstance(prompt, Mapping):
        _check_keys(prompt)
        ids, text, salt = map(prompt.get, _KEYS)
        if ids is not None:
            if (
                getattr(ids, "ndim", 1) != 1
                or isinstance(ids, str)
                or not (isinstance(ids, Sequence) or hasattr(ids, "ndim"))
            ):
                raise ValueError(f"prompt_token_ids is {_kind(ids)}; expected a list of integers")
            return Prompt(text, _as_list(ids), salt)
        prompt = text
    if isinstance(prompt, list | tuple) and not prompt:
        raise ValueError("a prompt is an empty list; give it at least one token id")
    if not isinstance(prompt, str):
        raise ValueError(f"a prompt is {_kind(prompt)}; expected a string or a dict")
    if tokenizer is None:
        raise ValueError("a text prompt needs a tokenizer; pass tokenizer=... or {'prompt_token_ids': [...]}")
    return Prompt(prompt, tokenizer.encode(prompt), salt)


def _check_keys(prompt: Mapping[str, Any]) -> None:
    unknown = [key for key in prompt if key not in _KEYS]
    if "role" in unknown:
        raise ValueError(f"a prompt is {_CONVERSATION}")
    for key in unknown:
        if key not in PROMPT_KEYS:
            raise ValueError(f"a prompt dict has the key 'prompt' or 'prompt_token_ids', not {sorted(prompt)}")
    translate("a prompt", {key: prompt[key] for key in unknown}, PROMPT_KEYS)
    if prompt.get("prompt_token_ids") is None and prompt.get("prompt") is None:
        raise ValueError(f"a prompt dict has the key 'prompt' or 'prompt_token_ids', not {sorted(prompt)}")


def _kind(value: Any) -> str:
    if isinstance(value, bytes):
        return "bytes: decode them first, with .decode()"
    return a_type(value)


def _as_list(ids: Any) -> list[Any]:
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


def _is_ids(prompt: Any) -> bool:
    """Whether `prompt` is meant as a list of token ids; the engine checks each id."""
    if getattr(prompt, "ndim", 0) == 1:
        return True
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return isinstance(prompt[0], int) or (hasattr(type(prompt[0]), "__index__") and not getattr(prompt[0], "ndim", 0))


def with_salt(params: SamplingParams, salt: str | None) -> SamplingParams:
    """`params` with a prompt's `cache_salt`, if it has one."""
    return params if salt is None else replace(params, cache_salt=salt)


def is_conversation(messages: Any) -> bool:
    """Whether `messages` is meant as one conversation rather than a list of conversations."""
    return not isinstance(messages, Sequence) or not messages or isinstance(messages[0], Mapping | str)


def parse_each(name: str, value: Any, kind: type, count: int) -> list:
    """`count` values, from one value for all prompts or a list with one for each. ValueError otherwise."""
    values = [value] * count if isinstance(value, kind) else value
    if kind is int:
        values = (
            [plain_number(one) for one in values] if isinstance(values, Sequence) else [plain_number(values)] * count
        )
    if not isinstance(values, Sequence) or not all(isinstance(v, kind) for v in values):
        raise ValueError(f"{name} must be a {kind.__name__} or a list of them, not {value!r}")
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts; give one, or one for each prompt")
    return list(values)


def parse_params(params: Any, count: int) -> list[SamplingParams]:
    return parse_each("sampling_params", SamplingParams() if params is None else params, SamplingParams, count)


def pair_texts(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """Equally many texts on both sides. ValueError if they are neither one and many, nor as many as each other."""
    first, second = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
    for texts in (first, second):
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError("texts to score are strings, or lists of at least one string")
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise ValueError(
            f"{len(first)} texts can't be scored with {len(second)}: give one and any number, or as many of each"
        )
    return first, second
