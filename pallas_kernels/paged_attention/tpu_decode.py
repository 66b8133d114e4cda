"""Decodes in the TPU kernel: sequences of one token, whose keys are read through a ring of tiles.

The token's own key and value are put into the tile that their block is in, and the rows around them written back.
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
from jaxllm.pallas_kernels.paged_attention.tpu_plan import DECODE_BUFFERS, LANES


class Decode(NamedTuple):
    """Buffers of the decode phase; `[DECODE_BUFFERS, ...]` are rings, of tiles or of sequences."""

    keys: Any  # [buffers, blocks, 2, kv_heads, block_size, head_dim]
    q: Any  # [buffers, rows, 128]
    new: Any  # [buffers, new_rows, 128]
    out: Any  # [buffers, rows, 128]
    written: Any  # [buffers, 2, kv_heads, unit, head_dim]: the rows with the new key, on their way to the pool
    heads: Any  # [2 * words or words, head_dim]: a token's heads as float32
    state: State
    tables: Tables
    key_sems: Any
    token_sems: Any
    out_sems: Any
    written_sems: Any


def decode_scratch(static: Static, refs: Refs) -> tuple:
    s, n, word = static.shapes, DECODE_BUFFERS, refs.q.dtype
    per_word = 4 // s.itemsize
    return (
        pltpu.VMEM((n, static.tiles.decode_keys // s.block_size, *refs.pool.shape[1:]), refs.pool.dtype),
        pltpu.VMEM((n, s.rows, LANES), word),
        pltpu.VMEM((n, s.new_rows, LANES), word),
        pltpu.VMEM((n, s.rows, LANES), word),
        pltpu.VMEM((n, 2, s.kv_heads, s.unit, s.head_dim), refs.pool.dtype),
        pltpu.VMEM((per_word * s.words, s.head_dim), jnp.float32),
        state_scratch(static, 1, s.decode_rows, jnp.float32),
        table_scratch(refs),
        *[DMA((n,)) for _ in range(4)],
    )


def run_decodes(static: Static, refs: Refs, num_seqs, *scratch):
    """Sequences `0 .. num_seqs`. Tiles of keys are numbered through all of them: while tile `t` is attended to, those
    up to `t + DECODE_BUFFERS - 1` are being read, of however many sequences."""
    *buffers, state, tables, key_sems, token_sems, out_sems, written_sems = scratch
    tables = Tables(refs, *tables, static.shapes.block_size)
    unit, width, new_width = static.shapes.unit, static.shapes.rows, static.shapes.new_rows
    d = Decode(*buffers, State(*state), tables, key_sems, token_sems, out_sems, written_sems)
    d.state.q[...] = jnp.zeros(d.state.q.shape, d.state.q.dtype)  # rows that pad the group stay so
    for seq in range(2):
        pl.when(seq < num_seqs)(lambda seq=seq: tables.copy(jnp.int32(seq)).start())

    def span(seq):
        """The tokens of a sequence, the first block of it that is read, and how many blocks and tiles are."""
        kv_len, first = refs.kv_lens[seq], jnp.int32(0)
        if static.sliding_window is not None:
            first = div(jnp.maximum(kv_len - static.sliding_window, 0), static.shapes.block_size)
        count = cdiv(kv_len, static.shapes.block_size) - first
        return kv_len, first, count, cdiv(count, d.keys.shape[1])

    def copies_of_token(seq):
        at, token = rem(seq, DECODE_BUFFERS), refs.cu_q_lens[seq]
        pairs = ((refs.q.at[token_rows(token, 1, width)], d.q), (refs.new.at[token_rows(token, 1, new_width)], d.new))
        return [pltpu.make_async_copy(src, dst.at[at], d.token_sems.at[at]) for src, dst in pairs]

    def copy_out(seq):
        at = rem(seq, DECODE_BUFFERS)
        dst = refs.out.at[token_rows(refs.cu_q_lens[seq], 1, width)]
        return pltpu.make_async_copy(d.out.at[at], dst, d.out_sems.at[at])

    def copy_written(seq):
        at, last = rem(seq, DECODE_BUFFERS), refs.kv_lens[seq] - 1
        row = pl.multiple_of(rem(last, static.shapes.block_size) // unit * unit, unit)
        block = tables.block(seq, div(last, static.shapes.block_size))
        dst = refs.pool.at[block, :, :, pl.ds(row, unit)]
        return pltpu.make_async_copy(d.written.at[at], dst, d.written_sems.at[at])

    def read_next(cursor):
        """Starts to read the tile at `cursor` (sequence, tile of it, buffer); a sequence's first brings its token."""
        seq, tile, buffer = cursor

        def read():
            @pl.when(tile == 0)
            def _():
                pl.when(seq + 2 < num_seqs)(lambda: tables.copy(seq + 2).start())
                for copy in copies_of_token(seq):
                    copy.start()
                tables.copy(seq).wait()

            _, first, count, tiles = span(seq)
            done = tile * d.keys.shape[1]
            blocks = jnp.minimum(count - done, d.keys.shape[1])
            tables.start_blocks(seq, first + done, blocks, d.keys.at[buffer], d.key_sems.at[buffer])
            ends = tile + 1 == tiles
            return jnp.where(ends, seq + 1, seq), jnp.where(ends, 0, tile + 1), rem(buffer + 1, DECODE_BUFFERS)

        return jax.lax.cond(seq < num_seqs, read, lambda: cursor)

    def decode(seq, carry):
        kv_len, first, count, tiles = span(seq)
        at = rem(seq, DECODE_BUFFERS)
        for copy in copies_of_token(seq):
            copy.wait()
        spread_token(static, refs, d, at)
        start_softmax(static, refs, d.state, 0, 1)

        def attend(tile, carry):
            buffer, cursor = carry
            cursor = read_next(cursor)
            done = tile * d.keys.shape[1]
            blocks = jnp.minimum(count - done, d.keys.shape[1])
            await_bytes(d.keys.at[buffer, pl.ds(0, blocks)], d.key_sems.at[buffer])

            @pl.when(tile + 1 == tiles)
            def _():
                pl.when(seq >= DECODE_BUFFERS)(lambda: await_bytes(d.written.at[at], d.written_sems.at[at]))
                block = div(kv_len - 1, static.shapes.block_size) - first - done
                insert_token(static, d, at, d.keys.at[buffer, block], rem(kv_len - 1, static.shapes.block_size))
                copy_written(seq).start()

            first_key = (first + done) * static.shapes.block_size
            rows = RowRefs(0, kv_len - 1, kv_len - 1, kv_len - 1, 1)
            attend_tile(static, d.state, d.keys.at[buffer], static.tiles.decode_edge, rows, first_key, kv_len)
            return rem(buffer + 1, DECODE_BUFFERS), cursor

        carry = jax.lax.fori_loop(0, tiles, attend, carry)
        pl.when(seq >= DECODE_BUFFERS)(lambda: await_bytes(d.out.at[at], d.out_sems.at[at]))
        gather_token(static, refs, d, at)
        copy_out(seq).start()
        return carry

    cursor = (jnp.int32(0), jnp.int32(0), jnp.int32(0))
    for _ in range(DECODE_BUFFERS - 1):
        cursor = read_next(cursor)
    jax.lax.fori_loop(0, num_seqs, decode, (jnp.int32(0), cursor))

    @pl.loop(jnp.maximum(num_seqs - DECODE_BUFFERS, 0), num_seqs)
    def _(seq):
        at = rem(seq, DECODE_BUFFERS)
        await_bytes(d.written.at[at], d.written_sems.at[at])
        await_bytes(d.out.at[at], d.out_sems.at[at])


