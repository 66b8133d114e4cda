"""The TPU's attention kernel under the TPU interpreter, which checks transfers: races, bounds, memory never written.

Small tiles, so that a sequence has several. The meaning is the reference's, which others test.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm.pallas_kernels.paged_attention import PagedBatch, kv_shape, reference, tpu, tpu_plan
from tests.seldom import all_but

# Each transfer is taken for a device; with the default of one such clock for all of them most races pass unseen.
EAGER = pltpu.InterpretParams(
    dma_execution_mode="eager",
    detect_races=True,
    vector_clock_size=16,
    uninitialized_memory="nan",
    out_of_bounds_reads="raise",
)
LATE = pltpu.InterpretParams(
    dma_execution_mode="on_wait", uninitialized_memory="nan", out_of_bounds_reads="raise", random_seed=3
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Static shapes and options; lengths (tokens of the step, all tokens) of decodes and then chunks."""

    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    seqs: int
    blocks_per_seq: int
    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    block_size: int = 16
    dtype: str = "float32"
    pool_dtype: str = ""
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    causal: bool = True


RAGGED = Case(heads=4, kv_heads=2, head_dim=64, tokens=24, seqs=8, blocks_per_seq=12)
CASES = {
    # More decodes than buffers; lengths around a block's and a tile's end.
    "decodes": Case(
        heads=6,
        kv_heads=2,
        head_dim=64,
        tokens=8,
        seqs=8,
        blocks_per_seq=20,
        decodes=(1, 16, 17, 128, 129, 300, 2),
        soft_cap=2.0,
    ),
    # A prompt; two passes that begin inside a block, the second reads what the first wrote; one token; a long prefix;
    # a chunk inside a block.
    "chunks": Case(
        heads=4,
        kv_heads=2,
        head_dim=128,
        tokens=192,
        seqs=7,
        blocks_per_seq=20,
        decodes=(33,),
        chunks=((20, 20), (140, 150), (1, 129), (20, 290), (5, 30)),
        sinks=True,
    ),
    # Blocks in the second row of a table.
    "mqa window": Case(
        heads=3,
        kv_heads=1,
        head_dim=80,
        tokens=180,
        seqs=5,
        blocks_per_seq=132,
        dtype="bfloat16",
        decodes=(2100, 9),
        chunks=((140, 300), (9, 200)),
        sliding_window=45,
        sinks=True,
    ),
    # Prompts of several passes, which see what later passes write; a chunk that begins inside a block.
    "bidirectional": Case(
        heads=4,
        kv_heads=2,
        head_dim=64,
        tokens=320,
        seqs=6,
        blocks_per_seq=20,
        decodes=(33,),
        chunks=((20, 20), (140, 150), (130, 130), (5, 30)),
        causal=False,
    ),
    "bidirectional window": Case(
        heads=3,
        kv_heads=1,
        head_dim=80,
        tokens=320,
        seqs=5,
        blocks_per_seq=30,
        dtype="bfloat16",
        chunks=((290, 290), (9, 200)),
        sliding_window=45,
        sinks=True,
        causal=False,
    ),
    "mha int8": Case(
        heads=2,
        kv_heads=2,
        head_dim=96,
        tokens=48,
        seqs=4,
        blocks_per_seq=6,
        block_size=32,
        dtype="bfloat16",
        pool_dtype="int8",
        decodes=(150, 33),
        chunks=((40, 70),),
    ),
    "wide float8": Case(
        heads=4,
        kv_heads=2,
        head_dim=256,
        tokens=20,
        seqs=3,
        blocks_per_seq=3,
        block_size=64,
        pool_dtype="float8_e4m3fn",
        decodes=(65,),
        chunks=((17, 80),),
        sliding_window=70,
    ),
}


QUICK = ("chunks",)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    def pick(shapes):
        tiles, least = tpu_plan.pick_tiles(shapes), max(128, shapes.block_size)
        return dataclasses.replace(
            tiles, decode_keys=2 * least, decode_edge=least, queries=least, sub_queries=32, keys=least, edge=least
        )

    monkeypatch.setattr(tpu, "pick_tiles", pick)


