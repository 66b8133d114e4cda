"""Ragged paged attention for NVIDIA GPUs whose results depend on no other token of the step, to the bit, in
Pallas-Triton: every query adds up its keys in tiles from the first on, however many queries there are.

The step's keys and values go into the pool first, and all are read from there: what a query sees is rounded alike
whether it was computed in this step or in one before. A tile of queries is of one sequence. It takes tiles of keys that
begin at multiples of their size, each with its mask: keys that a row does not see weigh 0 and leave its maximum, so
that a tile without any leaves the row as it was. Nothing is split, and one code serves decodes and chunks.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32, Num

from jaxllm.pallas_kernels.dispatch import compute_capability
from jaxllm.pallas_kernels.paged_attention.batch import PagedBatch
from jaxllm.pallas_kernels.paged_attention.gpu import check_pool, cost, tile_shape
from jaxllm.pallas_kernels.paged_attention.gpu import supports as supports
from jaxllm.pallas_kernels.paged_attention.gpu_kernels import (
    LOG2_E,
    Spec,
    cdiv,
    find_row,
    iota,
    load_cached,
    load_cells,
    online_softmax,
    sees_new,
    softmax_start,
    store_cells,
)
from jaxllm.pallas_kernels.paged_attention.reference import is_quantised, quantise


def ragged_paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv_pool: Num[Array, "blocks 2 kv_heads block_size head_dim"],
    batch: PagedBatch,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    kv_scales: Float32[Array, "2 kv_heads"] | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "tokens heads head_dim"], Num[Array, "blocks 2 kv_heads block_size head_dim"]]:
    """See `reference.ragged_paged_attention`; `interpret` is that of `pl.pallas_call`. Raises `ValueError` as
    `gpu.ragged_paged_attention` does."""
    check_pool(kv_pool)
    tokens, heads, head_dim = q.shape
    _, _, kv_heads, block_size, _ = kv_pool.shape
    seqs, blocks_per_seq = batch.block_tables.shape
    group, itemsize = heads // kv_heads, q.dtype.itemsize
    row_bytes = pl.next_power_of_2(head_dim) * itemsize
    tile = tile_shape(row_bytes, itemsize, wide=False, hopper=compute_capability() >= 90)
    spec = Spec(
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        interpret=bool(interpret),
        rows=max(tile.rows, pl.next_power_of_2(group)),
        tile_kv=tile.tile_kv,
        ragged_rows=True,
    )
    batch = jax.tree.map(lambda x: x.astype(jnp.int32), batch)
    if is_quantised(kv_pool.dtype):
        k, v = (quantise(x, kv_scales[i][None, :, None], kv_pool.dtype) for i, x in enumerate((k, v)))
    call, shape = partial(pl.pallas_call, interpret=interpret), jax.ShapeDtypeStruct
    pool = call(
        partial(write_token, spec),
        grid=(tokens,),
        out_shape=shape(kv_pool.shape, kv_pool.dtype),
        input_output_aliases={6: 0},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        name="write_tokens",
    )(batch, k, v, kv_pool)
    read_bytes = kv_pool.dtype.itemsize * 2 * kv_heads * head_dim * blocks_per_seq * block_size
    out = call(
        partial(attend_tile, spec),
        grid=(num_tiles(tokens, seqs, spec), kv_heads),
        out_shape=shape(q.shape, q.dtype),
        compiler_params=tile.params,
        name="attend_in_order",
        cost_estimate=cost(tokens, blocks_per_seq * block_size, q, seqs * read_bytes),
    )(batch, q, pool, kv_scales, sinks)
    return out, pool


def num_tiles(tokens: int, seqs: int, spec: Spec) -> int:
    """Places for tiles, of which some stay empty: see `find_tile`."""
    return tokens // tile_queries(spec) + seqs


def tile_queries(spec: Spec) -> int:
    return spec.rows // spec.padded_group


def find_tile(spec: Spec, batch: PagedBatch, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sequence at place `index`, and the first of its tokens there; past its last if the place is empty.

    Those of sequence s begin at `cu_q_lens[s] // tile_queries + s`, which leaves room for all of every one's.
    """
    seqs, size = batch.kv_lens.shape[0], tile_queries(spec)
    seq = iota(pl.next_power_of_2(seqs))
    is_real = seq < batch.distribution[1]
    first = plt.load(batch.cu_q_lens.at[seq], mask=is_real, other=0)
    begins = is_real & (jax.lax.div(first, size) + seq <= index)
    found = jnp.maximum(jnp.sum(begins.astype(jnp.int32)) - 1, 0)
    first = batch.cu_q_lens[found]
    return found, first + (index - jax.lax.div(first, size) - found) * size


