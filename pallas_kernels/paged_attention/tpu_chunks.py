"""Chunks in the TPU kernel: sequences of any number of tokens, in passes over tiles of positions.

Where attention is causal, a pass starts to write its keys to the pool, attends to them, and then to the tiles of keys
before them, which the pool has: earlier passes' too, since a pass ends with its own blocks written. Where it is not,
or keys are taken in order, all passes' keys are written first, and then every pass attends to tiles from the pool
alone.
"""

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
from jaxllm.pallas_kernels.paged_attention.tpu_passes import Chunks, Pass, Passes
from jaxllm.pallas_kernels.paged_attention.tpu_plan import LANES


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
    passes = Passes(static, refs, c, end)
    block_size, tile_blocks, width = static.shapes.block_size, c.keys.shape[1], static.shapes.rows

    def for_token_copies(p: Pass, buffer, do):
        """`do(copy)` for what a pass needs first."""
        passes.for_queries(p, buffer, do)
        if not static.writes_first:
            passes.for_new_keys(p, buffer, do)

    def start_tile(p: Pass, tile, buffer):
        done = tile * tile_blocks
        blocks = jnp.minimum(p.count - done, tile_blocks)
        tables.start_blocks(p.seq, p.first + done, blocks, c.keys.at[buffer], c.key_sems.at[buffer])

    def await_out(buffer, tokens):
        pl.when(tokens > 0)(lambda: await_bytes(c.q.at[buffer, token_rows(0, tokens, width)], c.out_sems.at[buffer]))

    def run_pass(p: Pass, after: Pass, has_next, carry):
        buffer, key_buffer, pending = carry  # `pending`: tokens of the pass before, whose results are being written
        for_token_copies(p, buffer, lambda copy: copy.wait())
        parts = (div(p.begin - p.at, static.tiles.sub_queries), cdiv(p.end - p.at, static.tiles.sub_queries))
        if not static.writes_first:
            passes.insert_keys(p, buffer)
            passes.write_own(p, buffer)

        @pl.loop(*parts)
        def _(part):
            spread_queries(static, refs, c, buffer, part)
            start_softmax(static, refs, c.state, part, static.tiles.sub_queries)

        await_out(1 - buffer, pending)

        @pl.when(has_next)
        def _():
            pl.when(p.is_last)(lambda: passes.enter(after.seq))
            for_token_copies(after, 1 - buffer, lambda copy: copy.start())

        def attend(view, first_key, limit, own):
            @pl.loop(*parts)
            def _(part):
                period = static.tiles.sub_queries
                at = p.at + part * period
                rows = RowRefs(part, at, jnp.maximum(at, p.begin), jnp.minimum(at + period, p.end) - 1, period)
                attend_tile(static, c.state, view, static.tiles.edge, rows, first_key, limit, own)

        def start_next(key_buffer):
            """The next pass may read what this one wrote."""
            if not static.writes_first:
                passes.await_own(p, buffer)
            pl.when(has_next & (after.count > 0))(lambda: start_tile(after, jnp.int32(0), key_buffer))

        tiles = cdiv(p.count, tile_blocks)

        def attend_pool(tile, key_buffer):
            more = tile + 1 < tiles
            pl.when(more)(lambda: start_tile(p, tile + 1, 1 - key_buffer))
            pl.when(~more)(lambda: start_next(1 - key_buffer))
            blocks = jnp.minimum(p.count - tile * tile_blocks, tile_blocks)
            await_bytes(c.keys.at[key_buffer, pl.ds(0, blocks)], c.key_sems.at[key_buffer])
            first_key = (p.first + tile * tile_blocks) * block_size
            limit = p.at
            if static.writes_first:
                limit = jnp.minimum((p.first + p.count) * block_size, refs.kv_lens[p.seq])
            attend(c.keys.at[key_buffer], first_key, limit, own=False)
            return 1 - key_buffer

        if not static.writes_first:
            attend(c.own.at[buffer], p.at, p.end, own=True)
        key_buffer = jax.lax.fori_loop(0, tiles, attend_pool, key_buffer)
        pl.when(tiles == 0)(lambda: start_next(key_buffer))
        pl.loop(*parts)(lambda part: gather_results(static, refs, c, buffer, part))
        n = p.end - p.begin
        src, dst = c.q.at[buffer, token_rows(p.begin - p.at, n, width)], refs.out.at[token_rows(p.token, n, width)]
        pltpu.make_async_copy(src, dst, c.out_sems.at[buffer]).start()
        return 1 - buffer, key_buffer, n

    if static.writes_first:
        passes.write_all(begin)
    p = passes.start_first(begin)
    for_token_copies(p, 0, lambda copy: copy.start())
    pl.when(p.count > 0)(lambda: start_tile(p, jnp.int32(0), 0))
    carry = (jnp.int32(0), jnp.int32(0), jnp.int32(0))
    buffer, _, pending = passes.for_each(begin, run_pass, carry)
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
