"""Tokenizers that callers bring: of transformers, of the `tokenizers` library, or any object of their own."""

import copy
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

from jaxllm.argument_checks import a_type
from jaxllm.checkpoint.files import local
from jaxllm.text.chat_template import ChatTemplates, ForeignChatTemplates, parse_templates
from jaxllm.text.streams import TextStream, WindowStream
from jaxllm.text.tokenizer import FILE, Tokenizer


class ForeignTokenizer(Tokenizer):
    """Adapts any object with `encode` and `decode`: a slow tokenizer, SentencePiece, tiktoken, or the user's own."""

    def __init__(self, inner: Any):
        self._inner = inner
        self._decode_options = {
            name for name in ("skip_special_tokens", "spaces_between_special_tokens") if _accepts(inner.decode, name)
        }
        self._adds_special_tokens = _accepts(inner.encode, "add_special_tokens")
        eos = getattr(inner, "eos_token_id", None)
        self.eos_token_id = eos if isinstance(eos, int) else None
        self.chat = _chat_of(inner)

    @property
    def vocab_size(self) -> int | None:
        if hasattr(self._inner, "__len__"):
            return len(self._inner)
        return self.text_vocab_size

    @property
    def text_vocab_size(self) -> int | None:
        size: int | Callable[[], int] | None = getattr(self._inner, "vocab_size", None)
        return size() if callable(size) else size

    @property
    def json(self) -> str | None:
        return None

    def token_id(self, text: str) -> None:
        return None

    def special_id(self, text: str) -> None:
        return None

    def _special_id(self, name: str) -> int | None:
        found = getattr(self._inner, f"{name}_id", None)
        return found if isinstance(found, int) else None

    def _table(self, skip_special_tokens: bool) -> None:
        return None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        options = {"add_special_tokens": add_special_tokens} if self._adds_special_tokens else {}
        return [int(token) for token in self._inner.encode(text, **options)]

    def encode_within(self, text: str, max_len: int, side: str = "right") -> list[int]:
        ids = self.encode(text)
        if len(ids) > max_len:
            raise ValueError(f"the text has {len(ids)} tokens, more than {max_len}, and {self._whose} cuts none")
        return ids

    def encode_pair(self, first: str, second: str, max_len: int | None = None) -> list[int]:
        raise ValueError(f"{self._whose} encodes no pairs of texts; give the model's directory as tokenizer")

    @property
    def _whose(self) -> str:
        return f"a tokenizer of type {type(self._inner).__name__}, without a {FILE},"

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        return self.decode([token], skip_special_tokens=False)

    def stream(
        self,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
        spaces_between_special_tokens: bool = True,
    ) -> TextStream:
        options = dict(
            skip_special_tokens=skip_special_tokens, spaces_between_special_tokens=spaces_between_special_tokens
        )
        return WindowStream(lambda ids: self._decode(ids, **options), prompt_token_ids)

    def _decode(self, ids: Sequence[int], **options: bool) -> str:
        known = {name: value for name, value in options.items() if name in self._decode_options}
        return self._inner.decode(list(ids), **known)


def wrap(tokenizer: Any) -> Tokenizer:
    """A `Tokenizer` from a `Tokenizer`, a `tokenizers.Tokenizer`, a tokenizer of transformers, a model directory or
    its `tokenizer.json`, or an object with `encode(text) -> ids` and `decode(ids) -> text`.

    The user's object is not modified. Raises `TypeError` for anything else.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, str | os.PathLike):
        path = local(tokenizer)
        return Tokenizer.from_dir(path.parent if path.name == FILE else path)
    if isinstance(tokenizer, tokenizers.Tokenizer):
        return Tokenizer(copy.deepcopy(tokenizer))
    backend = getattr(tokenizer, "backend_tokenizer", None)  # a fast tokenizer of transformers
    if isinstance(backend, tokenizers.Tokenizer):
        eos = getattr(tokenizer, "eos_token", None)
        return Tokenizer(copy.deepcopy(backend), eos_token=None if eos is None else str(eos), chat=_chat_of(tokenizer))
    if callable(getattr(tokenizer, "encode", None)) and callable(getattr(tokenizer, "decode", None)):
        return ForeignTokenizer(tokenizer)
    raise TypeError(
        f"{a_type(tokenizer)} is not a tokenizer; pass a model directory with {FILE}, a "
        "tokenizers.Tokenizer, a transformers tokenizer, or an object with encode(text) -> ids and "
        "decode(ids) -> text"
    )


def _chat_of(tokenizer: Any) -> ChatTemplates:
    """The chat templates of a user's object. Templates whose source it exposes run in the sandbox."""
    if not hasattr(tokenizer, "chat_template") and callable(getattr(tokenizer, "apply_chat_template", None)):
        return ForeignChatTemplates(tokenizer)
    stored = getattr(tokenizer, "chat_template", None)
    templates = {} if stored is None else parse_templates(stored, type(tokenizer).__name__)
    names = getattr(tokenizer, "special_tokens_map", None) or {}
    return ChatTemplates(templates, {name: str(token) for name, token in names.items() if not isinstance(token, list)})


def _accepts(function: Any, name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a built-in function without a signature
        return False
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
