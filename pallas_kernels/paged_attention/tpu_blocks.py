"""How the TPU kernel reads blocks: block tables in SMEM, transfers by block, and the scratch both phases have."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm.pallas_kernels.paged_attention.tpu_attend import Refs, Static, cdiv, div, rem
from jaxllm.pallas_kernels.paged_attention.tpu_plan import LANES, TABLE_ROWS

DMA = pltpu.SemaphoreType.DMA


class Tables(NamedTuple):
    """Block tables in SMEM, a ring of sequences' rows: only the used part of a row is read."""

    refs: Refs
    rows: Any  # [TABLE_ROWS, rows, 1, 128]
    sems: Any  # [TABLE_ROWS]
    block_size: int

    def copy(self, seq):
        used = pl.ds(0, cdiv(self.refs.kv_lens[seq], self.block_size * LANES))
        at = rem(seq, TABLE_ROWS)
        return pltpu.make_async_copy(self.refs.tables.at[seq, used], self.rows.at[at, used], self.sems.at[at])

    def block(self, seq, i):
        """Id of block `i` of a sequence."""
        return self.rows[rem(seq, TABLE_ROWS), div(i, LANES), 0, rem(i, LANES)]

    def start_blocks(self, seq, first, count, dst, sem):
        """Starts to read `count` blocks from `first` on into `dst[blocks, ...]`; some at once, as to start a transfer
        takes many scalar operations, but few that depend on each other."""

        def start(i):
            pltpu.make_async_copy(self.refs.pool.at[self.block(seq, first + i)], dst.at[i], sem).start()

        at_once = 4
        whole = div(count, at_once)

        @pl.loop(0, whole)
        def _(i):
            for j in range(at_once):
                start(i * at_once + j)

        pl.loop(whole * at_once, count)(start)


def token_rows(token, count, rows: int):
    """The rows that `count` tokens from `token` on have, `rows` each, of a buffer of such."""
    size = count * rows
    return pl.ds(pl.multiple_of(token * rows, 8), size if isinstance(size, int) else pl.multiple_of(size, 8))


def load_heads(ref, first, count: int, stride: int, slices: int) -> jax.Array:
    """`[count, head_dim]` of a buffer of rows: the head at `first` and those each `stride` rows after it."""
    parts = [ref[pl.ds(first + i, count, stride=stride)] for i in range(slices)]
    return parts[0] if slices == 1 else jnp.concatenate(parts, axis=1)


def store_heads(ref, first, stride: int, slices: int, heads: jax.Array) -> None:
    for i in range(slices):
        ref[pl.ds(first + i, heads.shape[0], stride=stride)] = heads[:, i * LANES : (i + 1) * LANES]


def await_bytes(buffer, sem) -> None:
    """Waits for transfers of as many bytes as `buffer` has."""
    pltpu.make_async_copy(buffer, buffer, sem).wait()


def state_scratch(static: Static, parts: int, rows: int, dtype) -> tuple:
    s = static.shapes
    state = [(dtype, s.head_dim), *[(jnp.float32, width) for width in (LANES, LANES, s.head_dim)]]
    return tuple(pltpu.VMEM((s.kv_heads, parts, rows, width), kind) for kind, width in state)


def table_scratch(refs: Refs) -> tuple:
    return pltpu.SMEM((TABLE_ROWS, *refs.tables.shape[1:]), jnp.int32), DMA((TABLE_ROWS,))
