"""Log-probabilities as rows of integers, which travel with the tokens; `engine.logprobs` reads them on the host."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.engine.logprobs import LEAST
from jaxllm.pallas_kernels import sampling
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from jaxllm.sampling_params import MAX_LOGPROBS


def logprob_rows(
    logits: Float[Array, "rows vocab"],
    tokens: Int[Array, " rows"],
    logprob_ids: Int[Array, "rows logprob_ids"] | None = None,
    *,
    vocab: int | None = None,
    normalizer: Float[Array, " rows"] | None = None,
    num_rows: Int[Array, ""] | None = None,
    placement: Placement = UNPLACED,
) -> Int[Array, "rows width"]:
    """What `pack_logprobs` reads, of the softmax of `logits` as they are; floats as their bits. `vocab` counts the
    tokens, if the logits are padded; `normalizer` is the softmax's, if it was computed before; rows from `num_rows` on,
    if that is given, are padding, whose results may be anything; `placement` says where the logits are."""
    if normalizer is None:
        normalizer = sampling.normalize(logits, num_rows=num_rows, placement=placement).normalizer
    count = min(MAX_LOGPROBS, vocab or logits.shape[1])
    best = sampling.best(logits, logits, count, tokens[:, None], num_rows=num_rows, placement=placement)

    def bits(values: Array) -> Array:
        return jax.lax.bitcast_convert_type(jnp.maximum(values - normalizer[:, None], LEAST), jnp.int32)

    columns = [bits(best.logits[:, count:]), best.ranks[:, count:]]
    for values in (best.ids, bits(best.logits[:, :count])):
        columns.append(jnp.pad(values, ((0, 0), (0, MAX_LOGPROBS - count))))
    if logprob_ids is not None:
        columns.append(bits(jnp.take_along_axis(logits, logprob_ids, axis=-1, mode="clip")))
    return jnp.concatenate(columns, axis=1)
