"""The full sampler's bias, penalties, masks and log-probabilities against numpy, and the rows it needs for them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.engine.beam.candidates import read_candidates
from jaxllm.engine.beam.group import BeamSearchGroup
from jaxllm.engine.device.logprobs import logprob_rows
from jaxllm.engine.device.packing import BAD_WORD_LEN, PENALTY_IDS, AdmitLayout, PenaltyLayout
from jaxllm.engine.device.sampler import sample_full
from jaxllm.engine.device.state import empty_penalties, empty_slots, install_penalties, install_rows
from jaxllm.engine.logprobs import LEAST, pack_logprobs, to_logprobs
from jaxllm.engine.schedule.plan import NO_TOKEN, NOT_FINITE
from jaxllm.engine.schedule.sequence import Sequence
from jaxllm.sampling_params import MAX_LOGPROBS, SamplingParams

SLOTS, VOCAB, DRAWS = 5, 24, 4000
EXTRAS, ADMIT = PenaltyLayout(VOCAB), AdmitLayout(SLOTS, SLOTS, 1)
quick = settings(max_examples=50, deadline=None)
put = jax.jit(lambda extras, packed: install_penalties(extras, EXTRAS.unpack(packed)))
admit = jax.jit(lambda slots, table, packed: install_rows(slots, table, ADMIT.unpack(packed)))
run = jax.jit(sample_full)


def make_request(slot, prompt=(1,), output=(), bad_words=(), **params):
    """`bad_words` are token ids here."""
    params = SamplingParams(max_tokens=None, bad_words=["word"] * bool(bad_words), **params)
    return Sequence(
        prompt_token_ids=list(prompt),
        params=params,
        arrival=0,
        seed=slot,
        max_total_len=99,
        output_token_ids=list(output),
        slot=slot,
        bad_words=[list(word) for word in bad_words],
    )


def install(requests, extras=None):
    """The tables after the requests were admitted, over rows full of rubbish."""
    if extras is None:
        rng, empty = np.random.default_rng(1), empty_penalties(SLOTS, VOCAB)
        extras = jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 9, x.shape), x.dtype), empty)
    for request in requests:
        for packed in EXTRAS.pack(request) if request.needs_penalties else []:
            extras = put(extras, packed)
    slots, table = admit(*empty_slots(SLOTS, 1), ADMIT.pack([(request, 0) for request in requests]))
    return slots.length, table, extras


def step(logits, requests, extras=None, lengths=None):
    """Tokens, extras, logprob rows and beams' candidates of one draw, a row for each request."""
    base, table, extras = install(requests, extras)
    base = base if lengths is None else jnp.asarray(lengths, jnp.int32)
    rows = jnp.asarray([r.slot for r in requests], jnp.int32)
    return run(jnp.asarray(logits, jnp.float32), rows, base, table, extras)


def altered_by_numpy(logits, request):
    """What the request's parameters make of a row of logits, in float64, said plainly."""
    p, prompt, output = request.params, request.prompt_token_ids, request.output_token_ids
    x = logits.astype(np.float64)
    if p.allowed_token_ids is not None:
        x[[i for i in range(VOCAB) if i not in p.allowed_token_ids]] = -np.inf
    for *prefix, last in request.bad_words:
        if output[len(output) - len(prefix) :] == prefix:
            x[last] = -np.inf
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in set(prompt) | set(output):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(output):
        x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    return x


