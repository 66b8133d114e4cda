"""Kernel bodies of `gpu.py`, in Pallas-Triton: rows over splits of their keys, their combine, and tiles of chunks.

No kernel reads a cell of the pool that the step writes: a step's own keys are read from `k` and `v`, so programs need
no order among them. In-kernel shapes are powers of two, hence the masks on heads and head_dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxllm.pallas_kernels.paged_attention.batch import PagedBatch

LOG2_E = 1.4426950408889634
NEVER = 2**31 - 1


class Spec(NamedTuple):
    """What is static in a kernel. Softmaxes are in base 2, the logarithm's base folded into `scale`."""

    group: int  # query heads that share a KV head
    head_dim: int
    block_size: int
    scale: float
    causal: bool
    sliding_window: int | None
    soft_cap: float | None
    interpret: bool  # on a CPU, which has no inline assembly
    rows: int  # query rows of a program: a power of two, at least 16
    tile_kv: int  # keys read at a time
    splits: int = 1  # programs that share a row's keys
    min_split_tiles: int = 1  # fewer than these are not worth a split of their own
    local_keys: int = 16  # most tokens of the step that a row reads from k and v, by rows
    ragged_rows: bool = False  # rows are tokens of any sequence, not one token of each

    @property
    def padded_dim(self) -> int:
        return pl.next_power_of_2(self.head_dim)

    @property
    def padded_group(self) -> int:
        return pl.next_power_of_2(self.group)


class Row(NamedTuple):
    """One token: its sequence, the sequence's tokens in the step (first, past the last), the first one's position, the
    token's position."""

    seq: jax.Array
    first: jax.Array
    past: jax.Array
    start: jax.Array
    position: jax.Array


def iota(size: int) -> jax.Array:
    return jnp.arange(size, dtype=jnp.int32)


def count(batch: PagedBatch, bound: jax.Array, *, ends: bool) -> jax.Array:
    """How many real sequences end (or begin) at or before token `bound`; the batch is of references here."""
    seqs = batch.kv_lens.shape[0]
    index = iota(pl.next_power_of_2(seqs))
    real = index < batch.distribution[1]
    at = plt.load(batch.cu_q_lens.at[jnp.minimum(index, seqs - 1) + int(ends)], mask=real, other=NEVER)
    return jnp.sum((at <= bound).astype(jnp.int32))


def cdiv(a: jax.Array, b: int) -> jax.Array:
    """Of numbers that are not negative."""
    return jax.lax.div(a + (b - 1), b)


def num_rows(spec: Spec, batch: PagedBatch) -> jax.Array:
    if spec.ragged_rows:
        return batch.cu_q_lens[batch.distribution[1]]
    return batch.distribution[0]


def find_row(spec: Spec, batch: PagedBatch, row: jax.Array) -> Row:
    seq = count(batch, row, ends=True) if spec.ragged_rows else row
    first, past = batch.cu_q_lens[seq], batch.cu_q_lens[seq + 1]
    start = batch.kv_lens[seq] - (past - first)
    return Row(seq, first, past, start, start + row - first)


def splits_of(spec: Spec, row: Row) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Tiles of the row's cached keys (first, past the last), tiles a split, and splits that have work: at least 1."""
    begin, end = jnp.int32(0), cdiv(row.start, spec.tile_kv)
    if spec.sliding_window is not None:
        begin = jnp.minimum(jax.lax.div(jnp.maximum(row.position - (spec.sliding_window - 1), 0), spec.tile_kv), end)
    per_split = jnp.maximum(cdiv(end - begin, spec.splits), spec.min_split_tiles)
    return begin, end, per_split, jnp.maximum(jax.lax.div(end - begin + per_split - 1, per_split), 1)


def load_cells(spec, ref, token, head, dim, mask, last=()):
    """`ref[token, head, *last, dim]` as [n, padded head_dim], zero where masked; indices are scalars or [n]."""
    index = tuple(i if jnp.ndim(i) == 0 else i[:, None] for i in (token, head, *last))
    return plt.load(ref.at[(*index, dim[None, :])], **masks(spec, dim, mask, ref.dtype))


def store_cells(spec, ref, index, dim, values, mask):
    """`values` [n, padded head_dim] to `ref[*index]`, each index a scalar or [n]."""
    index = tuple(i if jnp.ndim(i) == 0 else i[:, None] for i in index)
    inside = masks(spec, dim, mask, ref.dtype)["mask"]
    plt.store(ref.at[(*index, dim[None, :])], values.astype(ref.dtype), mask=inside)