def spread_token(static: Static, refs: Refs, d: Decode, at) -> None:
    """The query heads of the token in buffer `at`, to the rows of their KV heads."""
    s = static.shapes
    words = load_heads(d.q.at[at], 0, s.words, s.slices, s.slices)
    if s.itemsize == 4:
        d.heads[...] = words
    else:
        d.heads[: s.words], d.heads[s.words :] = unpack(words)
    for head in range(s.kv_heads):
        queries = d.heads[head * s.group : (head + 1) * s.group]
        d.state.q[head, 0, : s.group] = queries * query_factor(static, refs, head)


def new_heads(static: Static, d: Decode, at) -> tuple[jax.Array, jax.Array]:
    """New keys and new values of the token in buffer `at`, float32 `[kv_heads or more, head_dim]` each."""
    s = static.shapes
    words = load_heads(d.new.at[at], 0, s.new_words, s.slices, s.slices)
    return (words, words[s.kv_heads :]) if s.itemsize == 4 else unpack(words)


def insert_token(static: Static, d: Decode, at, block, row) -> None:
    """Puts the new key and value into row `row` of `block`, and the rows written with it into `written`."""
    s = static.shapes
    rows = pl.ds(pl.multiple_of(row // s.unit * s.unit, s.unit), s.unit)
    is_new = jax.lax.broadcasted_iota(jnp.int32, (s.unit, s.head_dim), 0) == rem(row, s.unit)
    for kind, new in enumerate(new_heads(static, d, at)):
        for head in range(s.kv_heads):
            old = block[kind, head, rows].astype(jnp.float32)
            new_row = jnp.broadcast_to(new[head : head + 1], old.shape)
            merged = jnp.where(is_new, new_row, old).astype(block.dtype)
            block[kind, head, rows] = merged
            d.written[at, kind, head] = merged


def gather_token(static: Static, refs: Refs, d: Decode, at) -> None:
    """The attention of all heads, as words of the result."""
    s = static.shapes
    for head in range(s.kv_heads):
        rows = finish_softmax(static, refs, d.state, head, 0, slice(None))
        d.heads[head * s.group : (head + 1) * s.group] = rows[: s.group]
    heads = d.heads[...]
    words = heads if s.itemsize == 4 else pack(heads[: s.words], heads[s.words :])
    store_heads(d.out.at[at], 0, s.slices, s.slices, words)
