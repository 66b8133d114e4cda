"""What is checked before a request is accepted: once in each process that it goes through."""

from collections.abc import Sequence
from typing import Any

from jaxllm.argument_checks import plain_number
from jaxllm.engine.config import EngineConfig
from jaxllm.sampling_params import BAD_WORD_LEN, SamplingParams

_ID_FIELDS = ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids")


def check_request(
    token_ids: Sequence[Any], params: SamplingParams, config: EngineConfig, vocab: int, tokenizer: Any
) -> tuple[list[int], list[list[int]]]:
    """The prompt as a list, and the token ids of the bad words. ValueError if an engine of this configuration, for a
    model of `vocab` tokens, can't serve the request."""
    ids = check_prompt(token_ids, vocab, config.max_model_len, params.truncate_prompt_tokens)
    for name in _ID_FIELDS:
        outside = [i for i in getattr(params, name) or () if i >= vocab]
        if outside:
            raise ValueError(f"{name} {outside[:5]} are outside the vocabulary [0, {vocab - 1}]")
    if params.stops and tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the engine has none; use stop_token_ids")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > config.max_logprobs:
            raise ValueError(
                f"{name}={getattr(params, name)} is more than the engine's max_logprobs={config.max_logprobs}"
            )
    _check_room(ids, params, config)
    return ids, _bad_word_ids(params, tokenizer)


def check_prompt(
    token_ids: Sequence[Any], vocab: int, max_model_len: int, keep: int | None, num_generated: int = 1
) -> list[int]:
    """The prompt as a list, which with `num_generated` tokens (0 or 1) fits `max_model_len`; its last `keep` tokens, if
    that is given."""
    most = max_model_len - num_generated
    ids = list(token_ids)
    if not ids:
        raise ValueError("the prompt has no tokens; give at least one")
    if keep is not None:
        ids = ids[-most if keep == -1 else -keep :]
    ids = _check_ids("prompt", ids, vocab)
    if len(ids) > most:
        way = (
            f" leaves room for {most} and one to generate; shorten it or raise max_model_len"
            if num_generated
            else "; shorten it, keep its end with truncate_prompt_tokens=-1, or raise max_model_len"
        )
        raise ValueError(f"the prompt has {len(ids)} tokens, but max_model_len={max_model_len}{way}")
    return ids


def check_continuation(token_ids: Sequence[Any], num_before: int, vocab: int, max_model_len: int) -> list[int]:
    """A continuation as a list, which fits `max_model_len` after `num_before` tokens, its last token apart."""
    ids = list(token_ids)
    if not ids:
        raise ValueError("a continuation has no tokens; give at least one")
    if num_before + len(ids) - 1 > max_model_len:
        raise ValueError(
            f"a context of {num_before} tokens and a continuation of {len(ids)} are more than max_model_len="
            f"{max_model_len} and the token after it; shorten the context, or raise max_model_len"
        )
    return _check_ids("continuation", ids, vocab)


def _check_ids(what: str, ids: list[Any], vocab: int) -> list[int]:
    """Token ids, which are not empty, as integers of Python."""
    if set(map(type, ids)) != {int}:
        ids = [plain_number(i) for i in ids]
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocab:
        bad = next(i for i in ids if type(i) is not int or not 0 <= i < vocab)
        raise ValueError(f"{what} token id {bad!r} is not an integer in [0, {vocab - 1}]")
    return ids


def _check_room(token_ids: Sequence[int], params: SamplingParams, config: EngineConfig) -> None:
    """Beams run side by side, so all of them must fit. Samples can wait for each other, and each alone fits: but where
    no layer keeps all tokens, one whose logits depend on all of them needs more blocks than others."""
    width = params.beam_width or 1
    if params.beam_width is None and (config.groups[0].window is None or not params.reads_history):
        return
    if width > config.max_num_seqs:
        raise ValueError(
            f"beam_width={width} is more than the {config.max_num_seqs} sequences that may run at once; lower it, or "
            "raise max_num_seqs"
        )
    most_len = config.max_model_len
    if params.max_tokens is not None:
        most_len = min(most_len, len(token_ids) + params.max_tokens)
    shared = len(token_ids) // config.block_size
    num_blocks = -(-(most_len - 1) // config.block_size)  # the last token is not attended
    own = width * config.count_pages(num_blocks, keeps_first=params.reads_history)  # as if they shared nothing
    kept = sum(group.num_pages for group in config.groups if group.window is None)  # what they share is never let go
    num_blocks = -(-(own - (width - 1) * shared * kept) // config.pages_per_block)
    if num_blocks > config.num_blocks:
        who = "penalties or bad_words" if params.beam_width is None else f"{width} beams"
        raise ValueError(
            f"{who} of a prompt of {len(token_ids)} tokens and up to {most_len - len(token_ids)} more may need "
            f"{num_blocks} KV blocks of {config.block_size} tokens, and the pool has {config.num_blocks}; lower "
            "max_tokens or beam_width, or raise num_blocks"
        )


def _bad_word_ids(params: SamplingParams, tokenizer: Any) -> list[list[int]]:
    """The token ids of `bad_words`, each at the start of a text and after a space."""
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