def masks(spec, dim, mask, dtype):
    """Arguments of a load of [n, padded head_dim]: nothing where nothing is masked."""
    mask = None if mask is None else mask[:, None]
    if spec.head_dim != spec.padded_dim:
        inside = (dim < spec.head_dim)[None, :]
        mask = inside if mask is None else mask & inside
    return {} if mask is None else {"mask": mask, "other": zero(dtype)}


def zero(dtype):
    """Of the kind of `dtype`: the compiler knows no cast from integers to float8."""
    return 0.0 if jnp.issubdtype(dtype, jnp.floating) else 0


def load_cached(spec, batch, pool, seq, head, key, dim, mask):
    """Keys and values [keys, padded head_dim] at positions `key`, zero where masked: what lies past a sequence's end
    may be NaN."""
    column = jax.lax.div(key, spec.block_size)
    block = plt.load(batch.block_tables.at[seq, column], mask=mask, other=None if mask is None else 0)[:, None]
    cell = jax.lax.rem(key, spec.block_size)[:, None]
    kinds, given = (jnp.full_like(block, i) for i in range(2)), masks(spec, dim, mask, pool.dtype)
    return [plt.load(pool.at[block, kind, head, cell, dim[None, :]], **given) for kind in kinds]


def dot(a, b, contract: int):
    """float32 products: bfloat16 as they are, float32 in full precision."""
    dims = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def softmax_start(rows: int, dim: int):
    """Maximum, normaliser and accumulator of an online softmax over nothing."""
    zeros = jnp.zeros((rows,), jnp.float32)
    return jnp.full((rows,), -jnp.inf, jnp.float32), zeros, jnp.zeros((rows, dim), jnp.float32)


def exp2(spec, x, factor=1.0, shift=0.0):
    """2 ** (x * factor + shift) in two instructions: the compiler fuses no multiply with an add, and the library's
    exp2 spends three more on results below 2**-126, which are 0 here."""
    if spec.interpret:
        return jnp.exp2(x * factor + shift)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    asm = "{ .reg .f32 t; fma.rn.ftz.f32 t, $1, $2, $3; ex2.approx.ftz.f32 $0, t; }"
    args = [x, *(jnp.broadcast_to(jnp.asarray(a, x.dtype), x.shape) for a in (factor, shift))]
    return plt.elementwise_inline_asm(asm, args=args, constraints="=f,f,f,f", pack=1, result_shape_dtypes=[like])[0]


def online_softmax(spec, carry, q, keys, values, score_scale, visible=None):
    """One tile of the online softmax. Without `visible` all is; a row that saw nothing keeps its maximum at -inf."""
    top, total, acc = carry
    scores, factor = dot(q, keys.astype(q.dtype), 1), score_scale * LOG2_E
    if spec.soft_cap is not None:  # tanh(x) is 1 - 2 / (1 + e^2x), which cannot overflow
        power = exp2(spec, scores, score_scale * (2 * LOG2_E / spec.soft_cap))
        scores, factor = 1.0 - 2.0 / (1.0 + power), spec.soft_cap * LOG2_E
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1) * factor)
    base = new_top if visible is None else jnp.where(new_top == -jnp.inf, 0.0, new_top)
    p = exp2(spec, scores, factor, -base[:, None])
    rescale = exp2(spec, top - base)
    acc = acc * rescale[:, None] + dot(p.astype(q.dtype), values.astype(q.dtype), 0)
    return new_top, total * rescale + jnp.sum(p, axis=1), acc


def in_window(spec, visible, position, key):
    """What a row sees of earlier keys."""
    return visible if spec.sliding_window is None else visible & (position - key < spec.sliding_window)


def sees_new(spec, age, inside):
    """What rows see of the step's own keys, so many positions before them; `inside` are keys of their sequence."""
    visible = in_window(spec, age >= 0 if spec.causal else inside, age, 0)
    if spec.causal or spec.sliding_window is None:
        return visible
    return visible & (-age < spec.sliding_window)


