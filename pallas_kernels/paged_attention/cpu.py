"""Ragged paged attention for CPUs: a loop over sequences, tiles of queries and blocks, each to its real length.

XLA runs one matrix product per block, with the block as operand in place: nothing is gathered, and padding
costs nothing. Gathering first and attending in one product is about ten times slower here.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.paged_attention.reference import (
    cap,
    finish_softmax,
    online_softmax,
    softmax_start,
    write_kv,
)

TILE_Q = 64  # query tokens that a prefill reads a block for


def ragged_paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv_pool: Float[Array, "blocks 2 kv_heads block_size head_dim"],
    block_tables: Int[Array, "seqs blocks_per_seq"],
    cu_q_lens: Int[Array, " seqs_plus_1"],
    kv_lens: Int[Array, " seqs"],
    distribution: Int[Array, "2"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "blocks 2 kv_heads block_size head_dim"]]:
    """See `reference.ragged_paged_attention`."""
    pool = write_kv(k, v, kv_pool, block_tables, cu_q_lens, kv_lens, distribution)
    tokens, heads, head_dim = q.shape
    _, _, kv_heads, block_size, _ = pool.shape
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32) * scale

    def attend_tile(q_tile, table, first, last):
        """Attention of `q_tile[kv_heads, rows, head_dim]`, rows at positions `first` up to at most `last`."""
        rows = q_tile.shape[1]
        position = jnp.minimum(first + jnp.arange(rows, dtype=jnp.int32) // (heads // kv_heads), last)
        begin = jnp.int32(0)
        if sliding_window is not None:
            begin = jnp.maximum(first - sliding_window + 1, 0) // block_size

        def attend_block(i, carry):
            kv = jax.lax.dynamic_index_in_dim(pool, table[i], 0, keepdims=False).astype(jnp.float32)
            key = i * block_size + jnp.arange(block_size, dtype=jnp.int32)
            age = position[:, None] - key[None]
            visible = age >= 0
            if sliding_window is not None:
                visible &= age < sliding_window
            scores = cap(jnp.einsum("kqd,ksd->kqs", q_tile, kv[0]), soft_cap)
            values = jnp.where((key <= last)[None, :, None], kv[1], 0)  # the tail of the last block is garbage
            return online_softmax(carry, scores, visible[None], "kqs,ksd->kqd", values)

        carry = jax.lax.fori_loop(begin, last // block_size + 1, attend_block, softmax_start(q_tile.shape))
        return finish_softmax(carry)

    def attend_seqs(start, stop, tile_q, out):
        """Sequences `start` to `stop` in tiles of `tile_q` tokens. A tile past a sequence's end spills
        into the next one's rows, which is written later; the spill of the last lands in the slack."""

        def seq(s, out):
            q_len = cu_q_lens[s + 1] - cu_q_lens[s]

            def tile(i, out):
                at = cu_q_lens[s] + i * tile_q
                x = jax.lax.dynamic_slice_in_dim(padded, at, tile_q)
                x = x.transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)
                first = kv_lens[s] - q_len + i * tile_q
                last = jnp.minimum(first + tile_q, kv_lens[s]) - 1
                y = attend_tile(x, block_tables[s], first, last)
                y = y.reshape(kv_heads, tile_q, -1, head_dim).transpose(1, 0, 2, 3)
                return jax.lax.dynamic_update_slice_in_dim(out, y, at, 0)

            return jax.lax.fori_loop(0, (q_len + tile_q - 1) // tile_q, tile, out)

        return jax.lax.fori_loop(start, stop, seq, out)

    tile_q = min(TILE_Q, tokens)
    padded = jnp.pad(grouped, ((0, tile_q), (0, 0), (0, 0), (0, 0)))
    out = attend_seqs(0, distribution[0], 1, jnp.zeros_like(padded))
    out = attend_seqs(distribution[0], distribution[1], tile_q, out)
    return out[:tokens].reshape(tokens, heads, head_dim).astype(v.dtype), pool
