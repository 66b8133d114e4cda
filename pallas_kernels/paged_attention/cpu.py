"""Ragged paged attention for CPUs: a loop over sequences, tiles of queries and blocks, up to real lengths.

XLA runs one matrix product per block, with the block as operand in place, or per several blocks where many queries
read them; padding costs nothing. Gathering all blocks for one product is about ten times slower here.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Num

from jaxllm.pallas_kernels.paged_attention.batch import PagedBatch
from jaxllm.pallas_kernels.paged_attention.reference import (
    cap,
    finish_softmax,
    online_softmax,
    read_kv,
    softmax_start,
    write_kv,
)

# Query tokens that read a key once, and keys read at a time. Wide tiles are worth gathering blocks for, and their
# products are large enough for all cores; narrow ones are for decodes, short prompts and what wide tiles leave over.
WIDE_TILE_Q, WIDE_TILE_K = 256, 256
TILE_Q = 64


def ragged_paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv_pool: Num[Array, "blocks 2 kv_heads block_size padded_head_dim"],
    batch: PagedBatch,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    kv_scales: Float32[Array, "2 kv_heads"] | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], Num[Array, "blocks 2 kv_heads block_size padded_head_dim"]]:
    """See `reference.ragged_paged_attention`."""
    pool = write_kv(k, v, kv_pool, batch, kv_scales)
    block_tables, cu_q_lens, kv_lens, distribution = batch
    tokens, heads, head_dim = q.shape
    _, _, kv_heads, block_size, _ = pool.shape
    group = heads // kv_heads
    grouped = q.reshape(tokens, kv_heads, group, head_dim).astype(jnp.float32) * scale
    if sinks is not None:
        sinks = sinks.reshape(kv_heads, 1, group)

    def attend_tile(q_tile, table, first, last, kv_len, num_blocks):
        """Attention of `q_tile[kv_heads, rows, head_dim]`, rows at positions `first` up to at most `last` of `kv_len`,
        to `num_blocks` blocks at a time."""
        rows, tile_k = q_tile.shape[1], num_blocks * block_size
        position = jnp.minimum(first + jnp.arange(rows, dtype=jnp.int32) // group, last)
        begin, last_key = jnp.int32(0), last if causal else kv_len - 1
        if sliding_window is not None:
            begin = jnp.maximum(first - sliding_window + 1, 0) // tile_k
            if not causal:
                last_key = jnp.minimum(last_key, last + sliding_window - 1)

        def attend_blocks(i, carry):
            key = i * tile_k + jnp.arange(tile_k, dtype=jnp.int32)
            age = position[:, None] - key[None]
            visible = age >= 0 if causal else (key < kv_len)[None]
            if sliding_window is not None:
                visible &= (age if causal else jnp.abs(age)) < sliding_window
            keys, values = read_blocks(table, i * num_blocks, num_blocks)
            scores = cap(jnp.einsum("kqd,ksd->kqs", q_tile, keys), soft_cap)
            values = jnp.where((key <= last_key)[None, :, None], values, 0)  # what lies behind is garbage
            return online_softmax(carry, scores, visible[None], "kqs,ksd->kqd", values)

        sinks_of_rows = None if sinks is None else jnp.tile(sinks, (1, rows // group, 1)).reshape(kv_heads, rows)
        carry = softmax_start(q_tile.shape, sinks_of_rows)
        return finish_softmax(jax.lax.fori_loop(begin, last_key // tile_k + 1, attend_blocks, carry))

    def read_blocks(table, at, num_blocks):
        """Keys and values `[kv_heads, num_blocks * block_size, head_dim]`; a single block is used where it lies."""
        if num_blocks == 1:
            kv = jax.lax.dynamic_index_in_dim(pool, table[at], 0, keepdims=False)
        else:
            kv = pool.at[jax.lax.dynamic_slice_in_dim(table, at, num_blocks)].get(mode="clip")
            kv = kv.transpose(1, 2, 0, 3, 4).reshape(2, kv_heads, num_blocks * block_size, -1)
        return read_kv(kv, head_dim, kv_scales)

    def attend_tiles(s, offset, num_tiles, tile_q, num_blocks, out):
        """`num_tiles` tiles of sequence `s` from its token `offset` on. A tile past the sequence's end spills into the
        next one's rows, which is written later; the spill of the last lands in the slack."""
        q_len = cu_q_lens[s + 1] - cu_q_lens[s]

        def tile(i, out):
            begin = offset + i * tile_q
            at = cu_q_lens[s] + begin
            x = jax.lax.dynamic_slice_in_dim(padded, at, tile_q)
            x = x.transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)
            first = kv_lens[s] - q_len + begin
            last = jnp.minimum(first + tile_q, kv_lens[s]) - 1
            y = attend_tile(x, tables[s], first, last, kv_lens[s], num_blocks)
            y = y.reshape(kv_heads, tile_q, -1, head_dim).transpose(1, 0, 2, 3)
            return jax.lax.dynamic_update_slice_in_dim(out, y, at, 0)

        return jax.lax.fori_loop(0, num_tiles, tile, out)

    def attend_chunk(s, out):
        """All tokens of sequence `s`: wide tiles where three quarters of one are filled, then narrow ones."""
        q_len, num_wide = cu_q_lens[s + 1] - cu_q_lens[s], 0
        if tokens > TILE_Q:
            num_wide = (q_len + WIDE_TILE_Q // 4) // WIDE_TILE_Q
            out = attend_tiles(s, 0, num_wide, WIDE_TILE_Q, wide_blocks, out)
        rest = jnp.maximum(q_len - num_wide * WIDE_TILE_Q, 0)
        tile_q = min(TILE_Q, tokens)
        return attend_tiles(s, num_wide * WIDE_TILE_Q, (rest + tile_q - 1) // tile_q, tile_q, 1, out)

    wide_blocks = -(-WIDE_TILE_K // block_size)
    tables = jnp.pad(block_tables, ((0, 0), (0, wide_blocks)))  # so that no slice of them is moved back to fit
    slack = WIDE_TILE_Q if tokens > TILE_Q else tokens
    padded = jnp.pad(grouped, ((0, slack), (0, 0), (0, 0), (0, 0)))
    num_decodes, num_seqs = distribution[0], distribution[1]
    decode = partial(attend_tiles, offset=0, num_tiles=1, tile_q=1, num_blocks=1)
    out = jax.lax.fori_loop(0, num_decodes, lambda s, out: decode(s, out=out), jnp.zeros_like(padded))
    out = jax.lax.fori_loop(num_decodes, num_seqs, attend_chunk, out)
    return out[:tokens].reshape(tokens, heads, head_dim).astype(q.dtype), pool
