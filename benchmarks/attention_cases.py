"""Cases of ragged paged attention and what they give in float64: a pool poisoned with NaN, blocks in any order.

Tests run them interpreted or on a CPU, `scripts/on_gpu` on the device that is here.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxllm.pallas_kernels.paged_attention import PagedBatch, kv_shape

BLOCKS_PER_SEQ, NUM_BLOCKS, SCALE = 5, 30, 0.1
# About: some numbers are clipped. Powers of two: XLA may multiply by the reciprocal where numpy divides, and their
# quotients are the same to the last bit, next to halves too.
KV_SCALE = {"int8": 2**-6, "float8_e4m3fn": 2**-7}
TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Case:
    """One static shape; everything else is drawn."""

    tokens: int
    seqs: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    block_size: int = 16
    dtype: str = "float32"
    pool_dtype: str = ""  # as dtype
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    causal: bool = True
    blocks_per_seq: int = BLOCKS_PER_SEQ

    @property
    def max_len(self):
        return self.blocks_per_seq * self.block_size

    @property
    def num_blocks(self):
        """With guards on both sides: in nobody's table but where it is not read."""
        return max(NUM_BLOCKS, self.seqs * self.blocks_per_seq + 2)

    @property
    def options(self):
        causal = {} if self.causal else {"causal": False}
        return {"scale": SCALE, "sliding_window": self.sliding_window, "soft_cap": self.soft_cap} | causal


