"""Ragged paged attention for TPUs, one Mosaic kernel: K and V written in place, decodes and chunks in one call.

In the manner of ragged paged attention v3 (arXiv 2604.15464): grid (1,), loops over the sequences inside, transfers of
what comes next during the work on what is there. What bounds it, in bfloat16: a decode reads each key and value once,
and its products fill 8 rows of the matrix unit, so that bandwidth decides as long as the work on a tile (two products
and two reductions, one after the other, for all heads side by side) takes less time than its transfer: hence tiles of
2 MiB. A pass over a chunk does 256 * group operations a byte of keys, more than a chip does in the time of a byte once
the group is 4: there matrix products decide, and beside them the vector unit, with about eight operations a score.

Queries, results and new keys go through HBM as 32-bit rows, whole registers of them a token (two bfloat16 heads a row):
a transfer may then begin at any token, and a head's rows of many tokens are loaded with a stride.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Num

from jaxllm.pallas_kernels.paged_attention.batch import AnyArray, PagedBatch
from jaxllm.pallas_kernels.paged_attention.reference import quantise
from jaxllm.pallas_kernels.paged_attention.tpu_attend import Refs, Static
from jaxllm.pallas_kernels.paged_attention.tpu_chunks import chunk_scratch, run_chunks
from jaxllm.pallas_kernels.paged_attention.tpu_decode import decode_scratch, run_decodes
from jaxllm.pallas_kernels.paged_attention.tpu_plan import (
    LANES,
    VMEM_HEADROOM_BYTES,
    Shapes,
    head_dim_in_pool,
    pick_tiles,
    round_up,
    smem_bytes,
)
from jaxllm.pallas_kernels.paged_attention.tpu_plan import bytes_moved as bytes_moved

QUANTISED = (jnp.int8, jnp.float8_e4m3fn)


def supports(
    q: AnyArray, k: AnyArray, v: AnyArray, kv_pool: AnyArray, batch: PagedBatch | None = None, **options: Any
) -> bool:
    """Whether the kernel supports these dtypes and shapes, and tiles fit VMEM and tables SMEM."""
    heads, head_dim = q.shape[1:]
    _, two, kv_heads, block_size, padded = kv_pool.shape
    fits = two == 2 and padded == head_dim_in_pool(head_dim) and heads % kv_heads == 0 and head_dim <= 256
    fits &= q.dtype in (jnp.float32, jnp.bfloat16) and k.dtype == v.dtype == q.dtype
    fits &= kv_pool.dtype in (q.dtype, *QUANTISED)
    fits &= block_size & (block_size - 1) == 0 and 32 // kv_pool.dtype.itemsize <= block_size <= 256
    if not fits:
        return False
    try:
        pick_tiles(shapes_of(q, kv_pool))
        if batch is not None:
            smem_bytes(*batch.block_tables.shape)
    except ValueError:
        return False
    return True


def shapes_of(q: AnyArray, kv_pool: AnyArray) -> Shapes:
    _, _, kv_heads, block_size, head_dim = kv_pool.shape
    return Shapes(
        heads=q.shape[1],
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        itemsize=q.dtype.itemsize,
        kv_itemsize=kv_pool.dtype.itemsize,
    )


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
    batch_invariant: bool = False,
    interpret: Any = False,
) -> tuple[Float[Array, "tokens heads head_dim"], Num[Array, "blocks 2 kv_heads block_size padded_head_dim"]]:
    """See `reference.ragged_paged_attention`. Results of padding are whatever was in memory. `batch_invariant`: each
    token's result is the same to the bit, whatever tokens it is computed with.

    `interpret` is False, True or `pltpu.InterpretParams`. ValueError where tables or tiles do not fit.
    """
    if not supports(q, k, v, kv_pool):
        raise ValueError(
            f"the TPU kernel does not take queries {q.dtype}{list(q.shape)} with a pool {kv_pool.dtype}"
            f"{list(kv_pool.shape)}: it wants float32 or bfloat16, head_dim up to 256, a block_size that is a power "
            f"of two from {32 // kv_pool.dtype.itemsize} to 256, and fewer heads a device if VMEM is short"
        )
    shapes = shapes_of(q, kv_pool)
    static = Static(
        shapes=shapes,
        tiles=pick_tiles(shapes),
        dtype=q.dtype,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        in_order=batch_invariant,
        has_sinks=sinks is not None,
        has_scales=kv_scales is not None,
    )
    if kv_scales is not None:  # what the pool will hold, in the queries' dtype, which has all these numbers
        k, v = (quantise(x, kv_scales[i, None, :, None], kv_pool.dtype).astype(q.dtype) for i, x in enumerate((k, v)))
    q_words = to_words(q[:, : shapes.words], q[:, shapes.words :], shapes.words)
    none = jnp.zeros(1, jnp.float32)
    operands = [x.astype(jnp.int32) for x in (batch.cu_q_lens, batch.kv_lens, batch.distribution)]
    operands += [none if x is None else x.astype(jnp.float32).reshape(-1) for x in (sinks, kv_scales)]
    operands += [in_lanes(batch.block_tables), q_words, to_words(k, v, shapes.new_words)]
    out, pool = call(static, q.shape[0], batch.block_tables.shape, interpret, q_words, kv_pool)(*operands, kv_pool)
    return from_words(out, shapes.words, q), pool


def kernel(static: Static, *refs):
    *operands, _, out, pool = refs  # the pool is one buffer, as operand and as result
    refs = Refs(*operands, pool, out)
    num_decodes, num_seqs = refs.distribution[0], refs.distribution[1]
    if static.in_order:  # one code for all
        num_decodes = jnp.int32(0)
    else:

        @pl.when(num_decodes > 0)
        def _():
            pl.run_scoped(partial(run_decodes, static, refs, num_decodes), *decode_scratch(static, refs))

    @pl.when(num_seqs > num_decodes)
    def _():
        pl.run_scoped(partial(run_chunks, static, refs, num_decodes, num_seqs), *chunk_scratch(static, refs))


def call(static: Static, tokens: int, tables_shape: tuple[int, int], interpret: Any, *like: Array):
    """The `pallas_call`, with results `like` the query words and the pool, which is the last operand too."""
    smem_bytes(*tables_shape)
    smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
    params = pltpu.CompilerParams(
        dimension_semantics=("arbitrary",),
        vmem_limit_bytes=static.tiles.vmem_bytes + VMEM_HEADROOM_BYTES,
        disable_bounds_checks=True,  # they take three quarters of the scalar operations that start a transfer
    )
    return pl.pallas_call(
        partial(kernel, static),
        name="ragged_paged_attention",
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3, grid=(1,), in_specs=[smem, smem, *[hbm] * 4], out_specs=[hbm, hbm]
        ),
        input_output_aliases={8: 1},
        compiler_params=params,
        cost_estimate=cost_at_capacity(static, tokens, *tables_shape),
        # The plain interpreter does not support transfers of a computed length.
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
    )


def cost_at_capacity(static: Static, tokens: int, seqs: int, blocks_per_seq: int) -> pl.CostEstimate:
    """Cost of a batch of all tokens and sequences, each as long as its block table."""
    s = static.shapes
    seqs = min(seqs, tokens)
    kv_len = blocks_per_seq * s.block_size
    q_lens = [min(tokens // seqs, kv_len)] * seqs
    seen = kv_len if static.sliding_window is None else min(static.sliding_window, kv_len)
    scores = sum(q_lens) * s.heads * seen
    moved = bytes_moved(
        q_lens,
        [kv_len] * seqs,
        heads=s.heads,
        kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        block_size=s.block_size,
        itemsize=s.itemsize,
        kv_itemsize=s.kv_itemsize,
        sliding_window=static.sliding_window,
    )
    return pl.CostEstimate(flops=4 * scores * s.head_dim, transcendentals=scores, bytes_accessed=moved)


def to_words(low: Array, high: Array, words: int) -> Array:
    """Heads `[tokens, heads, head_dim]` as `words` heads of 32 bit, in rows of 128 lanes. Of bfloat16, the low
    halves are a head of `low`, the high ones one of `high`; of float32, heads of `high` follow those of `low`."""
    if low.dtype == jnp.float32:
        return to_rows(jnp.concatenate([low, high], axis=1), words)
    low, high = (jax.lax.bitcast_convert_type(to_rows(x, words), jnp.uint16).astype(jnp.uint32) for x in (low, high))
    return low | (high << jnp.uint32(16))


def to_rows(x: Array, words: int) -> Array:
    tokens, heads, head_dim = x.shape
    padded = head_dim_in_pool(head_dim)
    return jnp.pad(x, ((0, 0), (0, words - heads), (0, padded - head_dim))).reshape(-1, LANES)


def from_words(x: Array, words: int, like: Array) -> Array:
    """The inverse, for queries: rows to `[tokens, heads, head_dim]`."""
    tokens, heads, head_dim = like.shape
    x = x.reshape(tokens, words, -1)
    if like.dtype == jnp.bfloat16:
        halves = [(x & jnp.uint32(0xFFFF)).astype(jnp.uint16), (x >> jnp.uint32(16)).astype(jnp.uint16)]
        x = jax.lax.bitcast_convert_type(jnp.concatenate(halves, axis=1), jnp.bfloat16)
    return x[:, :heads, :head_dim]


def in_lanes(block_tables: Array) -> Array:
    """`[seqs, rows, 1, 128]`: a transfer may begin at any sequence and end after any row, as no layout tile has two."""
    seqs, blocks_per_seq = block_tables.shape
    padded = round_up(blocks_per_seq, LANES)
    tables = jnp.pad(block_tables.astype(jnp.int32), ((0, 0), (0, padded - blocks_per_seq)))
    return tables.reshape(seqs, padded // LANES, 1, LANES)
