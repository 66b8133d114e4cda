"""Beam search and seeded draws said plainly, over a model without cache or batch: what the engine must find."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import SamplingParams
from jaxllm.engine.device.sampler import sample_key
from tests.tiny import Tiny

CLOSE = 1e-4  # two scores no further apart may change places


class Found(NamedTuple):
    tokens: list[int]
    score: float  # normalized, by which it was ranked
    reason: Any  # "length", a stop token or a stop string


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def altered(row: np.ndarray, prompt, output, params: SamplingParams, bad_words=()) -> np.ndarray:
    """A row of log-probabilities after what `params` say of them."""
    row = row.copy()
    if params.allowed_token_ids is not None:
        row[np.setdiff1d(np.arange(len(row)), params.allowed_token_ids)] = -np.inf
    for token, bias in params.logit_bias.items():
        row[token] += bias
    for token in {*prompt, *output}:
        row[token] *= params.repetition_penalty if row[token] < 0 else 1 / params.repetition_penalty
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for *before, last in bad_words:
        if output[len(output) - len(before) :] == before:
            row[last] = -np.inf
    if len(output) < params.min_tokens:
        row[params.stop_token_ids] = -np.inf
    return row


def beam_search(model: Tiny, prompt, params: SamplingParams, *, bad_words=(), text=None) -> list[Found]:
    """The `n` best; `text(tokens)` is what stop strings are looked for in."""
    width, limit = params.beam_width, params.max_tokens
    live, finished = [([], 0.0)], []

    def reason(tokens):
        if tokens[-1] in params.stop_token_ids:
            return tokens[-1]
        found = [stop for stop in params.stops if len(tokens) > params.min_tokens and text(tokens).endswith(stop)]
        return found[0] if found else "length" if len(tokens) == limit else None

    def normalized(total, length):
        return total / length**params.length_penalty

    for length in range(1, limit + 1):
        ways = []
        for tokens, total in live:
            row = log_softmax(model.logits([*prompt, *tokens])[-1])
            row = altered(row, prompt, tokens, params, bad_words)
            ways += [([*tokens, i], total + row[i]) for i in np.flatnonzero(row > -np.inf).tolist()]
        ways.sort(key=lambda way: way[1], reverse=True)
        ways = ways[: max(2, 1 + len(params.stop_token_ids)) * width]
        live = [way for way in ways if reason(way[0]) is None][:width]
        ended = [way for way in ways[:width] if reason(way[0]) is not None]
        finished += [Found(tokens, normalized(total, length), reason(tokens)) for tokens, total in ended]
        finished = sorted(finished, key=lambda found: found.score, reverse=True)[:width]
        if not live:
            break
        if len(finished) == width:
            patient = params.early_stopping == "never" and params.length_penalty > 0
            best = normalized(live[0][1], limit if patient else length)
            if params.early_stopping is True or best <= finished[-1].score:
                break
    return finished[: params.n]


def assert_found(completions, want: list[Found], params: SamplingParams) -> None:
    """The engine's completions are those of `beam_search`, but for places of equals. Scores as the engine gives them
    are the model's, so they tell only where nothing was altered."""
    assert [completion.index for completion in completions] == list(range(len(want)))
    for completion, expected in zip(completions, want, strict=True):
        if completion.token_ids != expected.tokens:
            equals = [found for found in want if abs(found.score - expected.score) <= CLOSE * (1 + abs(found.score))]
            expected = next(found for found in equals if found.tokens == completion.token_ids)
        is_length = expected.reason == "length"
        assert completion.finish_reason == ("length" if is_length else "stop")
        assert completion.stop_reason == (None if is_length else expected.reason)


def cumulative_logprob(model: Tiny, prompt, tokens) -> float:
    """Of the tokens after the prompt, under the model."""
    rows = log_softmax(model.logits([*prompt, *tokens]))[len(prompt) - 1 : -1]
    return float(rows[np.arange(len(tokens)), tokens].sum())


def draw(model: Tiny, prompt, seed: int, index: int, num_tokens: int) -> list[int]:
    """What sample `index` of a request is, drawn at temperature 1."""
    words = jnp.asarray([seed >> 32, seed % 2**32], jnp.uint32)
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + num_tokens):
        key = sample_key(words, jnp.int32(index), jnp.int32(position))
        row = model.logits([*prompt, *tokens])[-1]
        tokens.append(int(np.argmax(row + jax.random.gumbel(key, row.shape, jnp.float32))))
    return tokens