class Batch:
    """Arguments of the op: a pool that is NaN (int8: noise) but for the cells of earlier tokens, padding that is NaN
    or noise."""

    def __init__(self, case, contents, platform="cpu"):
        num_decodes, self.q_lens, self.kv_lens, shared, seed = contents
        self.case, self.block_size = case, case.block_size
        rows, rng = len(self.q_lens), np.random.default_rng(seed)
        self.starts = [kv_len - q_len for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True)]
        free = iter(rng.permutation(np.arange(1, case.num_blocks - 1)).tolist())
        self.tables = []
        for row in range(rows):
            prefix = 0 if row == 0 else min(shared[row], min(self.starts[0], self.starts[row]) // self.block_size)
            own = -(-self.kv_lens[row] // self.block_size) - prefix
            self.tables.append((self.tables[0][:prefix] if row else []) + [next(free) for _ in range(own)])

        def normal(*shape):
            return rng.normal(size=shape).astype(jnp.dtype(case.dtype))

        total, pad = sum(self.q_lens), case.seqs - rows
        self.q, self.k, self.v = (
            np.concatenate(
                [normal(total, n, case.head_dim), np.full((case.tokens - total, n, case.head_dim), np.nan)]
            ).astype(jnp.dtype(case.dtype))
            for n in (case.heads, case.kv_heads, case.kv_heads)
        )
        self.sinks = rng.normal(size=case.heads).astype(np.float32) if case.sinks else None
        self.pool_dtype = jnp.dtype(case.pool_dtype or case.dtype)
        size = 2, case.kv_heads
        spread = np.exp2(rng.integers(-1, 2, size))
        self.kv_scales = (KV_SCALE[case.pool_dtype] * spread).astype(np.float32) if case.pool_dtype else None

        shape = kv_shape(case.num_blocks, case.block_size, case.kv_heads, case.head_dim, platform=platform)
        nothing = rng.integers(-128, 128, shape) if case.pool_dtype == "int8" else np.full(shape, np.nan)
        self.pool = nothing.astype(self.pool_dtype)
        for table, start in zip(self.tables, self.starts, strict=True):
            blocks = table[: -(-start // self.block_size)]
            cells = self.stored(normal(len(blocks) * self.block_size, 2, case.kv_heads, case.head_dim))
            for position in range(start):
                self.pool[table[position // self.block_size], :, :, position % self.block_size] = cells[position]
        # Past a table's end: any block.
        block_tables = rng.integers(0, case.num_blocks, (case.seqs, case.blocks_per_seq))
        for row, table in enumerate(self.tables):
            block_tables[row, : len(table)] = table
        ints = (
            block_tables,
            np.cumsum([0, *self.q_lens, *[0] * pad]),
            [*self.kv_lens, *rng.integers(0, case.max_len, pad)],
            [num_decodes, rows],
        )
        index = PagedBatch(*(jnp.asarray(x, jnp.int32) for x in ints))
        self.arguments = [*map(jnp.asarray, (self.q, self.k, self.v, self.pool)), index]
        options = {"sinks": self.sinks, "kv_scales": self.kv_scales}
        self.options = {name: jnp.asarray(x) for name, x in options.items() if x is not None}

    def stored(self, kv):
        """`kv[tokens, 2, kv_heads, head_dim]` as the pool holds it, with the columns that pad its cells."""
        if self.kv_scales is not None:
            kv = kv.astype(np.float32) / self.kv_scales[..., None]
            kv = np.clip(np.rint(kv), -127, 127) if self.pool_dtype == np.int8 else np.clip(kv, -448, 448)
        padding = self.pool.shape[-1] - kv.shape[-1]
        return np.pad(kv.astype(self.pool_dtype), ((0, 0), (0, 0), (0, 0), (0, padding)))

    def expected(self):
        """Outputs of the real tokens in float64, and the pool."""
        case, pool, first = self.case, self.pool.copy(), np.cumsum([0, *self.q_lens])
        kv = self.stored(np.stack([self.k, self.v], axis=1)[: first[-1]])
        rows = list(zip(self.tables, self.starts, self.q_lens, first, strict=False))
        for table, start, q_len, at in rows:
            for i in range(q_len):
                pool[table[(start + i) // self.block_size], :, :, (start + i) % self.block_size] = kv[at + i]
        out = np.zeros((first[-1], case.heads, case.head_dim))
        scales = 1 if self.kv_scales is None else self.kv_scales[:, :, None, None].astype(np.float64)
        for table, start, q_len, at in rows:
            cells = pool[table][..., : case.head_dim].astype(np.float64) * scales
            keys, values = np.moveaxis(cells, (1, 3), (0, 2)).reshape(2, -1, case.kv_heads, case.head_dim)
            for i in range(q_len):
                stop, window = start + i + 1, case.sliding_window
                begin = 0 if window is None else max(0, stop - window)
                if not case.causal:
                    stop = start + q_len if window is None else min(start + q_len, start + i + window)
                out[at + i] = self._attend(self.q[at + i].astype(np.float64), keys[begin:stop], values[begin:stop])
        return out, pool

    def _attend(self, q, keys, values):
        case = self.case
        keys, values = (np.repeat(x, case.heads // case.kv_heads, axis=1) for x in (keys, values))
        scores = np.einsum("hd,lhd->hl", q, keys) * SCALE
        if case.soft_cap is not None:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        weights = np.exp(scores)
        total = weights.sum(axis=1) + (0 if self.sinks is None else np.exp(self.sinks.astype(np.float64)))
        return np.einsum("hl,lhd->hd", weights / total[:, None], values)

    def check(self, op):
        """Outputs agree; cells of the step's tokens hold their keys and values, all others what they held: NaN too.
        Returns the largest difference of an output. Raises `AssertionError`."""
        out, pool = map(np.asarray, op(*self.arguments, **self.options))
        want, want_pool = self.expected()
        assert out.dtype == self.q.dtype and pool.dtype == self.pool.dtype
        tolerance = TOLERANCE[self.case.dtype]
        np.testing.assert_allclose(out[: len(want)].astype(np.float64), want, atol=tolerance, rtol=tolerance)
        np.testing.assert_array_equal(pool.astype(np.float32), want_pool.astype(np.float32))
        return float(np.abs(out[: len(want)].astype(np.float64) - want).max(initial=0.0))
