"""Attention of some query rows to a tile of keys in VMEM, in the TPU kernel: masks, products, the online softmax."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxllm.pallas_kernels.paged_attention.tpu_plan import LANES, Shapes, Tiles

LOG2_E = 1.4426950408889634
# A masked score and the maximum of no scores: apart, so that masked keys weigh 0 even where nothing was seen yet.
MASKED, NOTHING = -2.0e38, -1.0e38


@dataclass(frozen=True, kw_only=True)
class Static:
    """What is known when the kernel is traced."""

    shapes: Shapes
    tiles: Tiles
    dtype: Any  # of the matrix products
    scale: float
    causal: bool
    sliding_window: int | None
    soft_cap: float | None
    in_order: bool  # whether each query adds up its keys from the first on, in tiles of one size, all with masks
    has_sinks: bool
    has_scales: bool

    @property
    def writes_first(self) -> bool:
        """Whether all keys of the step are in the pool before any query attends, and are read from there."""
        return self.in_order or not self.causal


class Refs(NamedTuple):
    """Operands and results: lengths, sinks and scales in SMEM, the rest in HBM."""

    cu_q_lens: Any  # [seqs + 1]
    kv_lens: Any  # [seqs]
    distribution: Any  # [2]
    sinks: Any  # [heads], or anything where there are none
    scales: Any  # [2 * kv_heads], or anything
    tables: Any  # [seqs, rows, 1, 128]
    q: Any  # [tokens * rows, 128], 32 bit
    new: Any  # [tokens * new_rows, 128], 32 bit
    pool: Any  # [blocks, 2, kv_heads, block_size, head_dim]
    out: Any  # as q


class State(NamedTuple):
    """Queries and the online softmax of each (KV head, part of the tile): maximum and normaliser in base 2.

    The maximum is the same in all lanes, the normaliser is the sum of its lanes.
    """

    q: Any  # [kv_heads, parts, rows, head_dim], times `query_factor`
    top: Any  # [kv_heads, parts, rows, 128]
    total: Any  # [kv_heads, parts, rows, 128]
    acc: Any  # [kv_heads, parts, rows, head_dim]


class RowRefs(NamedTuple):
    """Query rows that one product attends with: part `part` of the tile, `period` positions from `first` to `last`, of
    which those from `begin` on are tokens'."""

    part: Any
    first: Any
    begin: Any
    last: Any
    period: int


def div(x, y: int):
    """`x // y` for a power of two: a shift, where a division of signed numbers takes many scalar operations."""
    return x >> (y.bit_length() - 1)


def rem(x, y: int):
    return x & (y - 1)


def cdiv(x, y: int):
    return div(x + (y - 1), y)


