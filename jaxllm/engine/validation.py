"""What is checked before a request is accepted, given the model's vocabulary, its context and the tokenizer."""

from collections.abc import Sequence
from typing import Any

from jaxllm.engine.batch import BAD_WORD_LEN
from jaxllm.sampling_params import SamplingParams

_ID_FIELDS = ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids")


def check_prompt(token_ids: Sequence[Any], vocab: int, max_model_len: int) -> list[int]:
    """The prompt as a list; ValueError if the model can't take it."""
    ids = list(token_ids)
    if not ids:
        raise ValueError("the prompt has no tokens; give at least one")
    if not all(type(i) is int and 0 <= i < vocab for i in ids):
        bad = next(i for i in ids if type(i) is not int or not 0 <= i < vocab)
        raise ValueError(f"prompt token id {bad!r} is not an integer in [0, {vocab - 1}]")
    if len(ids) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, but max_model_len={max_model_len} leaves room for "
            f"{max_model_len - 1} and one to generate; shorten it or raise max_model_len"
        )
    return ids


def check_params(params: SamplingParams, vocab: int, tokenizer: Any) -> None:
    """ValueError if the parameters name tokens that the model lacks, or need a tokenizer that is not there."""
    for name in _ID_FIELDS:
        outside = [i for i in getattr(params, name) or () if i >= vocab]
        if outside:
            raise ValueError(f"{name} {outside[:5]} are outside the vocabulary [0, {vocab - 1}]")
    if params.stops and tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the engine has none; use stop_token_ids")
    bad_word_ids(params, tokenizer)


def bad_word_ids(params: SamplingParams, tokenizer: Any) -> list[list[int]]:
    """The token ids of `bad_words`, each at the start of a text and after a space; ValueError for one too long."""
    if params.bad_words and tokenizer is None:
        raise ValueError("bad_words need a tokenizer, and the engine has none; use logit_bias")
    found = {}
    for word in params.bad_words:
        for text in (word.lstrip() or word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if len(ids) > BAD_WORD_LEN:
                raise ValueError(f"bad_words: {word!r} has {len(ids)} tokens; at most {BAD_WORD_LEN} are allowed")
            if ids:
                found[ids] = None
    return [list(ids) for ids in found]