tokens = st.integers(0, VOCAB - 1)
requests = st.fixed_dictionaries(
    {
        "prompt": st.lists(tokens, min_size=1, max_size=40),
        "output": st.lists(tokens, max_size=12),
        "bad_words": st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=6),
        "presence_penalty": st.sampled_from([0.0, 1.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.5, -1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
        "logit_bias": st.dictionaries(tokens, st.floats(-5, 5, width=32), max_size=5),
        "allowed_token_ids": st.none() | st.lists(tokens, min_size=1, max_size=20),
        "temperature": st.just(0.0),
    }
)


three = st.lists(requests, min_size=3, max_size=3)


@quick
@given(given_requests=three, seed=st.integers(0, 99), slots=st.permutations(range(SLOTS)))
def test_greedy_token_is_the_best_after_bias_masks_and_penalties(given_requests, seed, slots):
    for fields in given_requests:  # what a bad word is compared with must be there now and then
        if fields["output"] and fields["bad_words"]:
            fields["bad_words"].append([fields["output"][-1], *fields["bad_words"][0][:1]])
            fields["bad_words"][0] = fields["bad_words"][0][-1:]
    made = [make_request(slot, **fields) for slot, fields in zip(slots, given_requests, strict=False)]
    logits = np.random.default_rng(seed).normal(size=(3, VOCAB)).astype(np.float32) * 3
    chosen, _, _, _ = step(logits, made)
    for row, request, token in zip(logits, made, chosen.tolist(), strict=True):
        want = altered_by_numpy(row, request)
        assert (token == NO_TOKEN) == bool(np.isneginf(want).all())
        assert token == NO_TOKEN or want[token] > want.max() - 1e-4


@quick
@given(fields=requests, seed=st.integers(0, 99))
def test_candidates_of_a_beam_are_the_best_after_bias_masks_and_penalties(fields, seed):
    """Of its log-probabilities, which nothing normalises again; what a sample beside it gets is as without it."""
    fields["temperature"] = 0.0
    sample, beam = make_request(0, temperature=0.0), make_request(3, beam_width=2, **fields)
    BeamSearchGroup([beam, make_request(4, beam_width=2)])
    logits = np.random.default_rng(seed).normal(size=(2, VOCAB)).astype(np.float32) * 3
    chosen, _, _, rows = step(logits, [sample, beam])
    assert chosen[0] == logits[0].argmax()
    exact = logits[1].astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum())
    want = altered_by_numpy(exact, beam)
    found = read_candidates(np.asarray(rows[1]), VOCAB)
    assert set(found.token_ids.tolist()) == set(np.flatnonzero(want > -np.inf).tolist())
    np.testing.assert_allclose(found.scores, want[found.token_ids], atol=1e-4)
    np.testing.assert_allclose(found.logprobs, exact[found.token_ids], atol=1e-5)
    assert np.all(np.diff(found.scores) <= 0)


def test_rows_that_ask_for_nothing_are_not_altered():
    logits = np.random.default_rng(0).normal(size=(2, VOCAB)).astype(np.float32)
    plain = make_request(3, temperature=0.0)
    biased = make_request(1, temperature=0.0, logit_bias={5: 100.0})
    chosen, _, _, _ = step(logits, [plain, biased])
    assert chosen.tolist() == [logits[0].argmax(), 5]


def test_each_token_counts_from_then_on():
    """Twelve draws of one request: the extras on the device say at each what the host would."""
    request = make_request(
        2,
        prompt=[4, 4, 7],
        frequency_penalty=0.7,
        presence_penalty=0.4,
        repetition_penalty=1.2,
        temperature=0.0,
        logit_bias={9: 1.0},
        bad_words=[[3, 5], [5, 5, 5], [11]],
    )
    logits = np.random.default_rng(3).normal(size=(1, VOCAB)).astype(np.float32)
    length, table, extras = install([request])
    for i in range(12):
        chosen, extras, _, _ = run(jnp.asarray(logits), jnp.asarray([2], jnp.int32), length + i, table, extras)
        want = altered_by_numpy(logits[0], request)
        assert want[int(chosen[0])] > want.max() - 1e-4
        request.output_token_ids.append(int(chosen[0]))
    assert len(set(request.output_token_ids)) > 4


def test_padding_and_rows_without_a_token_change_no_extras():
    request = make_request(1, frequency_penalty=1.0)
    length, table, extras = install([request])
    bad = jnp.full((2, VOCAB), jnp.nan)
    chosen, after, _, _ = run(bad, jnp.asarray([1, SLOTS], jnp.int32), length, table, extras)
    assert chosen.tolist()[0] == NOT_FINITE
    for old, new in zip(extras, after, strict=True):
        np.testing.assert_array_equal(old, new)


