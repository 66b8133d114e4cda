"""Every implementation of ragged paged attention against numpy in float64, in a pool poisoned with NaN.

Pallas kernels run interpreted, on fewer examples.
"""

import importlib
import logging
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.paged_attention import api, kv_shape, ragged_paged_attention

BLOCKS_PER_SEQ, NUM_BLOCKS, SCALE = 5, 30, 0.1
FIRST, LAST = 1, NUM_BLOCKS - 1  # guards on both sides: in nobody's table but where it is not read
KV_SCALE = {"int8": 2.5 / 127, "float8_e4m3fn": 2**-7}  # about: some numbers are clipped
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

    @property
    def max_len(self):
        return BLOCKS_PER_SEQ * self.block_size

    @property
    def options(self):
        return {"scale": SCALE, "sliding_window": self.sliding_window, "soft_cap": self.soft_cap}


CASES = {
    "mha": Case(24, 5, 3, 3),
    "gqa_window": Case(24, 5, 4, 2, head_dim=80, sliding_window=19),
    "mqa_cap_sinks": Case(40, 5, 8, 1, head_dim=128, soft_cap=1.5, sinks=True),
    "window_of_one_cap": Case(9, 4, 2, 1, sliding_window=1, soft_cap=0.5),
    "decodes": Case(4, 4, 4, 2, sinks=True),
    "one_token": Case(1, 1, 4, 2),
    "bfloat16": Case(24, 5, 6, 2, head_dim=96, dtype="bfloat16", sliding_window=19, sinks=True),
    "int8": Case(24, 5, 4, 2, block_size=32, dtype="bfloat16", pool_dtype="int8"),
    "float8": Case(24, 5, 4, 2, head_dim=128, block_size=32, pool_dtype="float8_e4m3fn", soft_cap=1.5),
}


@dataclass(frozen=True)
class Run:
    """How an implementation runs here."""

    platform: str = "cpu"  # whose layout its pool has
    tiles: dict[str, int] = field(default_factory=dict)  # of its module: small, so that there are several
    options: dict[str, object] = field(default_factory=dict)
    cases: tuple[str, ...] = tuple(CASES)
    refuses: tuple[str, ...] = ()
    examples: int = 15


INTERPRETED = ("mha", "mqa_cap_sinks", "bfloat16", "int8", "float8")
RUNS = {
    "reference": Run(),
    "cpu": Run(tiles={"TILE_Q": 3, "WIDE_TILE_Q": 8, "WIDE_TILE_K": 48}),
    "native": Run(refuses=("float8",)),
    "tpu": Run("tpu", {}, {"interpret": True}, INTERPRETED, examples=4),
    "gpu": Run("gpu", {"MAX_ROW_TOKENS": 4}, {"interpret": True}, INTERPRETED, examples=4),
}


@st.composite
def batches(draw, case):
    """One-token rows, lengths of all queries and sequences, how many blocks each shares with the first, a seed."""
    num_rows = draw(st.integers(0, case.seqs))
    num_decodes = draw(st.integers(0, num_rows))
    left = case.tokens - num_rows
    q_lens, kv_lens = [], []
    for row in range(num_rows):
        q_len = 1 if row < num_decodes else 1 + draw(st.integers(0, min(left, case.max_len - 1)))
        left -= q_len - 1
        q_lens.append(q_len)
        kv_lens.append(draw(st.integers(q_len, case.max_len)))
    shared = [draw(st.integers(0, BLOCKS_PER_SEQ)) for _ in range(num_rows)]
    return num_decodes, q_lens, kv_lens, shared, draw(st.integers(0, 2**32 - 1))


