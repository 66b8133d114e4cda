"""Sampling natively: any vocabularies, in memory that ends where the arrays do, by every instruction set that this CPU
has, against numpy in float64.
"""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.sampling import reference
from tests.pallas_kernels.guarded import FILL, call, fuzzed, with_each_set

pytestmark = pytest.mark.skipif(not native.is_built(), reason="not built: python -m jaxllm.pallas_kernels.native.build")

DRAWS = 4  # rows
VOCABULARIES = (1, 5, 16, 33, 301, 2100)  # of draws, whose noise is compiled for each
threads, seeds = st.integers(1, 3), st.integers(0, 2**16)
vocabularies = st.integers(1, 100) | st.sampled_from([255, 256, 1000, 4096, 9001])


@st.composite
def logits_of(draw, rows, vocab):
    """Of any scale, some with ties; some tokens are forbidden or weigh more than all others."""
    rng = np.random.default_rng(draw(seeds))
    logits = rng.normal(size=(rows, vocab)) * draw(st.sampled_from([0.0, 0.01, 1, 3, 30]))
    if draw(st.booleans()):
        logits = np.round(logits * 4) / 4
    for value in draw(st.lists(st.sampled_from([-np.inf, -3e38, 3e38, 88.0]), max_size=2)):
        logits[rng.random(logits.shape) < rng.choice([0.5, 0.01])] = value
    return logits.astype(np.float32) + np.float32(0)  # of zeros the kernels know two, and numpy one


@st.composite
def counts_of(draw, rows):
    """How many rows are no padding, as custom calls take it, and the number."""
    used = draw(st.none() | st.integers(0, rows + 1))
    return np.array([] if used is None else [used], np.int32), rows if used is None else min(used, rows)


def is_untouched(results: np.ndarray) -> bool:
    return bool((np.frombuffer(results.tobytes(), np.uint8) == FILL).all())


@fuzzed
@given(data=st.data(), rows=st.integers(0, 5), vocab=vocabularies, threads=threads)
def test_normalizers(data, rows, vocab, threads):
    logits, (counts, used) = data.draw(logits_of(rows, vocab)), data.draw(counts_of(rows))
    if rows and data.draw(st.booleans()):
        logits[0, data.draw(st.integers(0, vocab - 1))] = data.draw(st.sampled_from([np.nan, np.inf]))
    top, wide = logits.max(axis=1), logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        total = wide.max(axis=1) + np.log(np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1))
    want = np.where(np.isfinite(top), total, top)

    def of_one_set():
        results = [((rows,), np.float32)] * 2
        got_top, got = call("jaxllm_normalize", [logits, counts], results, threads=threads)
        np.testing.assert_array_equal(got_top[:used], top[:used])
        np.testing.assert_allclose(got[:used], want[:used].astype(np.float32), rtol=1e-6, atol=2e-6)
        assert all(is_untouched(x[used:]) for x in (got_top, got))

    with_each_set(of_one_set)


@fuzzed
@given(data=st.data(), rows=st.integers(0, 4), vocab=vocabularies, k=st.integers(0, 70), threads=threads)
def test_best(data, rows, vocab, k, threads):
    """Best first, the smaller id first among equals; tokens outside of the vocabulary are its ends."""
    scores, logits, k = *(data.draw(logits_of(rows, vocab)) for _ in range(2)), min(k, vocab)
    tokens = np.random.default_rng(vocab).integers(-2, vocab + 2, (rows, data.draw(st.integers(0, 3)))).astype(np.int32)
    counts, used = data.draw(counts_of(rows))
    want = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    own = np.take_along_axis(logits, np.concatenate([want, tokens.clip(0, vocab - 1)], axis=1), axis=1)
    want_ranks = 1 + (logits[:, None, :] > own[:, :, None]).sum(axis=-1)

    def of_one_set():
        columns = own.shape[1]
        shapes = ((k, np.int32), (k, np.float32), (columns, np.float32), (columns, np.int32))
        results = [((rows, width), dtype) for width, dtype in shapes]
        all_found = call("jaxllm_best", [scores, logits, tokens, counts], results, threads=threads)
        ids, found, got_own, ranks = (x[:used] for x in all_found)
        np.testing.assert_array_equal(ids, want[:used])
        np.testing.assert_array_equal(found, np.take_along_axis(scores, want, axis=1)[:used])
        np.testing.assert_array_equal(got_own, own[:used])
        has_rank = np.concatenate([found > -np.inf, np.ones(tokens[:used].shape, bool)], axis=1)
        np.testing.assert_array_equal(ranks[has_rank], want_ranks[:used][has_rank])
        assert all(is_untouched(x[used:]) for x in all_found)

    with_each_set(of_one_set)