def attend_rows(spec: Spec, batch: PagedBatch, q_ref, k_ref, v_ref, pool_ref, scales_ref, acc_ref, weight_ref):
    """Grid (KV head, split, row): the row's attention to one split of its keys, normalised, and log2 of its weight.

    Writes acc [rows, heads, splits, head_dim] and weight [rows, heads, splits], both float32.
    """
    head, split, index = pl.program_id(0), pl.program_id(1), pl.program_id(2)

    @pl.when(index < num_rows(spec, batch))
    def _():
        row = find_row(spec, batch, index)
        begin, end, per_split, live = splits_of(spec, row)

        @pl.when(split < live)
        def _():
            group, dim = iota(spec.rows), iota(spec.padded_dim)
            real, q_head = group < spec.group, head * spec.group + group
            q = load_cells(spec, q_ref, index, q_head, dim, real)
            score_scale = spec.scale if scales_ref is None else spec.scale * scales_ref[0, head]

            def attend_cached(i, carry):
                key = i * spec.tile_kv + iota(spec.tile_kv)
                mask = key < row.start
                keys, values = load_cached(spec, batch, pool_ref, row.seq, head, key, dim, mask)
                visible = in_window(spec, mask, row.position, key)[None, :]
                return online_softmax(spec, carry, q, keys, values, score_scale, visible)

            token = row.first + iota(spec.local_keys)  # the last split takes the step's own tokens too
            mask = sees_new(spec, index - token, token < row.past) & (split == live - 1)
            keys, values = (load_cells(spec, ref, token, head, dim, mask) for ref in (k_ref, v_ref))
            carry = softmax_start(spec.rows, spec.padded_dim)
            carry = online_softmax(spec, carry, q, keys, values, score_scale, mask[None, :])
            first = begin + split * per_split
            carry = jax.lax.fori_loop(first, jnp.minimum(first + per_split, end), attend_cached, carry)

            top, total, acc = carry
            safe = jnp.where(total > 0, total, 1.0)
            store_cells(spec, acc_ref, (index, q_head, split), dim, acc / safe[:, None], real)
            plt.store(weight_ref.at[index, q_head, split], top + jnp.log2(safe), mask=real)


def combine(
    spec: Spec,
    batch: PagedBatch,
    acc_ref,
    weight_ref,
    k_ref,
    v_ref,
    pool_ref,
    scales_ref,
    sinks_ref,
    out_ref,
    out_pool_ref,
):
    """Grid (head, row): the row's attention from that of its splits; its K and V into the pool."""
    del pool_ref  # the same memory as out_pool_ref
    head, index = pl.program_id(0), pl.program_id(1)
    kv_head = jax.lax.div(head, spec.group)

    @pl.when(index < num_rows(spec, batch))
    def _():
        row = find_row(spec, batch, index)
        *_, live = splits_of(spec, row)
        split, dim = iota(pl.next_power_of_2(spec.splits)), iota(spec.padded_dim)
        weight = plt.load(weight_ref.at[index, head, split], mask=split < live, other=-jnp.inf)
        acc = load_cells(spec, acc_ref, index, head, dim, split < live, (split,))
        top = jnp.max(weight)
        if sinks_ref is not None:
            sink = sinks_ref[head].astype(jnp.float32) * LOG2_E
            top = jnp.maximum(top, sink)
        share = jnp.exp2(weight - top)
        total = jnp.sum(share)
        if sinks_ref is not None:
            total = total + jnp.exp2(sink - top)
        out = jnp.sum(acc * share[:, None], axis=0) / total
        if scales_ref is not None:
            out = out * scales_ref[1, kv_head]
        inside = dim < spec.head_dim
        plt.store(out_ref.at[index, head, dim], out.astype(out_ref.dtype), mask=inside)

        @pl.when(head == kv_head * spec.group)
        def _():
            block = batch.block_tables[row.seq, jax.lax.div(row.position, spec.block_size)]
            cell = jax.lax.rem(row.position, spec.block_size)
            for i, ref in enumerate((k_ref, v_ref)):
                x = plt.load(ref.at[index, kv_head, dim], mask=inside, other=zero(ref.dtype))
                plt.store(out_pool_ref.at[block, jnp.full_like(block, i), kv_head, cell, dim], x, mask=inside)


