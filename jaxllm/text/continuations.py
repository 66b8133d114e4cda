"""Contexts with continuations, and documents in windows, as token ids. (As lm-evaluation-harness makes them, so that
numbers can be compared with those of others.)"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxllm.argument_checks import a_type, as_list


class Window(NamedTuple):
    """Tokens of a document that are scored, and those before them that are read."""

    context: list[int]
    token_ids: list[int]


def encode_continuations(context: Any, continuations: Any, tokenizer: Any) -> tuple[list[Any], list[list[Any]]]:
    """The ids of a context and of each of its continuations; ids come back as lists, which the engine checks.

    A text and its continuation are tokenised together, and the continuation has what comes after as many tokens as the
    context has alone; spaces at the end of the context are the continuation's. A context without tokens is the one
    that `prefix_token` names. Raises `ValueError`.
    """
    if getattr(continuations, "ndim", 0) == 2:
        continuations = continuations.tolist()
    if isinstance(continuations, str | bytes) or not isinstance(continuations, Sequence):
        raise ValueError(f"continuations is {a_type(continuations)}; give a list of strings or of lists of token ids")
    if not isinstance(context, str):
        if any(isinstance(each, str) for each in continuations):
            raise ValueError("the context has token ids and a continuation is a string; give all as either")
        return as_list("context", context), [as_list("continuation", each) for each in continuations]
    for each in continuations:
        if not isinstance(each, str):
            raise ValueError(f"the context is a string and a continuation is {a_type(each)}; give a string too")
    if tokenizer is None:
        raise ValueError("texts need a tokenizer; pass tokenizer=..., or token ids")
    stripped = context.rstrip()
    spaces = context[len(stripped) :]
    if not stripped:
        prefix = prefix_token(tokenizer)
        encoded = [tokenizer.encode(spaces + each, add_special_tokens=False) for each in continuations]
        return [prefix], [ids[1:] if ids[:1] == [prefix] else ids for ids in encoded]
    ids = encode_text(stripped, tokenizer)
    return ids, [encode_text(context + each, tokenizer)[len(ids) :] for each in continuations]


def encode_text(text: str, tokenizer: Any) -> list[int]:
    """A text with the special tokens that the tokenizer puts around it, unless it has the first one already."""
    begins = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return tokenizer.encode(text, add_special_tokens=not begins)


def prefix_token(tokenizer: Any) -> int:
    """What stands before a text so that its first token has a probability: the beginning of sequence, or the end of
    one. `ValueError` if the tokenizer names neither."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError("the tokenizer names no token that begins or ends a text; give a context")


def windows_of(token_ids: list[int], prefix: int, max_len: int, stride: int) -> Iterator[Window]:
    """A document after the token `prefix`, in windows of which the device reads at most `max_len` tokens: the first
    scores as many, each of the others the next `stride`."""
    tokens, start, stop = [prefix, *token_ids], 0, max_len
    while start < len(token_ids):
        stop = min(stop, len(token_ids))
        yield Window(tokens[max(0, stop - max_len) : start + 1], token_ids[start:stop])
        start, stop = stop, stop + stride
