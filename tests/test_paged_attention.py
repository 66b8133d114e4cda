"""Every implementation of ragged paged attention against numpy in float64, in a pool poisoned with NaN."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.paged_attention import cpu, kv_shape
from jaxllm.pallas_kernels.paged_attention.api import IMPLEMENTATIONS, ragged_paged_attention

BLOCK_SIZE, BLOCKS_PER_SEQ, NUM_BLOCKS, HEAD_DIM, SCALE = 4, 8, 48, 8, 0.3
MAX_LEN = BLOCKS_PER_SEQ * BLOCK_SIZE


@dataclass(frozen=True)
class Case:
    """One static shape; everything else is drawn."""

    tokens: int
    seqs: int
    heads: int
    kv_heads: int
    sliding_window: int | None = None
    soft_cap: float | None = None


CASES = {
    "mha": Case(24, 5, 3, 3),
    "gqa_window": Case(24, 5, 4, 2, sliding_window=6),
    "mqa_cap": Case(24, 5, 4, 1, soft_cap=1.5),
    "window_of_one_cap": Case(9, 4, 2, 1, sliding_window=1, soft_cap=0.5),
    "decodes": Case(4, 4, 4, 2),
    "one_token": Case(1, 1, 4, 2),
}


@st.composite
def batches(draw, case):
    """One-token rows, lengths of all queries and sequences, how many blocks each shares with the first, a seed."""
    num_rows = draw(st.integers(1, case.seqs))
    num_decodes = draw(st.integers(0, num_rows))
    left = case.tokens - num_rows
    q_lens, kv_lens = [], []
    for row in range(num_rows):
        q_len = 1 if row < num_decodes else 1 + draw(st.integers(0, min(left, MAX_LEN - 1)))
        left -= q_len - 1
        q_lens.append(q_len)
        kv_lens.append(draw(st.integers(q_len, MAX_LEN)))
    shared = [draw(st.integers(0, BLOCKS_PER_SEQ)) for _ in range(num_rows)]
    return num_decodes, q_lens, kv_lens, shared, draw(st.integers(0, 2**32 - 1))


class Batch:
    """Arguments of the op: a pool that is NaN but for the cells of earlier tokens, padding that is NaN or noise."""

    def __init__(self, case, contents, dtype=np.float32):
        num_decodes, self.q_lens, self.kv_lens, shared, seed = contents
        rng, rows = np.random.default_rng(seed), len(self.q_lens)
        self.starts = [kv_len - q_len for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True)]
        free = iter(rng.permutation(NUM_BLOCKS).tolist())
        self.tables = []
        for row in range(rows):
            prefix = 0 if row == 0 else min(shared[row], min(self.starts[0], self.starts[row]) // BLOCK_SIZE)
            own = -(-self.kv_lens[row] // BLOCK_SIZE) - prefix
            self.tables.append((self.tables[0][:prefix] if row else []) + [next(free) for _ in range(own)])

        def normal(*shape):
            return rng.normal(size=shape).astype(dtype)

        total = sum(self.q_lens)
        self.pool = np.full(kv_shape(NUM_BLOCKS, BLOCK_SIZE, case.kv_heads, HEAD_DIM), np.nan, dtype)
        for table, start in zip(self.tables, self.starts, strict=True):
            for position in range(start):
                cell = self.pool[table[position // BLOCK_SIZE], :, :, position % BLOCK_SIZE]
                cell[:] = np.where(np.isnan(cell), normal(*cell.shape), cell)
        self.q, self.k, self.v = (
            np.concatenate([normal(total, n, HEAD_DIM), np.full((case.tokens - total, n, HEAD_DIM), np.nan, dtype)])
            for n in (case.heads, case.kv_heads, case.kv_heads)
        )
        pad = case.seqs - rows
        block_tables = rng.integers(0, NUM_BLOCKS, (case.seqs, BLOCKS_PER_SEQ))  # past a table's end: any block
        for row, table in enumerate(self.tables):
            block_tables[row, : len(table)] = table
        ints = (
            block_tables,
            np.cumsum([0, *self.q_lens, *[0] * pad]),
            [*self.kv_lens, *rng.integers(0, MAX_LEN, pad)],
            [num_decodes, rows],
        )
        self.arguments = (self.q, self.k, self.v, self.pool, *(np.asarray(x, np.int32) for x in ints))

    def expected(self, case):
        """Outputs of the real tokens, and the pool, in float64."""
        pool = self.pool.astype(np.float64)
        q, k, v = (x.astype(np.float64) for x in (self.q, self.k, self.v))
        first = np.cumsum([0, *self.q_lens])
        rows = list(zip(self.tables, self.starts, self.q_lens, first, strict=False))
        for table, start, q_len, at in rows:
            for i in range(q_len):
                block, cell = table[(start + i) // BLOCK_SIZE], (start + i) % BLOCK_SIZE
                pool[block, 0, :, cell], pool[block, 1, :, cell] = k[at + i], v[at + i]
        out = []
        for table, start, q_len, at in rows:
            keys, values = np.moveaxis(pool[table], (1, 3), (0, 2)).reshape(2, -1, case.kv_heads, HEAD_DIM)
            for i in range(q_len):
                stop = start + i + 1
                begin = 0 if case.sliding_window is None else max(0, stop - case.sliding_window)
                out.append(self._attend(case, q[at + i], keys[begin:stop], values[begin:stop]))
        return np.array(out), pool

    def _attend(self, case, q, keys, values):
        keys, values = (np.repeat(x, case.heads // case.kv_heads, axis=1) for x in (keys, values))
        scores = np.einsum("hd,lhd->hl", q, keys) * SCALE
        if case.soft_cap is not None:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.einsum("hl,lhd->hd", weights / weights.sum(axis=1, keepdims=True), values)


def compiled(implementation, case):
    if implementation == "native" and not native.is_built():
        pytest.skip("not built: python -m jaxllm.pallas_kernels.native.build")
    op = partial(
        ragged_paged_attention, implementation=implementation, scale=SCALE, sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
    )  # fmt: skip
    return jax.jit(op)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_conforms(implementation, case, monkeypatch):
    """Outputs agree; cells of the step's tokens hold their keys and values, and all others what they held: NaN too."""
    for name, size in {"TILE_Q": 3, "WIDE_TILE_Q": 8, "WIDE_TILE_K": 12}.items():  # several tiles, the last ragged
        monkeypatch.setattr(cpu, name, size)
    op = compiled(implementation, case)

    @settings(max_examples=20, deadline=None)
    @given(contents=batches(case))
    def check(contents):
        batch = Batch(case, contents)
        out, pool = map(np.asarray, op(*map(jnp.asarray, batch.arguments)))
        want, want_pool = batch.expected(case)
        assert out.dtype == np.float32 and pool.dtype == np.float32
        np.testing.assert_allclose(out[: len(want)], want, atol=2e-5, rtol=1e-4)
        np.testing.assert_array_equal(pool, want_pool.astype(np.float32))

    check()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16(implementation):
    """Computed in float32 inside, whatever the pool holds."""
    case = CASES["gqa_window"]
    batch = Batch(case, (2, [1, 1, 9, 1], [7, 32, 20, 3], [0, 3, 2, 0], 0), jnp.bfloat16)
    out, pool = map(np.asarray, compiled(implementation, case)(*map(jnp.asarray, batch.arguments)))
    want, want_pool = batch.expected(case)
    assert out.dtype == pool.dtype == jnp.bfloat16
    np.testing.assert_allclose(out[: len(want)].astype(np.float64), want, atol=1e-2, rtol=1e-2)
    np.testing.assert_array_equal(pool.astype(np.float64), want_pool)


def test_unknown_implementation_is_an_error():
    with pytest.raises(ValueError, match="unknown implementation 'fast'; have \\['cpu', 'native', 'reference'"):
        ragged_paged_attention(implementation="fast")