def attend_tiles(
    spec: Spec,
    batch: PagedBatch,
    q_ref,
    k_ref,
    v_ref,
    pool_ref,
    scales_ref,
    sinks_ref,
    rows_out_ref,
    out_ref,
    out_pool_ref,
):
    """Grid (tile, KV head): attention of all tokens of a tile that are no rows, and their K and V into the pool.

    Tiles are of the flat tokens, the last first as causal attention has most to do there. A tile may hold tokens of
    several sequences: it takes them one by one, each with the rows of the others masked.
    """
    del rows_out_ref  # the same memory as out_ref
    tile_q = spec.rows // spec.padded_group
    head, begin = pl.program_id(1), (pl.num_programs(0) - 1 - pl.program_id(0)) * tile_q
    end = jnp.minimum(begin + tile_q, batch.cu_q_lens[batch.distribution[1]])
    first_seq = jnp.maximum(count(batch, begin, ends=True), batch.distribution[0])
    end_seq = count(batch, end - 1, ends=False)

    @pl.when(first_seq < end_seq)
    def _():
        dim, row = iota(spec.padded_dim), iota(spec.rows)
        token, group = begin + jax.lax.div(row, spec.padded_group), jax.lax.rem(row, spec.padded_group)
        real, q_head = (token < end) & (group < spec.group), head * spec.group + group
        q = load_cells(spec, q_ref, token, q_head, dim, real)
        score_scale = spec.scale if scales_ref is None else spec.scale * scales_ref[0, head]

        def attend_seq(seq, _):
            first, past = batch.cu_q_lens[seq], batch.cu_q_lens[seq + 1]
            start = batch.kv_lens[seq] - (past - first)
            low, high = jnp.maximum(begin, first), jnp.minimum(end, past)  # its tokens in the tile
            write_cells(spec, batch, (k_ref, v_ref), out_pool_ref, seq, head, begin, start - first, (low, high))
            position = start + token - first
            chunk = Tile(spec, position, start + low - first, start + high - 1 - first)
            seen = (high if spec.causal else past) - first  # of the step's own keys

            def attend_cached(i, carry, masked):
                key = i * spec.tile_kv + iota(spec.tile_kv)
                mask = key < start if masked else None
                keys, values = load_cached(spec, batch, pool_ref, seq, head, key, dim, mask)
                visible = in_window(spec, mask[None, :], position[:, None], key[None, :]) if masked else None
                return online_softmax(spec, carry, q, keys, values, score_scale, visible)

            def attend_new(i, carry, masked):
                key = i * spec.tile_kv + iota(spec.tile_kv)  # counted from `start`, as are `token - first`
                mask = key < seen if masked else None
                keys, values = (load_cells(spec, ref, first + key, head, dim, mask) for ref in (k_ref, v_ref))
                age = (token - first)[:, None] - key[None, :]
                visible = sees_new(spec, age, mask[None, :]) if masked else None
                return online_softmax(spec, carry, q, keys, values, score_scale, visible)

            carry = softmax_start(spec.rows, spec.padded_dim)
            carry = chunk.attend(0, start, start, attend_cached, carry)
            carry = chunk.attend(start, low - first + 1 if spec.causal else seen, seen, attend_new, carry)
            top, total, acc = carry
            if sinks_ref is not None:
                sink = plt.load(sinks_ref.at[q_head], mask=group < spec.group, other=0).astype(jnp.float32) * LOG2_E
                total = total + jnp.exp2(sink - top)
            out = acc / total[:, None]
            if scales_ref is not None:
                out = out * scales_ref[1, head]
            store_cells(spec, out_ref, (token, q_head), dim, out, real & (token >= low) & (token < high))
            return _

        jax.lax.fori_loop(first_seq, end_seq, attend_seq, 0)


class Tile(NamedTuple):
    """Rows of a tile that are of one sequence, whose positions go from `lowest` to `highest`."""

    spec: Spec
    position: jax.Array
    lowest: jax.Array
    highest: jax.Array

    def attend(self, origin, seen_by_all, seen, attend, carry):
        """Online softmax over keys from position `origin`: but for the window the first `seen_by_all` of them are seen
        by every row, the first `seen` by some. First the tiles that need no mask, then those at either end."""
        size, window = self.spec.tile_kv, self.spec.sliding_window
        if window is not None and not self.spec.causal:
            seen_by_all = jnp.clip(self.lowest + window - origin, 0, seen_by_all)
            seen = jnp.minimum(self.highest + window - origin, seen)
        full_end, end = jax.lax.div(seen_by_all, size), cdiv(seen, size)
        begin = full_begin = jnp.int32(0)
        if window is not None:
            begin = jax.lax.div(jnp.maximum(self.lowest - (window - 1) - origin, 0), size)
            full_begin = cdiv(jnp.maximum(self.highest - (window - 1) - origin, 0), size)
            begin, full_begin = jnp.minimum(begin, full_end), jnp.minimum(full_begin, full_end)
        carry = jax.lax.fori_loop(full_begin, full_end, lambda i, c: attend(i, c, masked=False), carry)
        leading = full_begin - begin

        def attend_end(i, carry):
            return attend(jnp.where(i < leading, begin + i, full_end + i - leading), carry, masked=True)

        return jax.lax.fori_loop(0, leading + end - full_end, attend_end, carry)


def write_cells(spec, batch, sources, pool_ref, seq, head, begin, offset, tokens):
    """K and V of those of `tokens` (first, past the last) in the tile at `begin` into their sequence's blocks; a
    token's position is `offset` more."""
    token, dim = begin + iota(spec.rows // spec.padded_group), iota(spec.padded_dim)
    mask = (token >= tokens[0]) & (token < tokens[1])
    position = token + offset
    block = plt.load(batch.block_tables.at[seq, jax.lax.div(position, spec.block_size)], mask=mask, other=0)
    cell = jax.lax.rem(position, spec.block_size)
    for i, ref in enumerate(sources):
        x = load_cells(spec, ref, token, head, dim, mask)
        store_cells(spec, pool_ref, (block, jnp.full_like(block, i), head, cell), dim, x, mask)
