"""Rows of beam candidates against numpy, and that they lower for every platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.beam.candidates import CANDIDATES_WIDTH, NUM_CANDIDATES, read_candidates
from jaxllm.engine.device.candidates import candidate_rows
from jaxllm.engine.logprobs import LEAST

ROWS = 3
make_rows = jax.jit(candidate_rows)


def check_against_numpy(scores, logits):
    rows = np.asarray(make_rows(jnp.asarray(scores), jnp.asarray(logits)))
    assert rows.shape == (len(scores), CANDIDATES_WIDTH) and rows.dtype == np.int32
    for row, row_scores, row_logits in zip(rows, scores, logits, strict=True):
        want = np.argsort(-row_scores, kind="stable")[:NUM_CANDIDATES]
        want = want[row_scores[want] > -np.inf]
        got = read_candidates(row, NUM_CANDIDATES)
        assert got.token_ids.tolist() == want.tolist()
        assert got.scores.tolist() == row_scores[want].tolist()
        exact = row_logits.astype(np.float64)
        logprobs = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
        np.testing.assert_allclose(got.logprobs, np.maximum(logprobs, LEAST)[want], atol=1e-5)
        assert got.ranks.tolist() == [1 + int((row_logits > x).sum()) for x in row_logits[want]]
        few = read_candidates(row, 5)
        assert all(a.tolist() == b[:5].tolist() for a, b in zip(few, got, strict=True))
    return rows


def normal(vocab, seed=0):
    return np.random.default_rng(seed).normal(size=(ROWS, vocab)).astype(np.float32) * 3


def log_softmax(logits):
    return np.array(jax.nn.log_softmax(jnp.asarray(logits)))


@pytest.mark.parametrize("vocab", [8, NUM_CANDIDATES, 200])
def test_candidates_are_the_best_of_the_model(vocab):
    logits = normal(vocab)
    check_against_numpy(log_softmax(logits), logits)


@pytest.mark.parametrize("vocab", [8, 200])
def test_candidates_are_the_best_of_what_is_left(vocab):
    """Bias and masks bring up tokens that the model finds unlikely: other ranks, and few candidates in some rows."""
    logits = normal(vocab)
    scores = log_softmax(logits) + normal(vocab, seed=1)
    scores[0, logits[0] > 0] = -np.inf
    scores[1, 3:] = -np.inf
    scores[2] = -np.inf
    rows = check_against_numpy(scores, logits)
    assert len(read_candidates(rows[1], NUM_CANDIDATES).token_ids) == 3
    assert len(read_candidates(rows[2], NUM_CANDIDATES).token_ids) == 0


@pytest.mark.parametrize("alter", [lambda x: x, lambda x: np.where(x > 0, -np.inf, x), lambda x: 0.0 - x])
def test_ties(alter):
    """The smaller id first; tied tokens have one rank, also at the last candidate."""
    logits = np.round(normal(200) / 2) + 0.0  # -0.0 counts as less than 0.0
    check_against_numpy(alter(logits), logits)


def test_a_token_that_the_model_excludes_has_the_least_log_probability():
    logits = normal(200)
    scores = log_softmax(logits)
    logits[:, 5], scores[:, 5] = -np.inf, 0.0
    rows = check_against_numpy(scores, logits)
    for row in rows:
        best = read_candidates(row, 1)
        assert (best.token_ids[0], best.logprobs[0], best.ranks[0]) == (5, LEAST, 200)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lowers_without_a_copy_of_the_vocabulary_for_each_candidate(platform):
    rows = jax.ShapeDtypeStruct((ROWS, 200), jnp.float32)
    text = make_rows.trace(rows, rows).lower(lowering_platforms=(platform,)).as_text()
    assert "3x64x" in text and "x200x" in text
    assert not any(dims in text for dims in ("3x64x200x", "3x200x64x", "64x3x200x"))