def write_token(spec: Spec, batch: PagedBatch, k_ref: Any, v_ref: Any, pool_ref: Any, out_pool_ref: Any) -> None:
    """Grid (token): its K and V into the pool."""
    del pool_ref  # the same memory as out_pool_ref
    index, kv_heads = pl.program_id(0), k_ref.shape[1]

    @pl.when(index < batch.cu_q_lens[batch.distribution[1]])
    def _() -> None:
        row = find_row(spec, batch, index)
        head, dim = iota(pl.next_power_of_2(kv_heads)), iota(spec.padded_dim)
        block = batch.block_tables[row.seq, jax.lax.div(row.position, spec.block_size)]
        cell = jax.lax.rem(row.position, spec.block_size)
        for i, ref in enumerate((k_ref, v_ref)):
            x = load_cells(spec, ref, index, head, dim, head < kv_heads)
            store_cells(spec, out_pool_ref, (block, jnp.full_like(block, i), head, cell), dim, x, head < kv_heads)


def attend_tile(
    spec: Spec, batch: PagedBatch, q_ref: Any, pool_ref: Any, scales_ref: Any, sinks_ref: Any, out_ref: Any
) -> None:
    """Grid (place of a tile, KV head), the last first as causal attention has most to do there."""
    head, index = pl.program_id(1), pl.num_programs(0) - 1 - pl.program_id(0)
    seq, begin = find_tile(spec, batch, index)
    first, past, kv_len = batch.cu_q_lens[seq], batch.cu_q_lens[seq + 1], batch.kv_lens[seq]
    offset = kv_len - past  # from a token to its position
    end = jnp.minimum(begin + tile_queries(spec), past)

    @pl.when((seq < batch.distribution[1]) & (begin >= first) & (begin < past))
    def _() -> None:
        dim, row = iota(spec.padded_dim), iota(spec.rows)
        token, group = begin + jax.lax.div(row, spec.padded_group), jax.lax.rem(row, spec.padded_group)
        real, q_head = (token < end) & (group < spec.group), head * spec.group + group
        q = load_cells(spec, q_ref, token, q_head, dim, real)
        score_scale = spec.scale if scales_ref is None else spec.scale * scales_ref[0, head]

        def attend(i: jax.Array, carry: tuple) -> tuple:
            key = i * spec.tile_kv + iota(spec.tile_kv)
            inside = key < kv_len
            if spec.sliding_window is not None:  # blocks before it may be anyone's
                inside &= key > begin + offset - spec.sliding_window
            keys, values = load_cached(spec, batch, pool_ref, seq, head, key, dim, inside)
            visible = sees_new(spec, (token + offset)[:, None] - key[None, :], inside[None, :])
            return online_softmax(spec, carry, q, keys, values, score_scale, visible)

        tiles = seen_tiles(spec, begin + offset, end - 1 + offset, kv_len)
        top, total, acc = jax.lax.fori_loop(*tiles, attend, softmax_start(spec.rows, spec.padded_dim))
        if sinks_ref is not None:
            sink = plt.load(sinks_ref.at[q_head], mask=group < spec.group, other=0).astype(jnp.float32) * LOG2_E
            total = total + jnp.exp2(sink - top)
        out = acc / total[:, None]
        if scales_ref is not None:
            out = out * scales_ref[1, head]
        store_cells(spec, out_ref, (token, q_head), dim, out, real)


def seen_tiles(spec: Spec, lowest: jax.Array, highest: jax.Array, kv_len: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tiles of keys (first, past the last) that some query at positions `lowest` to `highest` sees."""
    window, begin = spec.sliding_window, jnp.int32(0)
    end = highest + 1 if spec.causal else kv_len
    if window is not None:
        begin = jax.lax.div(jnp.maximum(lowest - (window - 1), 0), spec.tile_kv)
        end = end if spec.causal else jnp.minimum(highest + window, kv_len)
    return begin, cdiv(end, spec.tile_kv)