def widen(x: jax.Array, width: int) -> jax.Array:
    """`x[rows, 128]`, equal in all lanes, as wide as `width`: the same registers again."""
    return x if width == LANES else jnp.concatenate([x] * (width // LANES), axis=1)


def unpack(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two bfloat16 of each 32-bit word, low half first, as float32."""
    low, high = words << jnp.uint32(16), words & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(low, jnp.float32), jax.lax.bitcast_convert_type(high, jnp.float32)


def pack(low: jax.Array, high: jax.Array) -> jax.Array:
    rounded = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in (low, high)]
    low, high = (jax.lax.bitcast_convert_type(x, jnp.uint32) for x in rounded)
    return (low >> jnp.uint32(16)) | (high & jnp.uint32(0xFFFF0000))


def attend_tile(static: Static, state: State, view, edge: int, rows: RowRefs, first_key, limit, own: bool = False):
    """Attends with `rows` to the keys `first_key ..` of `view[blocks, 2, kv_heads, block_size, head_dim]`.

    Keys at `limit` and after may be anything. All the view's without masks if every row sees them all, which is never
    so of a causal tile's `own` keys, and not tried with `in_order`; else parts of `edge` keys, those alone that some
    row sees: the others would change nothing, as their weights are 0 and the maximum stays.
    """
    keys = view.shape[0] * static.shapes.block_size
    window = static.sliding_window
    seen_by_all, seen = _seen(static, rows, limit)
    whole = first_key + keys <= seen_by_all
    begin, end = jnp.int32(0), jnp.minimum(cdiv(seen - first_key, edge), keys // edge)
    if window is not None:
        whole &= first_key > rows.last - window
        begin = jnp.maximum(div(rows.first - window + 1 - first_key, edge), 0)

    if not own and not static.in_order:
        pl.when(whole)(lambda: attend_keys(static, state, view, 0, keys, rows, None))
        end = jnp.where(whole, begin, end)

    @pl.loop(begin, end)
    def _(i):
        attend_keys(static, state, view, i, edge, rows, (first_key + i * edge, limit))


def _seen(static: Static, rows: RowRefs, limit):
    """Past the last key that every row sees, and past the last that some row does, but for the window behind them."""
    if static.causal:
        return jnp.minimum(limit, rows.first + 1), jnp.minimum(limit, rows.last + 1)
    if static.sliding_window is None:
        return limit, limit
    window = static.sliding_window
    return jnp.minimum(limit, rows.first + window), jnp.minimum(limit, rows.last + window)


def attend_keys(static: Static, state: State, view, part, keys: int, rows: RowRefs, masked):
    """Attends with `rows` to part `part` of a view, `keys` of them, for each KV head in turn.

    `masked` is None or (position of the first key, the first that must not be seen)."""
    block_size = static.shapes.block_size
    blocks = pl.ds(part * (keys // block_size), keys // block_size)
    num_rows, head_dim = state.q.shape[2:]
    visible = written = None
    if masked is not None:
        first_key, limit = masked
        shape = (num_rows, keys)
        key = first_key + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        position = rows.first
        if rows.period > 1:
            position += jax.lax.broadcasted_iota(jnp.int32, shape, 0) & (rows.period - 1)
        visible = (key < limit) & (key <= position) if static.causal else key < limit
        if static.sliding_window is not None:
            visible &= key > position - static.sliding_window
            if not static.causal:
                visible &= key < position + static.sliding_window
        key = first_key + jax.lax.broadcasted_iota(jnp.int32, (keys, head_dim), 0)
        written = key < limit
        if static.in_order and static.sliding_window is not None:  # blocks before it may be anyone's
            written &= key > rows.begin - static.sliding_window

    def load(kind, head):
        x = view[blocks, kind, head].reshape(keys, head_dim).astype(static.dtype)
        return x if written is None or kind == 0 else jnp.where(written, x, jnp.zeros_like(x))

    def attend_heads(heads):
        queries = [state.q[h, rows.part].astype(static.dtype) for h in heads]
        scores = [product(static, q, load(0, h), 1) for q, h in zip(queries, heads, strict=True)]
        steps = [softmax_step(static, state, h, rows.part, x, visible) for x, h in zip(scores, heads, strict=True)]
        for (p, rescale), h in zip(steps, heads, strict=True):
            acc = state.acc[h, rows.part] * widen(rescale, head_dim)
            state.acc[h, rows.part] = acc + product(static, p, load(1, h), 0)

    for_heads(static.shapes.kv_heads, 8 if num_rows <= 16 else 4, attend_heads)


def for_heads(kv_heads: int, at_once: int, body: Callable[[list], None]) -> None:
    """`body(heads)` for all heads, some at once so that the products of one run during the softmax of another."""
    if kv_heads <= at_once:
        body(list(range(kv_heads)))
        return
    while kv_heads % at_once:
        at_once -= 1

    @pl.loop(0, kv_heads // at_once)
    def _(i):
        body([i * at_once + j for j in range(at_once)])


def product(static: Static, x: jax.Array, y: jax.Array, contracted: int) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if static.dtype == jnp.float32 else None
    dims = (((1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def query_factor(static: Static, refs: Refs, head):
    """What a KV head's queries are multiplied with, so that products are scores in base 2, or the tangent's argument
    where scores are capped."""
    factor = jnp.float32(static.scale * LOG2_E if static.soft_cap is None else static.scale / static.soft_cap)
    return factor * refs.scales[head] if static.has_scales else factor


def softmax_step(static: Static, state: State, head, part, scores: jax.Array, visible) -> tuple[jax.Array, jax.Array]:
    """Weights of these keys under the maximum so far, and the factor for what was summed before (online softmax,
    arXiv 1805.02867)."""
    if static.soft_cap is not None:
        scores = jnp.tanh(scores) * jnp.float32(static.soft_cap * LOG2_E)
    if visible is not None:
        scores = jnp.where(visible, scores, jnp.float32(MASKED))
    top = state.top[head, part]
    new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
    p = jnp.exp2(scores - widen(new_top, scores.shape[1]))
    rescale = jnp.exp2(top - new_top)
    state.top[head, part] = new_top
    lanes = [p[:, i : i + LANES] for i in range(0, p.shape[1], LANES)]
    state.total[head, part] = state.total[head, part] * rescale + sum(lanes[1:], lanes[0])
    return p.astype(static.dtype), rescale


def start_softmax(static: Static, refs: Refs, state: State, part, period: int) -> None:
    """Nothing seen but the sinks. Row `r` of a KV head is of its query head `r // period`."""
    group, rows = static.shapes.group, state.q.shape[2]
    shape = (rows, LANES)
    row_head = div(jax.lax.broadcasted_iota(jnp.int32, shape, 0), period)
    for head in range(static.shapes.kv_heads):
        top, total = jnp.full(shape, NOTHING, jnp.float32), jnp.zeros(shape, jnp.float32)
        if static.has_sinks:
            total += jnp.float32(1 / LANES)
            for g in range(group):
                top = jnp.where(row_head == g, refs.sinks[head * group + g] * jnp.float32(LOG2_E), top)
        state.top[head, part], state.total[head, part] = top, total
        state.acc[head, part] = jnp.zeros((rows, state.acc.shape[3]), jnp.float32)


def finish_softmax(static: Static, refs: Refs, state: State, head: int, part, rows) -> jax.Array:
    """Attention of `rows` (a slice) of a KV head, float32 `[rows, head_dim]`."""
    total = jnp.sum(state.total[head, part, rows], axis=1, keepdims=True)
    scale = 1 / jnp.where(total > 0, total, 1)
    if static.has_scales:
        scale *= refs.scales[static.shapes.kv_heads + head]
    return state.acc[head, part, rows] * scale
