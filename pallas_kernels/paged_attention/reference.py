"""Defines ragged paged attention, in jnp. Runs everywhere; every kernel is tested against it."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Num

from jaxllm.pallas_kernels.paged_attention.batch import PagedBatch


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
    """Attention of a ragged batch over paged keys and values (PagedAttention, arXiv 2309.06180).

    `batch` says which tokens are whose. Query head `h` reads KV head `h // (heads // kv_heads)`. Of the pool's last
    axis the first `head_dim` are read; the rest is written as zeros.

    A token sees the keys of its sequence up to its own position; where not `causal` all that `kv_lens` counts. With
    `sliding_window` it sees those alone that are fewer positions than that away: before it and, where not `causal`,
    on either side. Scores become `soft_cap * tanh(scores / soft_cap)`. `sinks` are one more score per head, whose
    value is zero. `kv_scales`, of keys and of values, goes with a pool of 8-bit numbers and with no other: see
    `quantise`.
    """
    pool = write_kv(k, v, kv_pool, batch, kv_scales)
    tokens, heads, head_dim = q.shape
    _, _, kv_heads, block_size, _ = pool.shape
    group = heads // kv_heads
    seq, positions, valid = batch.token_positions(tokens)
    tables = batch.block_tables[seq]  # [tokens, blocks_per_seq]
    rows = q.reshape(tokens, kv_heads, group, head_dim).astype(jnp.float32) * scale
    if sinks is not None:
        sinks = sinks.reshape(1, kv_heads, group)
    in_block = jnp.arange(block_size, dtype=jnp.int32)
    seen = positions + 1 if causal else batch.kv_lens[seq]  # keys, but for the window

    def attend_block(i, carry):  # online softmax, so that no [tokens, kv_len] scores are held
        keys, values = read_kv(pool[tables[:, i]], head_dim, kv_scales)  # [tokens, kv_heads, block_size, head_dim]
        key = (i * block_size + in_block)[None]
        visible = (key < seen[:, None]) & valid[:, None]
        if sliding_window is not None:
            visible &= jnp.abs(positions[:, None] - key) < sliding_window
        scores = cap(jnp.einsum("tkgd,tksd->tkgs", rows, keys), soft_cap)
        values = jnp.where(visible[:, None, :, None], values, 0)
        return online_softmax(carry, scores, visible[:, None, None, :], "tkgs,tksd->tkgd", values)

    num_blocks = (jnp.max(jnp.where(valid, seen, 0)) + block_size - 1) // block_size
    carry = jax.lax.fori_loop(0, num_blocks, attend_block, softmax_start(rows.shape, sinks))
    return finish_softmax(carry).reshape(q.shape).astype(q.dtype), pool


def write_kv(k: Array, v: Array, kv_pool: Array, batch: PagedBatch, kv_scales: Array | None = None) -> Array:
    """The pool with the new keys and values in their blocks, in place when the pool is donated."""
    num_blocks, _, _, block_size, _ = kv_pool.shape
    seq, positions, valid = batch.token_positions(k.shape[0])
    # Padding writes past the pool, each row elsewhere so that the indices stay unique: dropped, never wrapped.
    nowhere = num_blocks + jnp.arange(k.shape[0], dtype=jnp.int32)
    block = jnp.where(valid, batch.block_tables[seq, positions // block_size], nowhere)
    cells = _cells(k, v, kv_pool, kv_scales)
    return kv_pool.at[block, :, :, positions % block_size].set(cells, mode="drop", unique_indices=True)


def write_blocks(
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv_pool: Num[Array, "blocks 2 kv_heads block_size padded_head_dim"],
    blocks: Int[Array, " n"],
    tokens: Int[Array, "n block_size"],
    kv_scales: Float32[Array, "2 kv_heads"] | None = None,
) -> Num[Array, "blocks 2 kv_heads block_size padded_head_dim"]:
    """The pool with the keys and values of these `tokens` in whole `blocks`, of which no two are alike and those past
    the pool are dropped: what scatters cells, a TPU would lay the pool out anew for."""
    cells = _cells(k, v, kv_pool, kv_scales)[tokens]  # [n, block_size, 2, kv_heads, head_dim]
    return kv_pool.at[blocks].set(jnp.moveaxis(cells, 1, 3), mode="drop", unique_indices=True)


def _cells(k: Array, v: Array, kv_pool: Array, kv_scales: Array | None) -> Array:
    """What the pool holds of each token, `[tokens, 2, kv_heads, padded_head_dim]`."""
    kv = jnp.stack([k, v], axis=1)
    kv = jnp.pad(kv, ((0, 0), (0, 0), (0, 0), (0, kv_pool.shape[-1] - k.shape[2])))
    if kv_scales is None:
        return kv.astype(kv_pool.dtype)
    return quantise(kv, kv_scales[None, :, :, None], kv_pool.dtype)


def read_kv(
    kv: Num[Array, "*rows 2 kv_heads keys padded_head_dim"],
    head_dim: int,
    kv_scales: Float32[Array, "2 kv_heads"] | None,
) -> tuple[Float32[Array, "*rows kv_heads keys head_dim"], Float32[Array, "*rows kv_heads keys head_dim"]]:
    """Keys and values of cells of the pool."""
    kv = kv[..., :head_dim]
    if kv_scales is None:
        kv = kv.astype(jnp.float32)
    else:
        kv = dequantise(kv, kv_scales.reshape((1,) * (kv.ndim - 4) + (*kv_scales.shape, 1, 1)))
    return kv[..., 0, :, :, :], kv[..., 1, :, :, :]


def is_quantised(dtype: DTypeLike) -> bool:
    """Whether a pool of `dtype` needs scales: int8 or float8_e4m3fn."""
    return jnp.dtype(dtype).itemsize == 1


def quantise(x: Float[Array, "..."], scale: Float32[Array, "..."], dtype: DTypeLike) -> Num[Array, "..."]:
    """`x / scale` as int8, to the nearest with halves to even, or as float8_e4m3fn; clipped to what is finite and
    symmetric. `scale` broadcasts against `x`."""
    x = x.astype(jnp.float32) / scale
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.clip(jnp.round(x), -127, 127).astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    x = jnp.clip(x, -largest, largest)
    # To its 3 bits of mantissa first, or to multiples of 2^-9: XLA's CPU rounds to float16 on the way to 8 bits.
    small = jnp.round(x * 2**9) * 2**-9
    return jnp.where(jnp.abs(x) < 2**-6, small, jax.lax.reduce_precision(x, 8, 3)).astype(dtype)


def dequantise(stored: Num[Array, "..."], scale: Float32[Array, "..."]) -> Float32[Array, "..."]:
    return stored.astype(jnp.float32) * scale


def rounded(x: Float[Array, "..."], scale: Float32[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """What a pool of `dtype` holds of `x`, in its dtype. `scale` has as many axes as follow those of rows."""
    scale = scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)
    return dequantise(quantise(x, scale, dtype), scale).astype(x.dtype)


def cap(scores: Array, soft_cap: float | None) -> Array:
    """`soft_cap * tanh(scores / soft_cap)`; None: the scores as they are."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def softmax_start(shape: tuple[int, ...], sinks: Array | None = None) -> tuple[Array, Array, Array]:
    """Maximum, normaliser and accumulator of an online softmax over nothing but `sinks`, which broadcast to
    `shape[:-1]`, for values of `shape`."""
    if sinks is None:
        return jnp.full(shape[:-1], -jnp.inf), jnp.zeros(shape[:-1]), jnp.zeros(shape)
    return jnp.broadcast_to(sinks.astype(jnp.float32), shape[:-1]), jnp.ones(shape[:-1]), jnp.zeros(shape)


def online_softmax(carry, scores, visible, weighted_sum: str, values):
    """One step of the online softmax (Milakov and Gimelshein, arXiv 1805.02867) in float32.

    `visible` broadcasts against `scores`; `values` must be finite where nothing is visible.
    """
    top, total, acc = carry
    scores = jnp.where(jnp.broadcast_to(visible, scores.shape), scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    safe_top = jnp.where(jnp.isfinite(new_top), new_top, 0.0)  # a row that has seen nothing yet
    p = jnp.exp(scores - safe_top[..., None])
    rescale = jnp.exp(top - safe_top)
    acc = acc * rescale[..., None] + jnp.einsum(weighted_sum, p, values)
    return new_top, total * rescale + jnp.sum(p, axis=-1), acc


def finish_softmax(carry) -> Array:
    _, total, acc = carry
    return acc / jnp.where(total > 0, total, 1.0)[..., None]
