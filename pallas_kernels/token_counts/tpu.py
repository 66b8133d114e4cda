"""The counts as products of one-hot matrices, which a TPU multiplies faster than it scatters.

An id is `WIDTH * high + low`. Summed over a chunk's tokens, the outer products of the one-hots of `high` and `low` are
a table of counts, `[high, low]` for each row. XLA makes the one-hots where it multiplies them, and lays out none.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.pallas_kernels.token_counts.reference import CHUNK, over_chunks

WIDTH = 512
_OUTPUT = 2 * CHUNK  # weight of an output's token, more than all of a chunk's prompt can be; a sum is below 2**24


def count_tokens(
    history: Int[Array, "pages block_size"],
    block_table: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    prompt_lens: Int[Array, " rows"],
    *,
    vocab: int,
) -> tuple[Bool[Array, "rows vocab"], Int[Array, "rows vocab"]]:
    """See `reference.count_tokens`."""
    num_rows, height = len(lengths), -(-vocab // WIDTH)

    def add(found: Array, ids: Array, is_output: Array) -> Array:
        """`found` counts in its high bits, and says in its lowest whether there is any."""
        weights = jnp.where(ids < vocab, jnp.where(is_output, _OUTPUT, 1), 0)[..., None]
        high = ids[..., None] // WIDTH == jnp.arange(height, dtype=jnp.int32)[None, None]
        low = ids[..., None] % WIDTH == jnp.arange(WIDTH, dtype=jnp.int32)[None, None]
        high = jnp.where(high, weights, 0).astype(jnp.bfloat16)
        sums = jnp.einsum("rch,rcl->rhl", high, low.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        sums = sums.astype(jnp.int32)
        return found + sums // _OUTPUT * 2 | (sums > 0).astype(jnp.int32)

    none = jnp.zeros((num_rows, height, WIDTH), jnp.int32)
    found = over_chunks(add, none, history, block_table, lengths, prompt_lens, vocab=vocab)
    found = found.reshape(num_rows, height * WIDTH)[:, :vocab]
    return found > 0, found >> 1