def test_long_lists_take_several_parts():
    vocab = 3 * PENALTY_IDS
    layout = PenaltyLayout(vocab)
    allowed = list(range(1, vocab, 2))
    request = make_request(0, prompt=range(0, vocab, 3), allowed_token_ids=allowed, repetition_penalty=2.0)
    parts = layout.pack(request)
    assert len(parts) == -(-len(set(allowed) | set(range(0, vocab, 3))) // PENALTY_IDS) > 1
    extras = empty_penalties(2, vocab)
    for packed in parts:
        extras = jax.jit(lambda e, p: install_penalties(e, layout.unpack(p)))(extras, packed)
    assert np.isneginf(extras.bias[0]).nonzero()[0].tolist() == list(range(0, vocab, 2))
    assert extras.in_prompt[0].nonzero()[0].tolist() == list(range(0, vocab, 3))
    assert not extras.bias[1].any() and not extras.in_prompt[1].any()


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"logit_bias": {0: 1.0, 3: -1.0}},
        {"allowed_token_ids": [1, 2, 5]},
        {"frequency_penalty": -0.5, "presence_penalty": 0.5, "repetition_penalty": 0.8, "logit_bias": {2: 0.7}},
        {"logit_bias": {1: 0.5}, "temperature": 1.6, "top_k": 4},
    ],
)
def test_draws_follow_the_altered_distribution(params):
    logits = np.full(VOCAB, -30.0)
    logits[:8] = [1.0, 0.5, 0.5, 0.0, -0.5, -1.0, -2.0, 0.2]
    request = make_request(0, prompt=[0, 3], output=[1, 1, 4], **params)
    length, table, extras = install([request])
    rows = jnp.asarray([logits], jnp.float32)
    draw = partial(draw_at, logits=rows, length=length, table=table, extras=extras)
    drawn = np.asarray(jax.jit(jax.vmap(draw))(jnp.arange(DRAWS, dtype=jnp.int32)))
    scaled = altered_by_numpy(logits, request) / params.get("temperature", 1.0)
    if params.get("top_k"):
        scaled[scaled < np.sort(scaled)[-params["top_k"]]] = -np.inf
    expected = np.exp(scaled - scaled.max())
    expected *= DRAWS / expected.sum()
    counts = np.bincount(drawn, minlength=VOCAB)
    likely = expected > 5
    assert counts[expected < 1e-6].sum() == 0 and likely.sum() > 2
    assert ((counts - expected)[likely] ** 2 / expected[likely]).sum() < 40  # chi-squared, at most 7 degrees


def draw_at(position, *, logits, length, table, extras):
    """The token at a position, which is part of the draw's key."""
    return sample_full(logits, jnp.zeros(1, jnp.int32), length + position, table, extras)[0][0]


def test_logprobs_are_the_true_top_of_the_unaltered_distribution():
    logits = np.random.default_rng(0).normal(size=(3, VOCAB)).astype(np.float32) * 4
    watching = make_request(0, logprob_token_ids=[3, 20], temperature=0.0)
    penalized = make_request(1, logprobs=5, temperature=0.0, allowed_token_ids=[7])
    plain = make_request(2, logprobs=0, temperature=0.7)
    chosen, _, rows, candidates = step(logits, [watching, penalized, plain])
    exact = logits.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert not candidates.any(), "there are no beams"

    def of(i, request):
        kept = pack_logprobs(
            np.asarray(rows[i]), request.params.num_top_logprobs, request.params.logprob_token_ids or ()
        )
        return to_logprobs(int(chosen[i]), kept, request.params.num_top_logprobs, str)

    seen = of(0, watching)
    assert set(seen) == {int(chosen[0]), 3, 20} and seen[int(chosen[0])].rank == 1
    assert seen[3].logprob == pytest.approx(exact[0, 3], abs=1e-5) and seen[3].decoded_token == "3"
    seen = of(1, penalized)
    order = np.argsort(-exact[1], kind="stable")
    assert [i for i in seen if i != 7] == [i for i in order[:5].tolist() if i != 7]
    assert seen[7].rank == order.tolist().index(7) + 1 and next(iter(seen)) == 7
    for i, logprob in seen.items():
        assert logprob.logprob == pytest.approx(exact[1, i], abs=1e-5)
    assert set(of(2, plain)) == {int(chosen[2])}


def test_impossible_tokens_have_a_finite_logprob():
    logits = jnp.full((1, VOCAB), -jnp.inf).at[0, 2].set(1.0)
    row = np.asarray(jax.jit(logprob_rows)(logits, jnp.asarray([2], jnp.int32)))[0]
    seen = to_logprobs(2, pack_logprobs(row, 3), 3, lambda i: None)
    assert seen[2].logprob == 0.0 and {seen[i].logprob for i in seen if i != 2} == {LEAST}


def test_a_vocabulary_smaller_than_the_most_logprobs():
    row = np.asarray(jax.jit(logprob_rows)(jnp.zeros((1, 7)), jnp.asarray([3], jnp.int32)))[0]
    assert MAX_LOGPROBS > 7 and set(to_logprobs(3, pack_logprobs(row, 7), 7, str)) == set(range(7))


def test_bad_words_are_matched_up_to_their_full_length():
    word = list(range(BAD_WORD_LEN))
    logits = np.zeros((1, VOCAB))
    logits[0, word[-1]] = 5
    whole = make_request(0, output=[9, *word[:-1]], bad_words=[word], temperature=0.0)
    broken = make_request(0, output=[9, *word[1:-1]], bad_words=[word], temperature=0.0)
    assert step(logits, [whole])[0].tolist() != [word[-1]] == step(logits, [broken])[0].tolist()
