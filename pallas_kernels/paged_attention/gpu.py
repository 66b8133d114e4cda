"""Ragged paged attention for NVIDIA GPUs from A100 on, in Pallas-Triton: split-KV rows and tiles of chunks.

Sequences of one token are rows: their keys are split among programs, so that few rows fill the GPU, and a small kernel
combines the splits. Tokens of chunks go in tiles. Every loop ends at the real lengths, and programs that have nothing
to do end at once. Small batches are all rows, which saves a launch where a launch costs most.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32, Num

from jaxllm.pallas_kernels.dispatch import compute_capability
from jaxllm.pallas_kernels.paged_attention import gpu_kernels
from jaxllm.pallas_kernels.paged_attention.batch import AnyArray, PagedBatch
from jaxllm.pallas_kernels.paged_attention.gpu_kernels import Spec
from jaxllm.pallas_kernels.paged_attention.reference import is_quantised, quantise

DTYPES = ("float32", "bfloat16")
POOL_DTYPES = ("int8", "float8_e4m3fn")
HEAD_DIMS = (64, 80, 96, 128, 256)

RESIDENT = 384  # programs of rows that fill an H200: three a multiprocessor, by their 72 KB of shared memory
RESIDENT_TILES = 132  # programs of tiles that run at a time and read the same keys, from L2 but for the first
MAX_SPLITS = 128
MIN_SPLIT, MIN_SPLIT_OF_MANY = 256, 1024  # keys worth a split where the GPU is to be filled, and where it is full
MAX_ROW_TOKENS = 32  # batches of up to so many tokens are all rows


class LaunchPlan(NamedTuple):
    """What runs for a batch's static shape: `num_rows` programs of rows, `num_tiles` of tiles, each for every KV head
    (and split). No tiles where all tokens are rows."""

    rows: Spec
    num_rows: int
    row_params: plt.CompilerParams
    tiles: Spec
    num_tiles: int
    tile_params: plt.CompilerParams


class Shape(NamedTuple):
    """A tile of the kernel: query rows, keys, and how many warps and pipeline stages it takes."""

    rows: int
    tile_kv: int
    num_warps: int
    num_stages: int

    @property
    def params(self) -> plt.CompilerParams:
        return plt.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages)


def row_shape(row_bytes: int) -> Shape:
    """`row_bytes` are those of a query's head. A row's kernel waits for memory only: tiles of 32 KB of K and V, two of
    them on the way (the stages count the loads of the block table as well), leave room for three programs."""
    return Shape(16, 64, 4, 5) if row_bytes <= 256 else Shape(16, 32, 4, 5)


def tile_shape(row_bytes: int, itemsize: int, *, wide: bool, hopper: bool) -> Shape:
    """Hopper's tensor cores want 64 rows for each group of four warps. 128 rows, if `wide` says that enough tiles are
    left then, halve the reads of K and V from L2, which 64 are bound by. Registers bound the keys."""
    if itemsize == 4:  # no tensor cores: float32 in full precision
        return Shape(32, 32 if row_bytes <= 512 else 16, 4, 2)
    if row_bytes > 256:
        return Shape(128, 64, 8, 2) if wide and hopper else Shape(64, 32, 8, 2)
    if hopper:
        return Shape(128, 128, 8, 2) if wide else Shape(64, 64, 4, 3)
    return Shape(128, 32, 8, 3) if wide else Shape(64, 32, 4, 3)


def plan(
    tokens: int,
    seqs: int,
    capacity: int,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    itemsize: int,
    scale: float = 1.0,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    hopper: bool = True,
    interpret: bool = False,
) -> LaunchPlan:
    """Tiles and splits for `tokens` of up to `seqs` sequences, each of up to `capacity` keys; `itemsize` is q's."""
    group = heads // kv_heads
    padded_group, row_bytes = pl.next_power_of_2(group), pl.next_power_of_2(head_dim) * itemsize
    base = partial(
        Spec,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        interpret=interpret,
    )
    shape, ragged = row_shape(row_bytes), tokens <= MAX_ROW_TOKENS
    num_rows = tokens if ragged else seqs
    if sliding_window is not None:
        capacity = min(capacity, sliding_window + shape.tile_kv)
    # Few rows are split until the GPU is full; many only so that no long one is left over when the others are done.
    programs = num_rows * kv_heads
    fill, spread = -(-RESIDENT // programs), min(4, capacity // 4096)
    min_split = MIN_SPLIT if programs < RESIDENT else MIN_SPLIT_OF_MANY
    rows = base(
        rows=max(shape.rows, padded_group),
        tile_kv=shape.tile_kv,
        splits=max(1, min(max(fill, spread), -(-capacity // min_split), MAX_SPLITS)),
        min_split_tiles=-(-min_split // shape.tile_kv),
        ragged_rows=ragged,
        local_keys=max(16, pl.next_power_of_2(tokens)) if ragged else 16,
    )
    wide = -(-tokens * padded_group // 128) * kv_heads >= 128
    tile = tile_shape(row_bytes, itemsize, wide=wide, hopper=hopper)
    tiles = base(rows=max(tile.rows, padded_group), tile_kv=tile.tile_kv)
    num_tiles = 0 if ragged else -(-tokens // (tiles.rows // padded_group))
    return LaunchPlan(rows, num_rows, shape.params, tiles, num_tiles, tile.params)


def bytes_moved(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    itemsize: int,
    kv_itemsize: int | None = None,
    sliding_window: int | None = None,
) -> int:
    """Bytes of device memory that the kernels read and write for sequences of these lengths (tokens of the step, all).

    `itemsize` is that of q, `kv_itemsize` (the same by default) the pool's. What programs that run together read from
    L2 after the first is counted once.
    """
    run = plan(
        sum(q_lens),
        len(q_lens),
        max(kv_lens),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        itemsize=itemsize,
        sliding_window=sliding_window,
    )
    key = 2 * kv_heads * head_dim * (kv_itemsize or itemsize)  # K and V of one token
    token = 2 * heads * head_dim * itemsize + 3 * key  # q, out; k and v attended to and stored, the pool
    tile_q, total, leading = run.tiles.rows // run.tiles.padded_group, 0, True
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        leading = leading and q_len == 1
        start = kv_len - q_len if sliding_window is None else min(kv_len - q_len, sliding_window - 1)
        cached = start * key + 4 * -(-kv_len // block_size)
        if run.rows.ragged_rows or leading:
            tiles = -(-start // run.rows.tile_kv)
            per_split = max(-(-tiles // run.rows.splits), run.rows.min_split_tiles)
            splits = max(-(-tiles // per_split), 1)
            partials = 2 * 4 * splits * heads * (head_dim + 1)
            new = (q_len - 1) * q_len // 2 * key  # a row reads the step's earlier tokens too
            total += q_len * (cached + token + partials) + new
        else:
            waves = -(-q_len // (tile_q * RESIDENT_TILES))
            total += waves * (cached + q_len * key) + q_len * (token - key)
    return total + 4 * (2 * len(q_lens) + 3)


def supports(q: AnyArray, k: AnyArray, v: AnyArray, kv_pool: AnyArray, *args: Any, **kwargs: Any) -> bool:
    """Whether the kernels support these dtypes and shapes, and this GPU float8."""
    heads, head_dim = q.shape[1:]
    _, _, kv_heads, block_size, _ = kv_pool.shape
    capability = compute_capability()
    if kv_pool.dtype == jnp.float8_e4m3fn and capability < 89:
        return False  # no instruction reads them
    return (
        capability >= 80
        and q.dtype.name in DTYPES
        and k.dtype == v.dtype == q.dtype
        and (kv_pool.dtype == q.dtype or kv_pool.dtype.name in POOL_DTYPES)
        and head_dim in HEAD_DIMS
        and kv_pool.shape[4] == head_dim
        and heads % kv_heads == 0
        and heads // kv_heads <= 64
        and block_size in (16, 32, 64, 128, 256)
    )


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
    """See `reference.ragged_paged_attention`; `interpret` is that of `pl.pallas_call`.

    Raises `ValueError` for a pool of 8-bit numbers of more than 2 and at most 4 GiB.
    """
    check_pool(kv_pool)
    tokens, heads, head_dim = q.shape
    _, _, kv_heads, block_size, _ = kv_pool.shape
    seqs, blocks_per_seq = batch.block_tables.shape
    run = plan(
        tokens,
        seqs,
        blocks_per_seq * block_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        itemsize=q.dtype.itemsize,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        hopper=compute_capability() >= 90,
        interpret=bool(interpret),
    )
    batch = jax.tree.map(lambda x: x.astype(jnp.int32), batch)
    if is_quantised(kv_pool.dtype):  # here, where XLA fuses it into what computes k and v
        k, v = (quantise(x, kv_scales[i][None, :, None], kv_pool.dtype) for i, x in enumerate((k, v)))
    call, shape = partial(pl.pallas_call, interpret=interpret), jax.ShapeDtypeStruct
    rows, pool_shape = run.rows, shape(kv_pool.shape, kv_pool.dtype)
    partials = (run.num_rows, heads, rows.splits)
    read_bytes = kv_pool.dtype.itemsize * 2 * kv_heads * head_dim * blocks_per_seq * block_size
    acc, weight = call(
        partial(gpu_kernels.attend_rows, rows),
        grid=(kv_heads, rows.splits, run.num_rows),
        out_shape=(shape((*partials, head_dim), jnp.float32), shape(partials, jnp.float32)),
        compiler_params=run.row_params,
        name="attend_rows",
        cost_estimate=cost(run.num_rows, blocks_per_seq * block_size, q, run.num_rows * read_bytes),
    )(batch, q, k, v, kv_pool, kv_scales)
    out, pool = call(
        partial(gpu_kernels.combine, rows),
        grid=(heads, run.num_rows),
        out_shape=(shape(q.shape, q.dtype), pool_shape),
        input_output_aliases={8: 1},
        compiler_params=plt.CompilerParams(num_warps=4 if rows.splits > 16 else 1, num_stages=1),
        name="combine_splits",
        cost_estimate=cost(run.num_rows, rows.splits, q, acc.size * 4),
    )(batch, acc, weight, k, v, kv_pool, kv_scales, sinks)
    if not run.num_tiles:
        return out, pool
    before_out = 8 + (kv_scales is not None) + (sinks is not None)
    out, pool = call(
        partial(gpu_kernels.attend_tiles, run.tiles),
        grid=(run.num_tiles, kv_heads),
        out_shape=(shape(q.shape, q.dtype), pool_shape),
        input_output_aliases={before_out: 0, 7: 1},
        compiler_params=run.tile_params,
        name="attend_tiles",
        cost_estimate=cost(tokens, blocks_per_seq * block_size, q, seqs * read_bytes),
    )(batch, q, k, v, pool, kv_scales, sinks, out)
    return out, pool


def check_pool(kv_pool: AnyArray) -> None:
    """Raises `ValueError` for one of 8-bit numbers of more than 2 and at most 4 GiB."""
    num_bytes = kv_pool.size * kv_pool.dtype.itemsize
    if kv_pool.dtype.itemsize == 1 and 2**31 < num_bytes <= 2**32:
        raise ValueError(
            f"a layer's pool of {num_bytes / 2**30:.2f} GiB of {kv_pool.dtype}: the compiler counts cells of pools up "
            "to 4 GiB in 32 bits with a sign. Choose num_blocks for at most 2 GiB, or more than 4 GiB, a layer"
        )


def cost(tokens: int, keys: int, q: Array, read_bytes: int) -> pl.CostEstimate:
    """Of `tokens` that attend to `keys` each: the most that the static shapes allow."""
    scores = tokens * keys * q.shape[1]
    moved = read_bytes + 2 * q.size * q.dtype.itemsize
    return pl.CostEstimate(flops=4 * scores * q.shape[2], transcendentals=scores, bytes_accessed=moved)