class Batch:
    """Arguments of the op: a pool that is NaN (int8: noise) but for the cells of earlier tokens, padding that is NaN
    or noise."""

    def __init__(self, case, contents, platform="cpu"):
        num_decodes, self.q_lens, self.kv_lens, shared, seed = contents
        self.case, self.block_size = case, case.block_size
        rows, rng = len(self.q_lens), np.random.default_rng(seed)
        self.starts = [kv_len - q_len for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True)]
        free = iter(rng.permutation(np.arange(FIRST, LAST)).tolist())
        self.tables = []
        for row in range(rows):
            prefix = 0 if row == 0 else min(shared[row], min(self.starts[0], self.starts[row]) // self.block_size)
            own = -(-self.kv_lens[row] // self.block_size) - prefix
            self.tables.append((self.tables[0][:prefix] if row else []) + [next(free) for _ in range(own)])

        is_float8 = case.pool_dtype not in (None, "int8")

        def normal(*shape):
            # XLA's CPU rounds to float16 on the way to 8 bits, numpy at once: the same if float16 holds the quotient.
            return rng.normal(size=shape).astype(np.float16 if is_float8 else np.float64).astype(jnp.dtype(case.dtype))

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
        spread = np.exp2(rng.integers(-1, 2, size)) if is_float8 else rng.uniform(0.8, 1.2, size)
        self.kv_scales = (KV_SCALE[case.pool_dtype] * spread).astype(np.float32) if case.pool_dtype else None

        shape = kv_shape(NUM_BLOCKS, case.block_size, case.kv_heads, case.head_dim, platform=platform)
        nothing = rng.integers(-128, 128, shape) if case.pool_dtype == "int8" else np.full(shape, np.nan)
        self.pool = nothing.astype(self.pool_dtype)
        for table, start in zip(self.tables, self.starts, strict=True):
            blocks = table[: -(-start // self.block_size)]
            cells = self.stored(normal(len(blocks) * self.block_size, 2, case.kv_heads, case.head_dim))
            for position in range(start):
                self.pool[table[position // self.block_size], :, :, position % self.block_size] = cells[position]
        block_tables = rng.integers(0, NUM_BLOCKS, (case.seqs, BLOCKS_PER_SEQ))  # past a table's end: any block
        for row, table in enumerate(self.tables):
            block_tables[row, : len(table)] = table
        ints = (
            block_tables,
            np.cumsum([0, *self.q_lens, *[0] * pad]),
            [*self.kv_lens, *rng.integers(0, case.max_len, pad)],
            [num_decodes, rows],
        )
        arrays = (self.q, self.k, self.v, self.pool, *(np.asarray(x, np.int32) for x in ints))
        self.arguments = [jnp.asarray(x) for x in arrays]
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
                stop = start + i + 1
                begin = 0 if case.sliding_window is None else max(0, stop - case.sliding_window)
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
        """Outputs agree; cells of the step's tokens hold their keys and values, all others what they held: NaN too."""
        out, pool = map(np.asarray, op(*self.arguments, **self.options))
        want, want_pool = self.expected()
        assert out.dtype == self.q.dtype and pool.dtype == self.pool.dtype
        tolerance = TOLERANCE[self.case.dtype]
        np.testing.assert_allclose(out[: len(want)].astype(np.float64), want, atol=tolerance, rtol=tolerance)
        np.testing.assert_array_equal(pool.astype(np.float32), want_pool.astype(np.float32))


def implementation(name, case_name):
    """The op, compiled once for the case; skips what is not built, and what the implementation refuses."""
    case = CASES[case_name]
    if name == "native" and not native.is_built():
        pytest.skip("not built: python -m jaxllm.pallas_kernels.native.build")
    run, module = RUNS[name], importlib.import_module(f"{api.__package__}.{name}")
    if hasattr(module, "supports"):
        some = Batch(case, (0, [], [], [], 0), run.platform)
        given = module.supports(*some.arguments[:4], block_tables=some.arguments[4], **case.options, **some.options)
        assert given == (case_name not in run.refuses)
        if not given:
            pytest.skip("refused")
    op = partial(ragged_paged_attention, implementation=name, **case.options, **run.options)
    return jax.jit(op, compiler_options={"xla_backend_optimization_level": 0})  # compilation is what takes the time


@pytest.mark.parametrize(
    ("name", "case_name"), [(name, case_name) for name in api.IMPLEMENTATIONS for case_name in RUNS[name].cases]
)
def test_conforms(name, case_name, monkeypatch):
    run, case = RUNS[name], CASES[case_name]
    for tile, size in run.tiles.items():
        monkeypatch.setattr(f"{api.__package__}.{name}.{tile}", size)
    op = implementation(name, case_name)

    @settings(max_examples=run.examples, deadline=None)
    @given(contents=batches(case))
    def check(contents):
        Batch(case, contents, run.platform).check(op)

    check()


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_cells_wider_than_a_head(name):
    Batch(CASES["mha"], (1, [1, 12, 3], [30, 40, 3], [0, 1, 0], 0), "tpu").check(implementation(name, "mha"))


def test_layout():
    assert kv_shape(7, 16, 2, 80, platform="gpu") == kv_shape(7, 16, 2, 80, platform="cpu") == (7, 2, 2, 16, 80)
    padded = {64: 128, 80: 128, 96: 128, 128: 128, 256: 256}
    assert {n: kv_shape(7, 16, 2, n, platform="tpu")[-1] for n in padded} == padded


def test_unknown_implementation_is_an_error():
    with pytest.raises(ValueError, match="unknown implementation 'fast'; have \\['cpu', 'gpu', 'native', 'reference'"):
        ragged_paged_attention(implementation="fast")


def test_scales_go_with_a_pool_that_needs_them():
    for case, scales in (CASES["mha"], jnp.ones((2, 3))), (CASES["int8"], None):
        with pytest.raises(ValueError, match="a KV pool of (float32 takes no|int8 needs) kv_scales"):
            ragged_paged_attention(*Batch(case, (0, [], [], [], 0)).arguments, scale=SCALE, kv_scales=scales)


def test_what_no_kernel_supports_falls_back_with_one_warning(caplog, monkeypatch):
    monkeypatch.setattr(api, "PREFERRED", {"cpu": ("native",)})
    batch = Batch(CASES["float8"], (1, [1], [5], [0], 0))
    op = partial(ragged_paged_attention, **batch.case.options)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            out, _ = jax.eval_shape(lambda *arguments: op(*arguments, **batch.options), *batch.arguments)
            assert out.shape == batch.q.shape
    assert [r.getMessage() for r in caplog.records] == [
        "no cpu kernel supports q float32[24, 4, 128], kv_pool float8_e4m3fn[30, 2, 2, 32, 128], block_tables "
        "int32[5, 5], scale 0.1, sliding_window None, soft_cap 1.5, kv_scales float32[2, 2]: the reference serves, "
        "which is far slower"
    ]
