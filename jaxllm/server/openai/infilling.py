"""Fill in the middle: prompts that ask for the text between a prefix and a suffix, with the tokenizer's own tokens."""

from typing import NamedTuple

from jaxllm.server.http.errors import unsupported
from jaxllm.text.tokenizer import Tokenizer

_SENTINEL = "☺"


class Infilling(NamedTuple):
    """How a family of models writes it."""

    prefix: str  # the tokens before the prefix and the suffix, and, where there is one, after both
    suffix: str
    middle: str | None = None
    is_suffix_first: bool = False
    has_space: bool = False  # the tokenizer puts a space before each text, which the suffix must not have
    ends: tuple[str, ...] = ()  # tokens that end the middle, beside the end of sequence


FORMATS = (
    # Qwen2.5-Coder, CodeGemma
    Infilling(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ends=("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>")
    ),
    Infilling("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<file_sep>",)),  # StarCoder, Granite
    Infilling("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Infilling("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    Infilling("▁<PRE>", "▁<SUF>", "▁<MID>", has_space=True, ends=("▁<EOT>",)),  # CodeLlama
    Infilling("[PREFIX]", "[SUFFIX]", is_suffix_first=True, has_space=True),  # Codestral
)


class InfillingTokens(NamedTuple):
    """A format as ids of one tokenizer."""

    format: Infilling
    prefix: int
    suffix: int
    middle: list[int]
    ends: list[int]


def infilling_tokens(tokenizer: Tokenizer) -> InfillingTokens:
    """Raises `APIError` 400 for a tokenizer that has none."""
    for known in FORMATS:
        prefix, suffix = tokenizer.token_id(known.prefix), tokenizer.token_id(known.suffix)
        middle = [] if known.middle is None else [tokenizer.token_id(known.middle)]
        if prefix is not None and suffix is not None and None not in middle:
            ends = [token for end in known.ends if (token := tokenizer.token_id(end)) is not None]
            return InfillingTokens(known, prefix, suffix, [token for token in middle if token is not None], ends)
    raise unsupported(
        "suffix",
        "this model can't insert text before a suffix: its tokenizer has no tokens for that, such as "
        f"{' or '.join(known.prefix for known in FORMATS[:2])}. Leave suffix out, or serve a model that fills in",
    )


def infilling_ids(
    tokenizer: Tokenizer, tokens: InfillingTokens, prefix: str, suffix: str, *, add_special_tokens: bool
) -> list[int]:
    """The prompt for the text between `prefix` and `suffix`. Raises `ValueError`."""
    begun = _begin(tokenizer) if add_special_tokens else []
    before = [tokens.prefix, *tokenizer.encode(prefix, False)]
    after = [tokens.suffix, *_continued(tokenizer, suffix, has_space=tokens.format.has_space)]
    both = after + before if tokens.format.is_suffix_first else before + after
    return begun + both + tokens.middle


def _begin(tokenizer: Tokenizer) -> list[int]:
    """The special tokens that the tokenizer puts before a text."""
    plain, whole = tokenizer.encode("a", False), tokenizer.encode("a")
    return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(plain)] == plain), [])


def _continued(tokenizer: Tokenizer, text: str, *, has_space: bool) -> list[int]:
    """The ids of a text without a space that the tokenizer puts before it."""
    ids = tokenizer.encode(text, False)
    if not has_space:
        return ids
    head, whole = tokenizer.encode(_SENTINEL, False), tokenizer.encode(_SENTINEL + text, False)
    return whole[len(head) :] if whole[: len(head)] == head else ids
