"""Chunks in the TPU kernel: sequences of any number of tokens, in passes over tiles of positions.

A pass covers positions that begin with a block. It puts the step's keys among them, head by head, into blocks in
VMEM, starts to write these to the pool, attends to them, and then to the tiles of keys before them, which the pool
has: earlier passes' too, since a pass ends with its own blocks written.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm.pallas_kernels.paged_attention.tpu_attend import (
    Refs,
    RowRefs,
    State,
    Static,
    attend_tile,
    cdiv,
    div,
    finish_softmax,
    pack,
    query_factor,
    rem,
    start_softmax,
    unpack,
)
from jaxllm.pallas_kernels.paged_attention.tpu_blocks import (
    DMA,
    Tables,
    await_bytes,
    load_heads,
    state_scratch,
    store_heads,
    table_scratch,
    token_rows,
)
from jaxllm.pallas_kernels.paged_attention.tpu_plan import LANES


class Chunks(NamedTuple):
    """Buffers of the phase; the leading 2 alternates between passes, or between tiles of keys."""

    keys: Any  # [2, blocks, 2, kv_heads, block_size, head_dim]: keys from the pool
    own: Any  # [2, blocks, 2, kv_heads, block_size, head_dim]: keys of the pass's positions
    q: Any  # [2, positions * rows, 128]: queries, and in the end what comes out
    new: Any  # [2, positions * new_rows, 128]
    state: State
    tables: Tables
    key_sems: Any
    token_sems: Any
    out_sems: Any
    own_sems: Any


class Pass(NamedTuple):
    """Positions `at .. at + queries` of a sequence, of which `begin .. end` are tokens of the step."""

    seq: Any
    at: Any
    begin: Any
    end: Any
    token: Any  # flat index of the first token
    first: Any  # first block of earlier keys that is read
    count: Any  # blocks of earlier keys
    is_last: Any  # of its sequence


def chunk_scratch(static: Static, refs: Refs) -> tuple:
    s, t, word, pool = static.shapes, static.tiles, refs.q.dtype, refs.pool
    return (
        pltpu.VMEM((2, t.keys // s.block_size, *pool.shape[1:]), pool.dtype),
        pltpu.VMEM((2, t.queries // s.block_size, *pool.shape[1:]), pool.dtype),
        pltpu.VMEM((2, t.queries * s.rows, LANES), word),
        pltpu.VMEM((2, t.queries * s.new_rows, LANES), word),
        state_scratch(static, t.queries // t.sub_queries, s.group * t.sub_queries, static.dtype),
        table_scratch(refs),
        *[DMA((2,)) for _ in range(4)],
    )


def run_chunks(static: Static, refs: Refs, begin, end, *scratch):
    """Sequences `begin .. end`."""
    *buffers, state, tables, key_sems, token_sems, out_sems, own_sems = scratch
    tables = Tables(refs, *tables, static.shapes.block_size)
    c = Chunks(*buffers, State(*state), tables, key_sems, token_sems, out_sems, own_sems)
    block_size, tile_blocks = static.shapes.block_size, c.keys.shape[1]
    width, new_width = static.shapes.rows, static.shapes.new_rows

    def first_position(seq):
        start = refs.kv_lens[seq] - refs.cu_q_lens[seq + 1] + refs.cu_q_lens[seq]
        return start, div(start, block_size) * block_size

    def pass_of(seq, i) -> Pass:
        start, aligned = first_position(seq)
        kv_len, at = refs.kv_lens[seq], aligned + i * static.tiles.queries
        first_token = jnp.maximum(at, start)
        first = jnp.int32(0)
        if static.sliding_window is not None:
            first = div(jnp.maximum(first_token - static.sliding_window + 1, 0), block_size)
        return Pass(
            seq,
            at,
            first_token,
            jnp.minimum(at + static.tiles.queries, kv_len),
            refs.cu_q_lens[seq] + first_token - start,
            first,
            jnp.maximum(div(at, block_size) - first, 0),
            at + static.tiles.queries >= kv_len,
        )

    def for_token_copies(p: Pass, buffer, do):
        """`do(copy)` for what a pass needs first: its queries, keys and values, and the blocks it writes in part."""
        n, row = p.end - p.begin, p.begin - p.at
        for src, dst, rows in ((refs.q, c.q, width), (refs.new, c.new, new_width)):
            src, dst = src.at[token_rows(p.token, n, rows)], dst.at[buffer, token_rows(row, n, rows)]
            do(pltpu.make_async_copy(src, dst, c.token_sems.at[buffer]))
        last = div(p.end - 1 - p.at, block_size)
        starts_inside = row > 0
        ends_inside = (rem(p.end, block_size) > 0) & ~(starts_inside & (last == 0))
        for block, needed in ((jnp.int32(0), starts_inside), (last, ends_inside)):

            @pl.when(needed)
            def _(block=block):
                src = refs.pool.at[tables.block(p.seq, div(p.at, block_size) + block)]
                do(pltpu.make_async_copy(src, c.own.at[buffer, block], c.token_sems.at[buffer]))

    def start_pass(p: Pass, buffer):
        for_token_copies(p, buffer, lambda copy: copy.start())

    def start_tile(p: Pass, tile, buffer):
        done = tile * tile_blocks
        blocks = jnp.minimum(p.count - done, tile_blocks)
        tables.start_blocks(p.seq, p.first + done, blocks, c.keys.at[buffer], c.key_sems.at[buffer])

    def write_own(p: Pass, buffer):
        @pl.loop(0, cdiv(p.end - p.at, block_size))
        def _(i):
            dst = refs.pool.at[tables.block(p.seq, div(p.at, block_size) + i)]
            pltpu.make_async_copy(c.own.at[buffer, i], dst, c.own_sems.at[buffer]).start()

    def await_own(p: Pass, buffer):
        written = c.own.at[buffer, pl.ds(0, cdiv(p.end - p.at, block_size))]
        await_bytes(written, c.own_sems.at[buffer])

    def await_out(buffer, tokens):
        pl.when(tokens > 0)(lambda: await_bytes(c.q.at[buffer, token_rows(0, tokens, width)], c.out_sems.at[buffer]))

    def enter(seq):
        """The first pass of a sequence comes next: its table is needed, and soon those of the two after it."""
        pl.when(seq + 2 < end)(lambda: tables.copy(seq + 2).start())
        tables.copy(seq).wait()

    def run_pass(seq, i, carry):
        buffer, key_buffer, pending = carry  # `pending`: tokens of the pass before, whose results are being written
        p = pass_of(seq, i)
        has_next = ~p.is_last | (seq + 1 < end)
        # Where there is none, any pass does.
        after = pass_of(jnp.where(p.is_last & has_next, seq + 1, seq), jnp.where(p.is_last, 0, i + 1))
        for_token_copies(p, buffer, lambda copy: copy.wait())
        parts = (div(p.begin - p.at, static.tiles.sub_queries), cdiv(p.end - p.at, static.tiles.sub_queries))
        insert_keys(static, c, p, buffer)
        write_own(p, buffer)

        @pl.loop(*parts)
        def _(part):
            spread_queries(static, refs, c, buffer, part)
            start_softmax(static, refs, c.state, part, static.tiles.sub_queries)

        await_out(1 - buffer, pending)

        @pl.when(has_next)
        def _():
            pl.when(p.is_last)(lambda: enter(after.seq))
            start_pass(after, 1 - buffer)

        def attend(view, first_key, limit, own):
            @pl.loop(*parts)
            def _(part):
                at = p.at + part * static.tiles.sub_queries
                rows = RowRefs(
                    part, at, jnp.minimum(at + static.tiles.sub_queries, p.end) - 1, static.tiles.sub_queries
                )
                attend_tile(static, c.state, view, static.tiles.edge, rows, first_key, limit, own)

        def start_next(key_buffer):
            """The next pass may read what this one wrote."""
            await_own(p, buffer)
            pl.when(has_next & (after.count > 0))(lambda: start_tile(after, jnp.int32(0), key_buffer))

        tiles = cdiv(p.count, tile_blocks)

        def attend_earlier(tile, key_buffer):
            more = tile + 1 < tiles
            pl.when(more)(lambda: start_tile(p, tile + 1, 1 - key_buffer))
            pl.when(~more)(lambda: start_next(1 - key_buffer))
            blocks = jnp.minimum(p.count - tile * tile_blocks, tile_blocks)
            await_bytes(c.keys.at[key_buffer, pl.ds(0, blocks)], c.key_sems.at[key_buffer])
            first_key = (p.first + tile * tile_blocks) * block_size
            attend(c.keys.at[key_buffer], first_key, p.at, own=False)
            return 1 - key_buffer

        attend(c.own.at[buffer], p.at, p.end, own=True)
        key_buffer = jax.lax.fori_loop(0, tiles, attend_earlier, key_buffer)
        pl.when(tiles == 0)(lambda: start_next(key_buffer))
        pl.loop(*parts)(lambda part: gather_results(static, refs, c, buffer, part))
        n = p.end - p.begin
        src, dst = c.q.at[buffer, token_rows(p.begin - p.at, n, width)], refs.out.at[token_rows(p.token, n, width)]
        pltpu.make_async_copy(src, dst, c.out_sems.at[buffer]).start()
        return 1 - buffer, key_buffer, n

    def run_sequence(seq, carry):
        _, aligned = first_position(seq)
        passes = cdiv(refs.kv_lens[seq] - aligned, static.tiles.queries)
        return jax.lax.fori_loop(0, passes, lambda i, carry: run_pass(seq, i, carry), carry)

    for seq in (begin, begin + 1):
        pl.when(seq < end)(lambda seq=seq: tables.copy(seq).start())
    enter(begin)
    p = pass_of(begin, 0)
    start_pass(p, 0)
    pl.when(p.count > 0)(lambda: start_tile(p, jnp.int32(0), 0))
    buffer, _, pending = jax.lax.fori_loop(begin, end, run_sequence, (jnp.int32(0), jnp.int32(0), jnp.int32(0)))
    await_out(1 - buffer, pending)


def spread_queries(static: Static, refs: Refs, c: Chunks, buffer, part) -> None:
    """Queries of a part, token by token, to the rows of their KV heads: those of one query head after another."""
    s, n = static.shapes, static.tiles.sub_queries
    for word in range(min(s.words, s.heads)):
        x = load_heads(c.q.at[buffer], part * n * s.rows + word * s.slices, n, s.rows, s.slices)
        both = [x] if s.itemsize == 4 else unpack(x)
        for head, rows in zip(range(word, s.heads, s.words), both, strict=False):
            of_group = head % s.group
            rows = rows * query_factor(static, refs, head // s.group)
            c.state.q[head // s.group, part, of_group * n : (of_group + 1) * n] = rows.astype(static.dtype)


def gather_results(static: Static, refs: Refs, c: Chunks, buffer, part) -> None:
    """What `spread_queries` does, backwards, of the results, to where the queries were."""
    s, n = static.shapes, static.tiles.sub_queries
    for word in range(min(s.words, s.heads)):
        both = []
        for head in range(word, s.heads, s.words):
            rows = slice(head % s.group * n, (head % s.group + 1) * n)
            both.append(finish_softmax(static, refs, c.state, head // s.group, part, rows))
        x = both[0] if s.itemsize == 4 else pack(both[0], both[-1])
        store_heads(c.q.at[buffer], part * n * s.rows + word * s.slices, s.rows, s.slices, x)


def insert_keys(static: Static, c: Chunks, p: Pass, buffer) -> None:
    """The new keys and values of a pass, token by token, into its blocks, head by head."""
    s, block_size = static.shapes, static.shapes.block_size

    def load(block, word):
        first = block * block_size * s.new_rows + word * s.slices
        return load_heads(c.new.at[buffer], first, block_size, s.new_rows, s.slices)

    @pl.loop(0, cdiv(p.end - p.at, block_size))
    def _(block):
        at = p.at + block * block_size
        whole = (p.begin <= at) & (at + block_size <= p.end)
        position = at + jax.lax.broadcasted_iota(jnp.int32, (block_size, s.head_dim), 0)
        is_new = (position >= p.begin) & (position < p.end)

        def put(merge):
            for head in range(s.kv_heads):
                x = load(block, head)
                both = (x, load(block, s.kv_heads + head)) if s.itemsize == 4 else unpack(x)
                for kind, new in enumerate(both):
                    at = (buffer, block, kind, head)
                    c.own[at] = merge(new, at).astype(c.own.dtype)

        pl.when(whole)(lambda: put(lambda new, at: new))
        pl.when(~whole)(lambda: put(lambda new, at: jnp.where(is_new, new, c.own[at].astype(jnp.float32))))
