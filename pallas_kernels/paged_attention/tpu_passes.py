"""Passes over the positions of chunks in the TPU kernel: which tokens each has, its transfers, and how the step's keys
come into the blocks of the pool.

A pass covers positions that begin with a block. It puts the step's keys among them, head by head, into blocks in
VMEM, and writes these to the pool.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm.pallas_kernels.paged_attention.tpu_attend import Refs, State, Static, cdiv, div, rem, unpack
from jaxllm.pallas_kernels.paged_attention.tpu_blocks import Tables, await_bytes, load_heads, token_rows


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
    first: Any  # first block that is read from the pool to attend to it
    count: Any  # blocks that are: those before `at`, or all that are seen if the step's are written first
    is_last: Any  # of its sequence


class Passes(NamedTuple):
    """Those of sequences `.. end`, one after the other."""

    static: Static
    refs: Refs
    c: Chunks
    end: Any

    def first_position(self, seq):
        """Of the step's tokens, and that where their block begins."""
        start = self.refs.kv_lens[seq] - self.refs.cu_q_lens[seq + 1] + self.refs.cu_q_lens[seq]
        return start, div(start, self.static.shapes.block_size) * self.static.shapes.block_size

    def for_each(self, begin, body: Callable, carry):
        """`body(pass, the next one, whether there is one, carry)` for all passes of the sequences from `begin` on."""

        def run(seq, i, carry):
            p = self.of(seq, i)
            has_next = ~p.is_last | (seq + 1 < self.end)
            # Where there is none, any pass does.
            after = self.of(jnp.where(p.is_last & has_next, seq + 1, seq), jnp.where(p.is_last, 0, i + 1))
            return body(p, after, has_next, carry)

        def run_sequence(seq, carry):
            _, aligned = self.first_position(seq)
            passes = cdiv(self.refs.kv_lens[seq] - aligned, self.static.tiles.queries)
            return jax.lax.fori_loop(0, passes, lambda i, carry: run(seq, i, carry), carry)

        return jax.lax.fori_loop(begin, self.end, run_sequence, carry)

    def of(self, seq, i) -> Pass:
        """Pass `i` of a sequence."""
        static, block_size = self.static, self.static.shapes.block_size
        start, aligned = self.first_position(seq)
        kv_len, at = self.refs.kv_lens[seq], aligned + i * static.tiles.queries
        first_token, end = jnp.maximum(at, start), jnp.minimum(at + static.tiles.queries, kv_len)
        first, read_end = jnp.int32(0), div(at, block_size)
        if static.sliding_window is not None:
            start_of_window = jnp.maximum(first_token - static.sliding_window + 1, 0)
            together = static.tiles.keys // block_size if static.in_order else 1  # whole tiles, from position 0 on
            first = div(start_of_window, together * block_size) * together
        if static.writes_first:
            seen = end if static.causal else kv_len
            if not static.causal and static.sliding_window is not None:
                seen = jnp.minimum(end + static.sliding_window - 1, kv_len)
            read_end = cdiv(seen, block_size)
        return Pass(
            seq,
            at,
            first_token,
            end,
            self.refs.cu_q_lens[seq] + first_token - start,
            first,
            jnp.maximum(read_end - first, 0),
            at + static.tiles.queries >= kv_len,
        )

    def start_first(self, begin) -> Pass:
        """The pass that is first; the block tables of its sequence, and of the next, are on their way then."""
        for seq in (begin, begin + 1):
            pl.when(seq < self.end)(lambda seq=seq: self.c.tables.copy(seq).start())
        self.enter(begin)
        return self.of(begin, 0)

    def enter(self, seq) -> None:
        """The first pass of a sequence comes next: its table is needed, and soon those of the two after it."""
        pl.when(seq + 2 < self.end)(lambda: self.c.tables.copy(seq + 2).start())
        self.c.tables.copy(seq).wait()

    def for_queries(self, p: Pass, buffer, do: Callable) -> None:
        """`do(copy)` for a pass's queries."""
        width = self.static.shapes.rows
        n, row = p.end - p.begin, p.begin - p.at
        src, dst = self.refs.q.at[token_rows(p.token, n, width)], self.c.q.at[buffer, token_rows(row, n, width)]
        do(pltpu.make_async_copy(src, dst, self.c.token_sems.at[buffer]))

    def for_new_keys(self, p: Pass, buffer, do: Callable) -> None:
        """`do(copy)` for a pass's keys and values, and the blocks that it writes in part."""
        c, block_size, width = self.c, self.static.shapes.block_size, self.static.shapes.new_rows
        n, row = p.end - p.begin, p.begin - p.at
        src, dst = self.refs.new.at[token_rows(p.token, n, width)], c.new.at[buffer, token_rows(row, n, width)]
        do(pltpu.make_async_copy(src, dst, c.token_sems.at[buffer]))
        last = div(p.end - 1 - p.at, block_size)
        starts_inside = row > 0
        ends_inside = (rem(p.end, block_size) > 0) & ~(starts_inside & (last == 0))
        for block, needed in ((jnp.int32(0), starts_inside), (last, ends_inside)):

            @pl.when(needed)
            def _(block=block):
                src = self.refs.pool.at[c.tables.block(p.seq, div(p.at, block_size) + block)]
                do(pltpu.make_async_copy(src, c.own.at[buffer, block], c.token_sems.at[buffer]))

    def write_own(self, p: Pass, buffer) -> None:
        """Starts to write the pass's blocks to the pool."""
        block_size = self.static.shapes.block_size

        @pl.loop(0, cdiv(p.end - p.at, block_size))
        def _(i):
            dst = self.refs.pool.at[self.c.tables.block(p.seq, div(p.at, block_size) + i)]
            pltpu.make_async_copy(self.c.own.at[buffer, i], dst, self.c.own_sems.at[buffer]).start()

    def await_own(self, p: Pass, buffer) -> None:
        written = self.c.own.at[buffer, pl.ds(0, cdiv(p.end - p.at, self.static.shapes.block_size))]
        await_bytes(written, self.c.own_sems.at[buffer])

    def insert_keys(self, p: Pass, buffer) -> None:
        """The new keys and values of a pass, token by token, into its blocks, head by head."""
        s, block_size, c = self.static.shapes, self.static.shapes.block_size, self.c

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

    def write_all(self, begin) -> None:
        """The keys of all passes into the pool, for tokens that see those after them."""

        def write(p: Pass, after: Pass, has_next, buffer):
            self.for_new_keys(p, buffer, lambda copy: copy.wait())
            self.insert_keys(p, buffer)
            self.write_own(p, buffer)

            @pl.when(has_next)
            def _():
                pl.when(p.is_last)(lambda: self.enter(after.seq))
                self.for_new_keys(after, 1 - buffer, lambda copy: copy.start())

            self.await_own(p, buffer)
            return 1 - buffer

        self.for_new_keys(self.start_first(begin), 0, lambda copy: copy.start())
        self.for_each(begin, write, jnp.int32(0))
