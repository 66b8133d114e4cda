"""Every implementation of ragged paged attention against numpy in float64, in a pool poisoned with NaN.

Pallas kernels run interpreted, on fewer examples.
"""

import dataclasses
import importlib
import logging
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.attention_cases import BLOCKS_PER_SEQ, SCALE, Batch, Case
from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.paged_attention import api, kv_shape, ragged_paged_attention
from tests.seldom import all_but

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
    "bidirectional": Case(40, 5, 3, 3, causal=False),
    "bidirectional_window": Case(40, 5, 8, 2, head_dim=80, sliding_window=7, soft_cap=1.5, sinks=True, causal=False),
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


INTERPRETED = ("mha", "mqa_cap_sinks", "bfloat16", "int8", "float8", "bidirectional", "bidirectional_window")
OFTEN = ("mqa_cap_sinks", "int8")  # of those
RUNS = {
    "reference": Run(),
    "cpu": Run(tiles={"TILE_Q": 3, "WIDE_TILE_Q": 8, "WIDE_TILE_K": 48}),
    "native": Run(),
    "tpu": Run("tpu", {}, {"interpret": True}, INTERPRETED, examples=4),
    "gpu": Run("gpu", {"MAX_ROW_TOKENS": 4}, {"interpret": True}, INTERPRETED, examples=4),
    "gpu_in_order": Run("gpu", {}, {"interpret": True}, INTERPRETED, examples=4),
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


def implementation(name, case_name):
    """The op, compiled once for the case; skips what is not built, and what the implementation refuses."""
    case = CASES[case_name]
    if name == "native" and not native.is_built():
        pytest.skip("not built: python -m jaxllm.pallas_kernels.native.build")
    run, module = RUNS[name], importlib.import_module(f"{api.__package__}.{name}")
    if hasattr(module, "supports"):
        some = Batch(case, (0, [], [], [], 0), run.platform)
        given = module.supports(*some.arguments, **case.options, **some.options)
        assert given == (case_name not in run.refuses)
        if not given:
            pytest.skip("refused")
    op = partial(ragged_paged_attention, implementation=name, **case.options, **run.options)
    return jax.jit(op, compiler_options={"xla_backend_optimization_level": 0})  # compilation is what takes the time


@pytest.mark.parametrize(
    ("name", "case_name"),
    all_but(
        [(name, case) for name in RUNS for case in (OFTEN if "interpret" in RUNS[name].options else CASES)],
        [(name, case) for name in api.OP.implementations for case in RUNS[name].cases],
    ),
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
    arguments = Batch(CASES["mha"], (0, [], [], [], 0)).arguments
    with pytest.raises(
        ValueError, match="unknown implementation 'fast'; have \\['cpu', 'gpu', 'gpu_in_order', 'native'"
    ):
        ragged_paged_attention(*arguments, scale=SCALE, implementation="fast")


def test_scales_go_with_a_pool_that_needs_them():
    for case, scales in (CASES["mha"], jnp.ones((2, 3))), (CASES["int8"], None):
        with pytest.raises(ValueError, match="a KV pool of (float32 takes no|int8 needs) kv_scales"):
            ragged_paged_attention(*Batch(case, (0, [], [], [], 0)).arguments, scale=SCALE, kv_scales=scales)


def test_what_no_kernel_supports_falls_back_with_one_warning(caplog, monkeypatch):
    monkeypatch.setattr(api, "OP", dataclasses.replace(api.OP, preferred={"cpu": ("native",)}))
    monkeypatch.setattr(native, "is_built", lambda: False)
    batch = Batch(CASES["float8"], (1, [1], [5], [0], 0))
    op = partial(ragged_paged_attention, placement=Placement.default(), **batch.case.options)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            out, _ = jax.eval_shape(lambda *arguments: op(*arguments, **batch.options), *batch.arguments)
            assert out.shape == batch.q.shape
    assert [r.getMessage() for r in caplog.records] == [
        "no cpu kernel supports q float32[24, 4, 128], k float32[24, 2, 128], v float32[24, 2, 128], kv_pool "
        "float8_e4m3fn[30, 2, 2, 32, 128], batch (int32[5, 5], int32[6], int32[5], int32[2]), scale 0.1, soft_cap "
        "1.5, kv_scales float32[2, 2]: the reference serves, which is far slower"
    ]
