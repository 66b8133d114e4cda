"""Bias, penalties, masks and log-probabilities against numpy, and the rows and the history that they come from."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.engine.beam.candidates import read_candidates
from jaxllm.engine.beam.group import BeamSearchGroup
from jaxllm.engine.device.logit_rules import alter
from jaxllm.engine.device.logprobs import logprob_rows
from jaxllm.engine.device.sampler import sample_full
from jaxllm.engine.device.state import SAMPLING_LAYOUT, Slots, rules_layout
from jaxllm.engine.logprobs import LEAST, pack_logprobs, to_logprobs
from jaxllm.engine.schedule.plan import NO_TOKEN, NOT_FINITE
from jaxllm.engine.schedule.sequence import Sequence
from jaxllm.engine.schedule.sequence_group import Samples
from jaxllm.grammar.matcher import mask_words
from jaxllm.pallas_kernels.token_counts.reference import CHUNK
from jaxllm.sampling_params import BAD_WORD_LEN, MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams

SLOTS, VOCAB, DRAWS, BLOCK_SIZE = 5, 24, 4000, 4
RULES = rules_layout(VOCAB)
quick = settings(max_examples=50, deadline=None)
run_alter, run_full = jax.jit(alter), jax.jit(sample_full)
everything = np.full((1, mask_words(VOCAB)), -1, np.int32)


def make_request(slot, prompt=(1,), output=(), bad_words=(), **params):
    """`bad_words` are token ids here."""
    params = SamplingParams(max_tokens=None, bad_words=["word"] * bool(bad_words), **params)
    request = Sequence(
        prompt_token_ids=list(prompt),
        params=params,
        arrival=0,
        seed=slot,
        max_total_len=99,
        own_token_ids=list(output),
        slot=slot,
        bad_words=[list(word) for word in bad_words],
    )
    Samples([request])
    return request


def install(requests, blocks_per_seq=16):
    """Slots, tables and the history of the requests' tokens, over rows and blocks full of rubbish."""
    rng = np.random.default_rng(1)

    def rubbish(tables):
        return jax.tree.map(lambda x: np.asarray(rng.integers(0, 9, x.shape)).astype(x.dtype), tables)

    history = rng.integers(0, VOCAB, (SLOTS * blocks_per_seq, BLOCK_SIZE), np.int32)
    blocks = rng.permutation(len(history)).astype(np.int32).reshape(SLOTS, blocks_per_seq)
    lengths = np.zeros(SLOTS, np.int32)
    table, rules = rubbish(SAMPLING_LAYOUT.empty(SLOTS)), rubbish(RULES.empty(SLOTS))
    for request in requests:
        known = request.prompt_token_ids + request.output_token_ids
        lengths[request.slot] = len(known)
        for position, token in enumerate(known):
            history[blocks[request.slot, position // BLOCK_SIZE], position % BLOCK_SIZE] = token
        for layout, into in ((SAMPLING_LAYOUT, table), (RULES, rules)):
            if layout is SAMPLING_LAYOUT or request.params.has_rules:
                row = layout.unpack(jnp.asarray(layout.pack(request))[None])
                for column, values in zip(into, row, strict=True):
                    column[request.slot] = values[0]
    slots = Slots((blocks[:, None],), lengths, np.zeros(SLOTS, np.int32))
    return jax.tree.map(jnp.asarray, (slots, table, rules, history))


def altered(logits, requests, blocks_per_seq=16):
    """The logits after what the requests ask for, a row for each, and the tables."""
    slots, table, rules, history = install(requests, blocks_per_seq)
    rows = jnp.asarray([r.slot for r in requests], jnp.int32)
    masks = everything.repeat(len(requests), axis=0)
    return run_alter(jnp.asarray(logits, jnp.float32), masks, rows, slots, table, rules, history), slots, table, rules


def step(logits, requests):
    """Tokens, logprob rows and beams' candidates of one draw, a row for each request."""
    after, slots, table, rules = altered(logits, requests)
    rows = jnp.asarray([r.slot for r in requests], jnp.int32)
    return run_full(jnp.asarray(logits, jnp.float32), rows, slots.length, table, rules, altered=after)


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
    chosen, _, _ = step(logits, made)
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
    chosen, _, rows = step(logits, [sample, beam])
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
    after, *_ = altered(logits, [plain, biased])
    np.testing.assert_array_equal(after[0], logits[0])
    chosen, _, _ = step(logits, [plain, biased])
    assert chosen.tolist() == [logits[0].argmax(), 5]


def test_each_token_counts_from_then_on():
    """Twelve draws of one request: what the device makes of its history is at each what the host would."""
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
    for _ in range(12):
        chosen, _, _ = step(logits, [request])
        want = altered_by_numpy(logits[0], request)
        assert want[int(chosen[0])] > want.max() - 1e-4
        request.output_token_ids.append(int(chosen[0]))
    assert len(set(request.output_token_ids)) > 4


def test_a_long_history_is_counted_to_its_end():
    """Beside a short one, and one that does not count."""
    rng = np.random.default_rng(5)
    long = make_request(0, prompt=rng.integers(0, 9, 2 * CHUNK).tolist(), output=[17, 17, 3], frequency_penalty=0.5)
    short = make_request(1, prompt=[1], output=[2], repetition_penalty=3.0, presence_penalty=1.0)
    other = make_request(2, prompt=rng.integers(0, 9, 3 * CHUNK).tolist())
    logits = rng.normal(size=(3, VOCAB)).astype(np.float32)
    after, *_ = altered(logits, [long, short, other], blocks_per_seq=3 * CHUNK // BLOCK_SIZE + 1)
    for row, request in enumerate((long, short, other)):
        np.testing.assert_allclose(after[row], altered_by_numpy(logits[row], request), atol=1e-5)


def test_masks_of_grammars_and_of_a_request_both_count():
    request = make_request(3, allowed_token_ids=[1, 4, 9])
    slots, table, rules, history = install([request])
    masks = np.array([[1 << 4 | 1 << 9 | 1 << 20]], np.int32)
    logits = jnp.zeros((1, VOCAB))
    after = run_alter(logits, masks, jnp.asarray([3], jnp.int32), slots, table, rules, history)
    assert np.flatnonzero(np.isfinite(after[0])).tolist() == [4, 9]


def test_padding_gives_no_error():
    request = make_request(1, frequency_penalty=1.0)
    slots, table, rules, history = install([request])
    rows, bad = jnp.asarray([1, SLOTS], jnp.int32), jnp.full((2, VOCAB), jnp.nan)
    after = run_alter(bad, everything.repeat(2, axis=0), rows, slots, table, rules, history)
    chosen, _, _ = run_full(bad, rows, slots.length, table, rules, altered=after)
    assert chosen.tolist()[0] == NOT_FINITE


def test_as_many_biases_as_there_is_room_for():
    layout = rules_layout(2 * MAX_LOGIT_BIAS)
    most = {i: 0.5 for i in range(MAX_LOGIT_BIAS)}
    row = layout.unpack(jnp.asarray(layout.pack(make_request(0, logit_bias=most)))[None])
    assert row.bias_ids[0].tolist() == list(most) and row.bias[0].tolist() == list(most.values())
    with pytest.raises(ValueError, match="logit_bias has 1025 tokens; at most 1024"):
        make_request(0, logit_bias=most | {MAX_LOGIT_BIAS: 1.0})


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
    after, slots, table, rules = altered(logits[None], [request])
    draw = partial(draw_at, logits=after, length=slots.length, table=table, rules=rules)
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


def draw_at(position, *, logits, length, table, rules):
    """The token at a position, which is part of the draw's key."""
    slot = jnp.zeros(1, jnp.int32)
    return sample_full(logits, slot, length + position, table, rules, altered=logits)[0][0]


def test_logprobs_are_the_true_top_of_the_unaltered_distribution():
    logits = np.random.default_rng(0).normal(size=(3, VOCAB)).astype(np.float32) * 4
    watching = make_request(0, logprob_token_ids=[3, 20], temperature=0.0)
    penalized = make_request(1, logprobs=5, temperature=0.0, allowed_token_ids=[7])
    plain = make_request(2, logprobs=0, temperature=0.7)
    chosen, rows, candidates = step(logits, [watching, penalized, plain])
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
