"""Candidates of a beam search: the best tokens of each row, made on the device as integers, read on the host."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxllm.engine.beam import Candidates
from jaxllm.engine.logprobs import LEAST, Kept
from jaxllm.sampling_params import MAX_BEAM_WIDTH

NUM_CANDIDATES = 2 * MAX_BEAM_WIDTH  # a beam alone can fill the next ones, though as many of its tokens end it
CANDIDATES_WIDTH = 4 * NUM_CANDIDATES  # of a row: token ids, scores, log-probabilities, ranks


class BeamRow(NamedTuple):
    """What a step says of a beam: how it may go on, and what else is wanted of its next token's position."""

    candidates: Candidates
    others: Kept | None  # the most likely and the watched tokens

    def kept(self, logprob: float, rank: int) -> Kept:
        """Of a candidate with this log-probability and rank."""
        if self.others is None:
            return Kept(rank, np.empty(0, np.int32), np.array([logprob], np.float32))
        logprobs = np.concatenate([np.array([logprob], np.float32), self.others.logprobs[1:]])
        return Kept(rank, self.others.ids, logprobs)


def candidate_rows(scores: Float[Array, "rows vocab"], logits: Float[Array, "rows vocab"]) -> Int[Array, "rows width"]:
    """What `read_candidates` reads: the `NUM_CANDIDATES` best tokens of each row by `scores`, best first and the
    smaller id first among equals; with the scores, and log-probabilities (nats) and ranks in the softmax of `logits`
    as they are. Floats as their bits.

    `scores`, float32, are log-probabilities after masks, bias and penalties, minus infinity where a token may not be.
    """
    count = min(NUM_CANDIDATES, scores.shape[1])
    best, ids = jax.lax.top_k(scores, count)
    own = jnp.take_along_axis(logits, ids, axis=-1, mode="clip")
    logprobs = jnp.maximum(own - jax.nn.logsumexp(logits, axis=-1, keepdims=True), LEAST)
    columns = []
    for values, padding in ((ids, 0), (best, -jnp.inf), (logprobs, 0.0), (_ranks(logits, own, best > -jnp.inf), 0)):
        values = jnp.pad(values, ((0, 0), (0, NUM_CANDIDATES - count)), constant_values=padding)
        columns.append(jax.lax.bitcast_convert_type(values, jnp.int32))
    return jnp.concatenate(columns, axis=1)


def _ranks(
    logits: Float[Array, "rows vocab"], own: Float[Array, "rows count"], allowed: Bool[Array, "rows count"]
) -> Int[Array, "rows count"]:
    """1 + the number of larger logits, for each of `own`, the candidates' logits; meaningless where not `allowed`.

    Mostly no token but the candidates themselves is as likely as they are, and then they are all that must be
    compared. Masks and bias can bring up others: they cost a pass over the vocabulary each, one after the other,
    because XLA would lay out a comparison of all at once in memory.
    """
    lowest = jnp.min(jnp.where(allowed, own, jnp.inf), axis=-1, keepdims=True)

    def count_larger(among: Array, than: Array) -> Array:
        return jnp.sum(among > than, axis=-1, dtype=jnp.int32)

    def among_themselves(_: Array) -> Array:
        return count_larger(own[:, None, :], own[:, :, None])

    def in_vocabulary(logits: Array) -> Array:
        return jax.lax.map(lambda column: count_larger(logits, column[:, None]), own.T).T

    others = count_larger(logits, lowest) - count_larger(own, lowest)
    return 1 + jax.lax.cond(jnp.all(others == 0), among_themselves, in_vocabulary, logits)


def read_candidates(row: np.ndarray, count: int) -> Candidates:
    """At most `count` candidates of one of `candidate_rows`, without those that may not be; views of the row."""
    ids, scores, logprobs, ranks = row.reshape(4, NUM_CANDIDATES)[:, :count]
    scores = scores.view(np.float32)
    count = np.count_nonzero(scores > -np.inf)  # they come first
    return Candidates(ids[:count], scores[:count], logprobs.view(np.float32)[:count], ranks[:count])