def batch(case, decodes, chunks, seed):
    """Arguments and options of the op. Blocks outside the tables, and cells after a sequence's end, are NaN; so is the
    padding of tokens, and the last sequences are padding with lengths of noise."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(case.dtype)
    pool_dtype = jnp.dtype(case.pool_dtype or dtype)
    lens = [(1, n) for n in decodes] + list(chunks)
    used, pad = sum(q_len for q_len, _ in lens), case.seqs - len(lens)
    q, k, v = (rng.normal(size=(case.tokens, n, case.head_dim)) for n in (case.heads, case.kv_heads, case.kv_heads))
    for x in (q, k, v):
        x[used:] = np.nan
    num_blocks = case.seqs * case.blocks_per_seq + 3
    tables = rng.permutation(num_blocks)[:-3].reshape(case.seqs, case.blocks_per_seq)
    shape = kv_shape(num_blocks, case.block_size, case.kv_heads, case.head_dim, platform="tpu")
    scales = None
    if case.pool_dtype:
        scales = jnp.asarray(rng.uniform(0.01, 0.02, (2, case.kv_heads)), jnp.float32)
    pool = np.full(shape, 99 if pool_dtype == jnp.int8 else np.nan, np.float32)
    for table, (q_len, kv_len) in zip(tables, lens, strict=False):
        for at in range(kv_len - q_len):
            cell = rng.normal(size=(2, case.kv_heads, case.head_dim)) * (40 if case.pool_dtype else 1)
            pool[table[at // case.block_size], :, :, at % case.block_size, : case.head_dim] = cell
            pool[table[at // case.block_size], :, :, at % case.block_size, case.head_dim :] = 0
    ints = (
        tables,
        np.cumsum([0, *[n for n, _ in lens], *[0] * pad]),
        [*[n for _, n in lens], *rng.integers(1, 99, pad)],
        [len(decodes), len(lens)],
    )
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v)] + [jnp.asarray(pool).astype(pool_dtype)]
    options = {"sinks": jnp.asarray(rng.normal(size=case.heads), jnp.float32) if case.sinks else None}
    return [*arrays, PagedBatch(*(jnp.asarray(x, jnp.int32) for x in ints))], options | {"kv_scales": scales}


def compiled(case, interpret):
    static = {"scale": 0.2, "sliding_window": case.sliding_window, "soft_cap": case.soft_cap, "causal": case.causal}
    return (
        jax.jit(partial(tpu.ragged_paged_attention, **static, interpret=interpret)),
        jax.jit(partial(reference.ragged_paged_attention, **static)),
    )


def check(case, ops, contents):
    arguments, options = contents
    (out, pool), (want, want_pool) = (op(*arguments, **options) for op in ops)
    assert not races_found()
    assert out.dtype == arguments[0].dtype and pool.dtype == arguments[3].dtype
    used = int(arguments[4].cu_q_lens[arguments[4].distribution[1]])
    tolerance = 2e-5 if case.dtype == "float32" else 1e-2
    out, want = (np.asarray(x[:used], np.float32) for x in (out, want))
    np.testing.assert_allclose(out, want, atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(np.asarray(pool, np.float32), np.asarray(want_pool, np.float32))


def races_found():
    """Whether the interpreter saw a race and did not raise: before JAX 0.12 it only notes it."""
    if jax.__version_info__ >= (0, 12):
        return False
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return interpret_pallas_call.races.races_found


@pytest.mark.parametrize("name", all_but(QUICK, CASES))
def test_without_races(name):
    case = CASES[name]
    check(case, compiled(case, EAGER), batch(case, case.decodes, case.chunks, 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_with_transfers_as_late_as_allowed(name):
    case = CASES[name]
    check(case, compiled(case, LATE), batch(case, case.decodes, case.chunks, 1))


@st.composite
def lengths(draw, case=RAGGED):
    most = case.blocks_per_seq * case.block_size
    rows = draw(st.integers(0, case.seqs))
    decodes = draw(st.lists(st.integers(1, most), max_size=rows))
    chunks, left = [], case.tokens - rows
    for _ in range(rows - len(decodes)):
        q_len = 1 + draw(st.integers(0, left))
        left -= q_len - 1
        chunks.append((q_len, draw(st.integers(q_len, most))))
    return decodes, chunks, draw(st.integers(0, 2**32 - 1))


@pytest.mark.slow
def test_ragged_batches():
    ops = compiled(RAGGED, LATE)

    @settings(max_examples=8, deadline=None)
    @given(contents=lengths())
    def run(contents):
        check(RAGGED, ops, batch(RAGGED, *contents))

    run()


def test_a_race_is_noticed():
    """Of the checks above: a transfer that nobody waits for before its target is read."""

    def kernel(x, y, buffer, sem):
        copy = pltpu.make_async_copy(x, buffer, sem)
        copy.start()
        y[...] = buffer[...]
        copy.wait()

    scratch = [pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA]
    spec, shape = pl.BlockSpec(memory_space=pl.ANY), jax.ShapeDtypeStruct((8, 128), jnp.float32)
    run = pl.pallas_call(kernel, out_shape=shape, in_specs=[spec], scratch_shapes=scratch, interpret=EAGER)
    try:
        if jax.__version_info__ >= (0, 12):
            with pytest.raises(Exception, match="(?i)race"):
                jax.block_until_ready(run(jnp.ones((8, 128))))
        else:
            jax.block_until_ready(run(jnp.ones((8, 128))))
            assert races_found()
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def shapes(heads=32, kv_heads=8, head_dim=128, block_size=32, itemsize=2, kv_itemsize=2):
    return tpu_plan.Shapes(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        itemsize=itemsize,
        kv_itemsize=kv_itemsize,
    )


@pytest.mark.parametrize("block_size", [16, 32, 128, 256])
@pytest.mark.parametrize("heads", [(32, 8, 128), (4, 1, 128), (8, 4, 256), (64, 8, 128), (32, 32, 128), (3, 3, 128)])
def test_tiles_fit(heads, block_size):
    s = shapes(*heads, block_size=block_size)
    t = tpu_plan.pick_tiles(s)
    assert t.vmem_bytes <= tpu_plan.VMEM_BUDGET_BYTES
    for whole, part in ((t.decode_keys, t.decode_edge), (t.keys, t.edge), (t.queries, t.edge)):
        assert whole % part == 0 and part % block_size == 0 and part % 128 == 0
    assert t.queries % t.sub_queries == 0


def test_what_does_not_fit_is_an_error_with_numbers():
    with pytest.raises(ValueError, match="MiB of VMEM .* may take 44.0: shard the heads"):
        tpu_plan.pick_tiles(shapes(heads=512, kv_heads=512, block_size=256))
    assert tpu_plan.smem_bytes(256, 131072 // 32) < 144 << 10
    with pytest.raises(ValueError, match="of SMEM for 8 sequences of up to 65536 blocks .* use larger blocks"):
        tpu_plan.smem_bytes(8, 65536)


def arrays(block_size=32, dtype=jnp.bfloat16, pool_dtype=jnp.bfloat16, head_dim=64, padded=128, kv_heads=2):
    new = jnp.zeros((8, kv_heads, head_dim), dtype)
    pool = jnp.zeros((2, 2, kv_heads, block_size, padded), pool_dtype)
    return jnp.zeros((8, 4, head_dim), dtype), new, new, pool


def test_supports():
    assert tpu.supports(*arrays()) and tpu.supports(*arrays(block_size=256), sliding_window=3)
    assert tpu.supports(*arrays(block_size=32, pool_dtype=jnp.int8))
    for refused in (
        {"block_size": 8},
        {"block_size": 48},
        {"block_size": 512},
        {"block_size": 16, "pool_dtype": jnp.int8},
        {"pool_dtype": jnp.float32},
        {"dtype": jnp.float16, "pool_dtype": jnp.float16},
        {"padded": 64},
        {"head_dim": 512, "padded": 512},
        {"kv_heads": 3},
    ):
        assert not tpu.supports(*arrays(**refused)), refused


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("heads", [(32, 8, 128), (4, 1, 128), (8, 4, 256)])
def test_decodes_move_little_but_their_keys(heads, block_size):
    """At 4000 tokens: live keys and values, and the new one's, are nearly all of it."""
    n, kv_heads, head_dim = heads
    moved = tpu.bytes_moved(
        [1] * 8, [4000] * 8, heads=n, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, itemsize=2
    )
    assert 1 < moved / (8 * 4001 * 2 * kv_heads * head_dim * 2) < 1.05


def test_bytes_of_chunks():
    """Two passes over 256 positions: the second reads what the first wrote; blocks are written once."""
    s, key = shapes(), 2 * 8 * 128 * 2
    moved = tpu.bytes_moved([512], [512], heads=32, kv_heads=8, head_dim=128, block_size=32, itemsize=2)
    assert moved == 512 * s.token_bytes + 256 * key + 512 * key + 4 * 128 + 4 * 5
    windowed = tpu.bytes_moved(
        [512], [512], heads=32, kv_heads=8, head_dim=128, block_size=32, itemsize=2, sliding_window=64
    )
    assert moved - windowed == (256 - 64) * key
