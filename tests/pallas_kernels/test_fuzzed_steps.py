"""What lies between products, natively: attention, rotations, gates, copies of blocks, zeros. Any shapes, in memory
that ends where the arrays do, by every instruction set that this CPU has, against numpy in float64.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.attention_cases import Batch, Case
from jaxllm.pallas_kernels import native
from tests.pallas_kernels.guarded import call, fuzzed, with_each_set
from tests.pallas_kernels.test_fuzzed_products import some_rows
from tests.pallas_kernels.test_paged_attention import batches

pytestmark = pytest.mark.skipif(not native.is_built(), reason="not built: python -m jaxllm.pallas_kernels.native.build")

BF16 = ml_dtypes.bfloat16
TOLERANCE = {"float32": 4e-6, "bfloat16": 1e-2}
dtypes, threads, seeds = st.sampled_from([np.float32, BF16]), st.integers(1, 3), st.integers(0, 2**16)


@st.composite
def attention_cases(draw):
    kv_heads, seqs = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    group, more = draw(st.tuples(st.integers(1, 9), st.integers(0, 12)) | st.sampled_from([(71, 3), (2, 150)]))
    return Case(
        seqs + more,
        seqs,
        kv_heads * group,
        kv_heads,
        head_dim=draw(st.integers(1, 70) | st.sampled_from([32, 64, 80, 96, 127, 128, 256])),
        block_size=draw(st.integers(1, 40) | st.sampled_from([16, 32, 64, 128, 200])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        pool_dtype=draw(st.sampled_from(["", "int8", "float8_e4m3fn"])),
        sliding_window=draw(st.none() | st.integers(1, 70)),
        soft_cap=draw(st.none() | st.sampled_from([0.5, 5.0])),
        sinks=draw(st.booleans()),
        causal=draw(st.booleans()),
    )


def attention(q, k, v, pool, batch, *, sinks=None, kv_scales=None, case, batch_invariant, threads):
    nothing = np.zeros(0, np.float32)
    floats = (nothing if x is None else np.asarray(x, np.float32).reshape(-1) for x in (sinks, kv_scales))
    arguments = [np.asarray(x) for x in (q, k, v, pool, *batch, *floats)]
    return call(
        "jaxllm_paged_attention",
        arguments,
        [(x.shape, x.dtype) for x in (arguments[0], arguments[3])],
        aliases={3: 1},
        threads=threads,
        scale=np.float32(case.options["scale"]),
        causal=case.causal,
        window=np.int64(case.sliding_window or 0),
        soft_cap=np.float32(case.soft_cap or 0),
        batch_invariant=batch_invariant,
    )


@fuzzed
@given(data=st.data(), case=attention_cases(), batch_invariant=st.booleans(), threads=threads)
def test_attention(data, case, batch_invariant, threads):
    """A pool of NaN but for the cells of earlier tokens; padding comes out 0."""
    batch = Batch(case, data.draw(batches(case)))
    want = batch.expected()
    batch.expected = lambda: want  # of all instruction sets

    def op(*arrays, **options):
        out, pool = attention(*arrays, **options, case=case, batch_invariant=batch_invariant, threads=threads)
        assert (out[sum(batch.q_lens) :] == 0).all()
        return out, pool

    with_each_set(lambda: batch.check(op))


@fuzzed
@given(
    st.integers(1, 180),
    st.tuples(st.integers(1, 2), st.integers(1, 5)),
    st.integers(1, 70) | st.sampled_from([32, 64, 128]),
    st.integers(1, 40) | st.sampled_from([16, 32, 64]),
    st.none() | st.integers(1, 70),
    st.none() | st.just(5.0),
    st.sampled_from(["float32", "bfloat16"]),
    threads,
    seeds,
)
def test_attention_is_batch_invariant(tokens, heads, head_dim, block_size, window, soft_cap, dtype, threads, seed):
    """A prompt at once, and in chunks of any sizes, beside another sequence that begins with the same."""
    rng, (kv_heads, group) = np.random.default_rng(seed), heads
    case = Case(tokens, 2, kv_heads * group, kv_heads, head_dim, block_size, sliding_window=window, soft_cap=soft_cap)
    dtype = np.dtype(BF16 if dtype == "bfloat16" else dtype)
    q = rng.normal(size=(tokens, kv_heads * group, head_dim)).astype(dtype)
    k, v = rng.normal(size=(2, tokens, kv_heads, head_dim)).astype(dtype)
    num_blocks = -(-tokens // block_size)
    tables = rng.permutation(2 * num_blocks).astype(np.int32).reshape(2, num_blocks)
    cuts = sorted(rng.choice(tokens + 1, size=min(4, tokens), replace=False).tolist())

    def attend(pool, spans):
        """Of sequences that have their tokens from `begin` to `end` computed."""
        rows = np.concatenate([np.arange(*span) for span in spans])
        lens = np.array([end - begin for begin, end in spans])
        batch = (tables[: len(spans)], np.cumsum([0, *lens]), [end for _, end in spans], [0, len(spans)])
        batch = [np.asarray(x, np.int32) for x in batch]
        options = {"case": case, "batch_invariant": True, "threads": threads}
        out, pool = attention(q[rows], k[rows], v[rows], pool, batch, **options)
        return out[: lens[0]].astype(np.float32), pool

    def of_one_set():
        empty = np.full((2 * num_blocks, 2, kv_heads, block_size, head_dim), np.nan, dtype)
        whole, _ = attend(empty, [(0, tokens)])
        pool, parts = empty, []
        for begin, end in zip([0, *cuts], [*cuts, tokens], strict=True):
            if begin < end:
                part, pool = attend(pool, [(begin, end), (0, int(rng.integers(1, tokens + 1)))])
                parts.append(part)
        np.testing.assert_array_equal(np.concatenate(parts), whole)

    with_each_set(of_one_set)


@fuzzed
@given(
    st.integers(0, 300),
    st.integers(1, 4),
    st.integers(1, 70),
    st.integers(0, 30),
    st.booleans(),
    dtypes,
    threads,
    seeds,
)
def test_rotations(tokens, heads, pairs, rest, interleaved, dtype, threads, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, heads, 2 * pairs + rest)).astype(dtype)
    angle = rng.normal(size=(tokens, pairs))
    sin, cos = np.sin(angle).astype(np.float32), np.cos(angle).astype(np.float32)
    want = x.astype(np.float64)
    places = np.arange(2 * pairs).reshape(pairs, 2) if interleaved else np.arange(2 * pairs).reshape(2, pairs).T
    first, second = (want[..., part].copy() for part in places.T)
    want[..., places[:, 0]] = first * cos[:, None] - second * sin[:, None]
    want[..., places[:, 1]] = second * cos[:, None] + first * sin[:, None]
    used, count = some_rows(x, rng)

    def of_one_set():
        options = {"interleaved": interleaved, "threads": threads}
        got = call("jaxllm_rotate", [x, sin, cos, count], [(x.shape, dtype)], **options)[0][:used]
        limit = TOLERANCE[got.dtype.name]
        np.testing.assert_allclose(got.astype(np.float64), want[:used], rtol=limit, atol=4 * limit)
        np.testing.assert_array_equal(got[..., 2 * pairs :], x[:used, ..., 2 * pairs :])

    with_each_set(of_one_set)


@fuzzed
@given(
    st.integers(0, 300), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.booleans(), dtypes, threads, seeds
)
def test_rotations_of_queries_keys_and_values(tokens, kv_heads, group, pairs, interleaved, dtype, threads, seed):
    """As each of them by itself."""
    rng = np.random.default_rng(seed)
    qkv = rng.normal(size=(tokens, kv_heads, group + 2, 2 * pairs)).astype(dtype)
    angle = rng.normal(size=(tokens, pairs))
    sin, cos = np.sin(angle).astype(np.float32), np.cos(angle).astype(np.float32)
    used, count = some_rows(qkv, rng)
    options = {"interleaved": interleaved, "threads": threads}

    def of_one_set():
        shapes = [(tokens, heads, 2 * pairs) for heads in (kv_heads * group, kv_heads, kv_heads)]
        got = call("jaxllm_rotate_qkv", [qkv, sin, cos, count], [(shape, dtype) for shape in shapes], **options)
        want = [np.ascontiguousarray(part).reshape(shapes[i]) for i, part in enumerate(_apart(qkv))]
        for i, part in enumerate(want[:2]):
            (want[i],) = call("jaxllm_rotate", [part, sin, cos, count], [(part.shape, dtype)], **options)
        for each, expected in zip(got, want, strict=True):
            np.testing.assert_array_equal(each[:used].astype(np.float32), expected[:used].astype(np.float32))

    with_each_set(of_one_set)


def _apart(qkv):
    return qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]


@fuzzed
@given(st.integers(0, 200), st.integers(1, 300), st.booleans(), dtypes, threads, seeds)
def test_gated_activations(tokens, width, is_gelu, dtype, threads, seed):
    rng = np.random.default_rng(seed)
    both = (rng.normal(size=(tokens, 2, width)) * 10.0 ** rng.integers(-3, 3, (tokens, 2, 1))).astype(dtype)
    gate, up = np.moveaxis(both.astype(np.float64), 1, 0)
    slope = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3) if is_gelu else gate
    with np.errstate(over="ignore"):
        want = gate / (1 + np.exp(-slope)) * up
    used, count = some_rows(both, rng)

    def of_one_set():
        results = [((tokens, width), dtype)]
        (got,) = call("jaxllm_gated", [both, count], results, is_gelu=is_gelu, threads=threads)
        limit = TOLERANCE[got.dtype.name] * (1e-6 + np.abs(gate * up))
        assert (np.abs(got.astype(np.float64) - want) <= limit)[:used].all()

    with_each_set(of_one_set)


@fuzzed
@given(st.integers(0, 200), st.integers(1, 300), dtypes, threads, seeds)
def test_sums(rows, width, dtype, threads, seed):
    rng = np.random.default_rng(seed)
    x, added = (rng.normal(size=(rows, width)).astype(dtype) for _ in range(2))
    used, count = some_rows(x, rng)
    want = (x.astype(np.float32) + added.astype(np.float32)).astype(dtype)

    def of_one_set():
        (got,) = call("jaxllm_add", [x, added, count], [(x.shape, dtype)], threads=threads)
        np.testing.assert_array_equal(*(each[:used].astype(np.float32) for each in (got, want)))

    with_each_set(of_one_set)


@fuzzed
@given(
    st.integers(0, 200),
    st.integers(1, 300),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    dtypes,
    dtypes,
    threads,
    seeds,
)
def test_rms_norms(rows, width, has_added, unit_offset, scales_first, dtype, scale_dtype, threads, seed):
    rng = np.random.default_rng(seed)
    x, added = (rng.normal(size=(rows, width)).astype(dtype) for _ in range(2))
    scale = rng.normal(size=width).astype(scale_dtype)
    used, count = some_rows(x, rng)
    more = added if has_added else added[:0]
    total = (x.astype(np.float32) + added.astype(np.float32)).astype(dtype) if has_added else x
    wide = total.astype(np.float64)
    factor = 1 / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 1e-5)
    want = wide * factor * (scale.astype(np.float64) + (unit_offset and scales_first))
    options = {"eps": np.float32(1e-5), "unit_offset": unit_offset and scales_first, "scales_first": scales_first}

    def of_one_set():
        results = [(more.shape, dtype), (x.shape, dtype)]
        got_total, got = call("jaxllm_rms_norm", [x, more, scale, count], results, threads=threads, **options)
        if has_added:
            np.testing.assert_array_equal(*(each[:used].astype(np.float32) for each in (got_total, total)))
        limit = 2 * TOLERANCE[got.dtype.name]
        np.testing.assert_allclose(got[:used].astype(np.float64), want[:used], rtol=limit, atol=1e-30)

    with_each_set(of_one_set)


@fuzzed
@given(
    moves=st.lists(st.tuples(st.integers(-2, 10), st.integers(-2, 10)), max_size=8, unique_by=lambda move: move[1]),
    num_blocks=st.integers(1, 9),
    size=st.integers(1, 70) | st.sampled_from([16 << 10, (16 << 10) + 1, 40_001]),
    threads=threads,
    seed=seeds,
)
def test_copies_of_blocks(moves, num_blocks, size, threads, seed):
    """What is outside of the pool is padding."""
    pool = np.random.default_rng(seed).integers(-128, 128, (num_blocks, size)).astype(np.int8)
    want = pool.copy()
    for source, target in moves:
        if 0 <= source < num_blocks and 0 <= target < num_blocks:
            want[target] = pool[source]
    arguments = [pool, np.array(moves, np.int32).reshape(-1, 2).T.copy()]
    (got,) = call("jaxllm_copy_blocks", arguments, [(pool.shape, np.int8)], aliases={0: 0}, threads=threads)
    np.testing.assert_array_equal(got, want)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 100) | st.integers(4 << 20, 9 << 20))
def test_zeros(size):
    """From 4 MB on, whole huge pages are given back to the system rather than written."""
    (got,) = call("jaxllm_zeros", [], [((size,), np.uint8)])
    assert got.shape == (size,) and not got.any()
