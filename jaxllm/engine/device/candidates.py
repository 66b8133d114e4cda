"""Candidates of a beam search: the best tokens of each row, as integers. `beam.candidates` reads them on the host."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.engine.beam.candidates import NUM_CANDIDATES
from jaxllm.engine.logprobs import LEAST
from jaxllm.pallas_kernels import sampling
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement


def candidate_rows(
    scores: Float[Array, "rows vocab"],
    logits: Float[Array, "rows vocab"],
    *,
    normalizer: Float[Array, " rows"] | None = None,
    num_rows: Int[Array, ""] | None = None,
    placement: Placement = UNPLACED,
) -> Int[Array, "rows width"]:
    """What `read_candidates` reads: the `NUM_CANDIDATES` best tokens of each row by `scores`, best first and the
    smaller id first among equals; with the scores, and log-probabilities (nats) and ranks in the softmax of `logits`
    as they are. Floats as their bits.

    `scores`, float32, are log-probabilities after masks, bias and penalties, minus infinity where a token may not be.
    `normalizer` is the softmax's, if it was computed before; rows from `num_rows` on, if that is given, are padding,
    whose results may be anything; `placement` says where they are.
    """
    count = min(NUM_CANDIDATES, scores.shape[1])
    best = sampling.best(scores, logits, count, num_rows=num_rows, placement=placement)
    if normalizer is None:
        normalizer = sampling.normalize(logits, num_rows=num_rows, placement=placement).normalizer
    logprobs = jnp.maximum(best.logits - normalizer[:, None], LEAST)
    columns = []
    for values, padding in ((best.ids, 0), (best.scores, -jnp.inf), (logprobs, 0.0), (best.ranks, 0)):
        values = jnp.pad(values, ((0, 0), (0, NUM_CANDIDATES - count)), constant_values=padding)
        columns.append(jax.lax.bitcast_convert_type(values, jnp.int32))
    return jnp.concatenate(columns, axis=1)
