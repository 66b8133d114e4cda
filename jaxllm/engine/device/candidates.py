"""Candidates of a beam search: the best tokens of each row, made on the device as integers, read on the host."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxllm.engine.beam.search import Candidates
from jaxllm.engine.device.logprobs import LEAST, PackedLogprobs
from jaxllm.pallas_kernels import sampling
from jaxllm.sampling_params import MAX_BEAM_WIDTH

NUM_CANDIDATES = 2 * MAX_BEAM_WIDTH  # a beam alone can fill the next ones, though as many of its tokens end it
CANDIDATES_WIDTH = 4 * NUM_CANDIDATES  # of a row: token ids, scores, log-probabilities, ranks


class BeamRow(NamedTuple):
    """What a step says of a beam: how it may go on, and what else is wanted of its next token's position."""

    candidates: Candidates
    others: PackedLogprobs | None  # the most likely and the logprob_ids tokens

    def packed_logprobs(self, logprob: float, rank: int) -> PackedLogprobs:
        """Of a candidate with this log-probability and rank."""
        if self.others is None:
            return PackedLogprobs(rank, np.empty(0, np.int32), np.array([logprob], np.float32))
        logprobs = np.concatenate([np.array([logprob], np.float32), self.others.logprobs[1:]])
        return PackedLogprobs(rank, self.others.ids, logprobs)


def candidate_rows(
    scores: Float[Array, "rows vocab"],
    logits: Float[Array, "rows vocab"],
    *,
    normalizer: Float[Array, " rows"] | None = None,
    mesh: Mesh | None = None,
) -> Int[Array, "rows width"]:
    """What `read_candidates` reads: the `NUM_CANDIDATES` best tokens of each row by `scores`, best first and the
    smaller id first among equals; with the scores, and log-probabilities (nats) and ranks in the softmax of `logits`
    as they are. Floats as their bits.

    `scores`, float32, are log-probabilities after masks, bias and penalties, minus infinity where a token may not be.
    `normalizer` is the softmax's, if it was computed before; `mesh` holds the devices that they are on, if known.
    """
    count = min(NUM_CANDIDATES, scores.shape[1])
    best = sampling.best(scores, logits, count, mesh=mesh)
    if normalizer is None:
        normalizer = sampling.normalize(logits, mesh=mesh).normalizer
    logprobs = jnp.maximum(best.logits - normalizer[:, None], LEAST)
    columns = []
    for values, padding in ((best.ids, 0), (best.scores, -jnp.inf), (logprobs, 0.0), (best.ranks, 0)):
        values = jnp.pad(values, ((0, 0), (0, NUM_CANDIDATES - count)), constant_values=padding)
        columns.append(jax.lax.bitcast_convert_type(values, jnp.int32))
    return jnp.concatenate(columns, axis=1)


def read_candidates(row: np.ndarray, count: int) -> Candidates:
    """At most `count` candidates of one of `candidate_rows`, without those that may not be; views of the row."""
    ids, scores, logprobs, ranks = row.reshape(4, NUM_CANDIDATES)[:, :count]
    scores = scores.view(np.float32)
    count = np.count_nonzero(scores > -np.inf)  # they come first
    return Candidates(ids[:count], scores[:count], logprobs.view(np.float32)[:count], ranks[:count])
