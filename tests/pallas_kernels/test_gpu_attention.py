"""The GPU's kernels interpreted: several splits and tiles of every kind, every head_dim and block size, the plan."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from jax.experimental import pallas as pl

from benchmarks.attention_cases import Batch, Case
from jaxllm.pallas_kernels.paged_attention import PagedBatch, gpu
from tests.pallas_kernels.test_paged_attention import batches
from tests.seldom import all_but

CASES = {
    "rows": Case(9, 4, 6, 2, block_size=32, sinks=True),
    "rows_window": Case(20, 5, 4, 4, block_size=32, sliding_window=45),
    "tiles": Case(60, 5, 6, 2, block_size=32, soft_cap=1.5, sinks=True),
    "tiles_window": Case(60, 5, 8, 1, block_size=32, sliding_window=37),
    "tiles_short_window": Case(50, 6, 4, 2, block_size=16, sliding_window=5),
    "tiles_bfloat16": Case(60, 5, 4, 2, block_size=32, dtype="bfloat16", sinks=True),
    "tiles_float8": Case(60, 5, 4, 2, head_dim=80, block_size=32, dtype="bfloat16", pool_dtype="float8_e4m3fn"),
    "rows_bidirectional": Case(20, 5, 4, 4, block_size=32, sliding_window=45, causal=False),
    "tiles_bidirectional": Case(60, 5, 6, 2, block_size=32, sinks=True, causal=False),
    "tiles_bidirectional_window": Case(60, 5, 4, 2, block_size=16, sliding_window=19, causal=False),
    "tiles_int8": Case(60, 5, 4, 2, block_size=32, dtype="bfloat16", pool_dtype="int8", sinks=True),
}


@pytest.fixture
def small_tiles(monkeypatch):
    """So that short sequences have several splits, and tiles that need a mask and that need none."""
    monkeypatch.setattr(gpu, "row_shape", lambda *args: gpu.Shape(16, 16, 4, 1))
    monkeypatch.setattr(gpu, "tile_shape", lambda *args, **kwargs: gpu.Shape(32, 16, 4, 1))
    monkeypatch.setattr(gpu, "MIN_SPLIT", 32)


def op(case):
    fn = partial(gpu.ragged_paged_attention, interpret=True, **case.options)
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.parametrize("name", all_but(("rows", "tiles_float8", "tiles_bidirectional_window"), CASES))
def test_splits_and_tiles(name, small_tiles):
    case = CASES[name]
    run = gpu.plan(
        case.tokens,
        case.seqs,
        case.max_len,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        itemsize=4,
        sliding_window=case.sliding_window,
    )
    assert (run.num_tiles > 1) == (case.tokens > gpu.MAX_ROW_TOKENS)
    assert run.rows.splits > 1 or case.sliding_window == 5
    compiled = op(case)

    @settings(max_examples=6, deadline=None)
    @given(contents=batches(case))
    def check(contents):
        Batch(case, contents, "gpu").check(compiled)

    check()
    long, others = case.max_len, case.seqs - 3
    q_lens, decodes = [1, 1, case.tokens - 2 - 2 * others, *[2] * others], 2
    if run.rows.ragged_rows:
        q_lens, decodes = [1] * case.seqs, case.seqs
    kv_lens = [long, 17, long, *[long // 2] * others]
    Batch(case, (decodes, q_lens, kv_lens, [0] * case.seqs, 1), "gpu").check(compiled)
    Batch(case, (0, [], [], [], 0), "gpu").check(compiled)


@pytest.mark.parametrize("head_dim, block_size", [(64, 256), (80, 128), (96, 64), (128, 16), (256, 32)])
def test_head_dims_and_block_sizes(head_dim, block_size):
    """At the tiles that run on a GPU, rows and tiles in one batch."""
    case = Case(50, 3, 4, 2, head_dim, block_size, dtype="bfloat16")
    Batch(case, (1, [1, 30, 9], [70, 75, 9], [0, 1, 0], 0), "gpu").check(op(case))


def plan(tokens, seqs, capacity=32768, **options):
    given = {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 16, "itemsize": 2} | options
    return gpu.plan(tokens, seqs, capacity, **given)


def test_few_rows_are_split_to_fill_the_gpu():
    for kv_heads in (1, 2, 8):
        for seqs in (1, 2, 8, 32, 256):
            rows = plan(seqs, seqs, heads=4 * kv_heads, kv_heads=kv_heads)
            programs = rows.num_rows * kv_heads * rows.rows.splits
            assert programs >= min(gpu.RESIDENT, seqs * kv_heads * gpu.MAX_SPLITS)
            assert programs < 2 * gpu.RESIDENT or rows.rows.splits <= 4
    assert plan(1, 1, capacity=512).rows.splits == 2, "as many as there are keys for"
    assert plan(1, 1, sliding_window=200).rows.splits == 2


def test_tiles_fill_the_gpu_before_they_grow():
    assert [plan(tokens, 64).tiles.rows for tokens in (64, 256, 512, 2048)] == [64, 64, 128, 128]
    assert plan(2048, 64, kv_heads=1, heads=4).tiles.rows == 64
    assert plan(2048, 64, heads=40).tiles.rows == 128  # groups of 5 take 8 rows a token
    assert plan(2048, 64, heads=40).num_tiles == 128
    assert plan(32, 32).num_tiles == 0 and plan(33, 32).num_tiles > 0


def test_tiles_fit_the_shared_memory():
    """K and V of every stage in flight and the queries: an upper bound of what the compiler takes."""
    for hopper, limit in (True, 232448), (False, 166912):
        for head_dim in gpu.HEAD_DIMS:
            for tokens in (64, 2048):
                run = plan(tokens, 64, head_dim=head_dim, hopper=hopper)
                tile, dim = run.tiles, pl.next_power_of_2(head_dim)
                used = 2 * dim * (tile.rows + 2 * tile.tile_kv * run.tile_params.num_stages)
                assert used <= limit, (hopper, head_dim, tokens)


def test_bytes_moved():
    options = {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 16, "itemsize": 2}
    decode = gpu.bytes_moved([1] * 8, [4096] * 8, **options)
    keys = 8 * 4096 * 8 * 128 * 2 * 2
    assert keys < decode < 1.03 * keys
    assert gpu.bytes_moved([1] * 8, [4096] * 8, **options, kv_itemsize=1) < 0.53 * decode
    assert gpu.bytes_moved([1] * 8, [4096] * 8, **options, sliding_window=1024) < 0.27 * decode
    prompt = gpu.bytes_moved([2048], [2048], **options)
    at_least = 2048 * (2 * 32 * 128 + 2 * 2 * 8 * 128) * 2
    assert at_least <= prompt < 1.5 * at_least
    later = gpu.bytes_moved([2048], [4096], **options)
    assert later - prompt == 2048 * 8 * 128 * 2 * 2 + 128 * 4, "its cached keys and their blocks"


SHAPES = {
    "q": ((8, 32, 128), "bfloat16"),
    "k": ((8, 8, 128), "bfloat16"),
    "v": ((8, 8, 128), "bfloat16"),
    "kv_pool": ((64, 2, 8, 16, 128), "bfloat16"),
}
BATCH = PagedBatch(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8, 4), (9,), (8,), (2,))))


def supports(given):
    result = []
    jax.eval_shape(lambda given: result.append(gpu.supports(**given, scale=1.0, sliding_window=None)), given)
    return result[0]


def shapes(**changes):
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in (SHAPES | changes).items()}
    return arrays | {"batch": BATCH}


def test_supports():
    assert supports(shapes())
    refused = {
        "dtype": {name: (SHAPES[name][0], "float16") for name in ("q", "k", "v", "kv_pool")},
        "mixed": {"kv_pool": (SHAPES["kv_pool"][0], "float32")},
        "block_size": {"kv_pool": ((64, 2, 8, 8, 128), "bfloat16")},
        "odd block_size": {"kv_pool": ((64, 2, 8, 48, 128), "bfloat16")},
        "padded cells": {"kv_pool": ((64, 2, 8, 16, 256), "bfloat16")},
        "head_dim": {name: ((*SHAPES[name][0][:-1], 72), "bfloat16") for name in ("q", "k", "v", "kv_pool")},
        "group": {"q": ((8, 12, 128), "bfloat16")},
    }
    for what, changes in refused.items():
        assert not supports(shapes(**changes)), what


def test_float8_needs_a_gpu_that_reads_it(monkeypatch):
    given = shapes(kv_pool=((64, 2, 8, 16, 128), "float8_e4m3fn"))
    for capability, supported in (80, False), (89, True), (90, True):
        monkeypatch.setattr(gpu, "compute_capability", lambda value=capability: value)
        assert supports(given) == supported


def test_pools_whose_cells_overflow_a_count_are_refused():
    def trace(num_blocks, dtype="int8"):
        given = shapes(kv_pool=((num_blocks, 2, 8, 16, 128), dtype))
        scales = jax.ShapeDtypeStruct((2, 8), jnp.float32) if dtype == "int8" else None

        def run(given, kv_scales):
            return gpu.ragged_paged_attention(**given, kv_scales=kv_scales, scale=1.0)

        return jax.eval_shape(run, given, scales)[1].shape[0]

    block_bytes = 2 * 8 * 16 * 128
    most = 2**31 // block_bytes
    assert trace(most) == most and trace(2 * most + 1) == 2 * most + 1
    for num_blocks in (most + 1, 2 * most):
        with pytest.raises(ValueError, match="Choose num_blocks for at most 2 GiB, or more than 4 GiB, a layer"):
            trace(num_blocks)
    assert trace(most, "bfloat16") == most