def kept_by(scaled, top_k, top_p, min_p):
    """Which of a row, whose largest is 0, min-p, top-k and top-p keep, one after the other."""
    weights = np.exp(scaled)
    keep = weights >= min_p
    if 0 < top_k < keep.sum():
        keep &= scaled >= np.sort(scaled[keep])[-top_k]
    if top_p < 1:
        order = np.sort(scaled[keep])[::-1]
        sums = np.cumsum(np.exp(order))
        keep &= scaled >= order[np.argmax(sums >= top_p * sums[-1])]
    return keep


noise_of = jax.jit(reference.gumbel, static_argnums=1)
filters = st.tuples(
    st.sampled_from([0.0, 0.1, 0.7, 1.0, 30.0]),  # temperature
    st.sampled_from([0, 1, 2, 5, 40, 299, 2**31 - 1]),  # top-k
    st.sampled_from([1.0, 1e-9, 0.1, 0.5, 0.9, 0.99]),  # top-p
    st.sampled_from([0.0, 1e-6, 0.1, 0.5, 1.0]),  # min-p
)


@fuzzed
@given(
    data=st.data(),
    vocab=st.sampled_from(VOCABULARIES),
    filters=st.lists(filters, min_size=DRAWS, max_size=DRAWS),
    partitionable=st.booleans(),
    threads=threads,
    seed=seeds,
)
def test_draws(data, vocab, filters, partitionable, threads, seed):
    """The winner of what the filters keep with the noise of jax.random, unless another is within rounding."""
    logits = data.draw(logits_of(DRAWS, vocab))
    keys = np.random.default_rng(seed).integers(0, 2**32, (DRAWS, 2), dtype=np.uint32)
    with jax.threefry_partitionable(partitionable):
        noise = np.asarray(noise_of(keys, vocab), np.float64)
    columns = list(zip(*filters, strict=True))
    temperature, top_p = (np.array(columns[i], np.float32) for i in (0, 2))
    with np.errstate(divide="ignore"):
        at_least = np.log(np.array(columns[3], np.float32))
    arguments = [logits, temperature, np.array(columns[1], np.int32), top_p, at_least, keys]
    top = logits.max(axis=1)

    def of_one_set():
        results = [((DRAWS,), np.int32), ((DRAWS,), np.float32)]
        tokens, got_top = call("jaxllm_draw", arguments, results, threads=threads, partitionable=partitionable)
        np.testing.assert_array_equal(got_top, top)
        assert ((tokens >= 0) & (tokens < vocab)).all()
        for row, (heat, k, p, m) in enumerate(filters):
            if heat == 0 or not np.isfinite(top[row]):
                assert tokens[row] == np.argmax(logits[row])
                continue
            scaled = (logits[row].astype(np.float64) - top[row]) / np.float32(heat)
            fewest = kept_by(scaled, k, p - 1e-5 if p < 1 else 1, min(1, m * (1 + 1e-5)))
            most = kept_by(scaled, k, min(1, p + 1e-5), m * (1 - 1e-5))
            score = scaled + noise[row]
            assert most[tokens[row]] and score[tokens[row]] >= score[fewest].max() - 1e-4

    with_each_set(of_one_set)
