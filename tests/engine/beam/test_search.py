"""Beam search against transformers' own over the same random model, and its rules one by one."""

import copy
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.beam.candidates import read_candidates
from jaxllm.engine.beam.search import LENGTH, BeamSearch, Candidates, Continuation
from jaxllm.engine.device.candidates import candidate_rows
from tests.hf_models import config
from tests.seldom import all_but

VOCAB, MAX_WIDTH = 24, 6
make_rows = jax.jit(candidate_rows)


@pytest.fixture(scope="module")
def model():
    """A random model whose tokens have a bias, 0 to begin with, that makes some of them likely."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small gain nothing from more, and threads that wait for a core lose a lot
    torch.manual_seed(0)
    sizes = config("Llama", vocab_size=VOCAB, num_hidden_layers=1, eos_token_id=None)
    model = transformers.LlamaForCausalLM(sizes).eval().requires_grad_(False)
    model.lm_head = torch.nn.Linear(sizes.hidden_size, VOCAB).requires_grad_(False)
    model.lm_head.weight.normal_(std=0.3)
    yield model
    torch.set_num_threads(num_threads)


def theirs(model, prompt, *, eos, num_return_sequences, **options):
    """`(tokens, score)` of each sequence that transformers returns."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    out = model.generate(
        torch.tensor([prompt]),
        eos_token_id=list(eos) or None,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        num_return_sequences=num_return_sequences,
        **options,
        custom_generate=transformers.GenerationMixin._beam_search if options["num_beams"] == 1 else None,
    )
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    sequences = [row[len(prompt) :][:n] for row, n in zip(out.sequences.tolist(), lengths, strict=True)]
    return list(zip(sequences, out.sequences_scores.tolist(), strict=True))


def ours(model, prompt, *, eos, num_return_sequences, num_beams, **options):
    torch = pytest.importorskip("torch")
    search = BeamSearch(width=num_beams, num_stop_ids=len(eos), **options)
    beams = [[]]
    while not search.done:
        padded = [prompt + beam for beam in (beams * MAX_WIDTH)[:MAX_WIDTH]]  # one shape to compile
        logits = jnp.asarray(model(torch.tensor(padded)).logits[:, -1].numpy())
        rows = np.asarray(make_rows(jax.nn.log_softmax(logits), logits))[: len(beams)]
        live = search.advance(
            [read_candidates(row, search.num_candidates) for row in rows],
            lambda _, token: token if token in eos else None,
            lambda found, _, beams=beams: beams[found.beam] + [found.token],
        )
        beams = [beams[found.beam] + [found.token] for found in live]
    return [(found.payload, found.score) for found in search.best(num_return_sequences)]


def assert_same(got, want):
    """Sequences in one order, but for those whose scores are as good as equal; transformers adds them in float32."""
    scores = np.array([score for _, score in want])
    np.testing.assert_allclose([score for _, score in got], scores, rtol=2e-6, atol=1e-5)
    for (tokens, _), score in zip(got, scores, strict=True):
        assert tokens in [want[i][0] for i in np.flatnonzero(np.isclose(scores, score, rtol=2e-6, atol=1e-5))]


@pytest.mark.parametrize(
    ("eos", "early_stopping"),
    all_but([((7,), False), ((3, 7), True), ((3, 7), "never")], product([(), (7,), (3, 7)], [False, True, "never"])),
)
def test_equals_transformers(model, eos, early_stopping):
    rng = np.random.default_rng(len(eos))
    num_early = 0  # ended before `max_new_tokens`
    for prompt_len, width, length_penalty in product((1, 2, 5), range(1, MAX_WIDTH + 1), (-1.0, 0.0, 0.5, 1.0, 2.0)):
        model.lm_head.bias.zero_()
        model.lm_head.bias[list(eos)] = float(rng.uniform(0, 6))
        prompt = rng.integers(8, VOCAB, prompt_len).tolist()
        options = {
            "eos": eos,
            "num_beams": width,
            "num_return_sequences": int(rng.integers(1, width + 1)),
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
            "max_new_tokens": int(rng.integers(1, 13)),
        }
        got = ours(model, prompt, **options)
        assert_same(got, theirs(model, prompt, **options))
        num_early += sum(len(tokens) < options["max_new_tokens"] for tokens, _ in got)
    assert (num_early > 50) == bool(eos)


def make_search(width=2, **changes):
    options = {"length_penalty": 0.0, "early_stopping": False, "max_new_tokens": 10, "num_stop_ids": 1}
    return BeamSearch(width=width, **(options | changes))


def beam(scores):
    """Candidates of a beam: token -> score, best first."""
    floats = np.array(list(scores.values()), np.float32)
    ids = np.array(list(scores), np.int32)
    return Candidates(ids, floats, floats - 1, ids + 1)


def advance(search, *beams, stops=()):
    """`search.advance` where the tokens `stops` end a beam by their own number; and what was asked and kept."""
    asked, kept = [], []

    def ends(of_beam, token):
        asked.append((of_beam, token))
        return token if token in stops else None

    def keep(continuation, reason):
        kept.append((continuation.token, reason))
        return [reason]

    live = search.advance([beam(scores) for scores in beams], ends, keep)
    return [(found.beam, found.token) for found in live], asked, kept


def test_the_best_of_all_beams_live_on():
    search = make_search()
    live = search.advance([beam({5: -1.0, 6: -2.0, 7: -2.5})], lambda *_: None, lambda *_: None)
    assert live == [Continuation(0, 5, -1.0, -2.0, 6), Continuation(0, 6, -2.0, -3.0, 7)]
    assert (search.scores, search.num_tokens, search.done) == ([-1.0, -2.0], 1, False)
    live = search.advance([beam({1: -3.0, 2: -4.0}), beam({3: -0.5, 4: -1.5})], lambda *_: None, lambda *_: None)
    assert live == [Continuation(1, 3, -2.5, -1.5, 4), Continuation(1, 4, -3.5, -2.5, 5)]
    assert (search.scores, search.num_tokens, search.finished) == ([-2.5, -3.5], 2, [])


def test_ties_go_to_the_earlier_beam_and_candidate():
    search = make_search(3)
    live, *_ = advance(search, dict.fromkeys(range(64, 0, -1), -1.0))
    assert live == [(0, 64), (0, 63), (0, 62)]
    tied = dict.fromkeys(range(40, 0, -1), -2.0)
    live, *_ = advance(search, {50: -2.0}, {60: -1.0} | tied, tied)
    assert live == [(1, 60), (0, 50), (1, 40)]


def test_sums_of_small_differences_are_exact():
    search = make_search()
    advance(search, {1: -(2.0**24), 2: -(2.0**24) - 8})
    live, *_ = advance(search, {3: -1.5, 4: -1.25}, {5: -0.5})
    assert live == [(0, 4), (0, 3)] and search.scores == [-(2.0**24) - 1.25, -(2.0**24) - 1.5]


def test_ends_is_asked_no_more_than_needed():
    every = {token: -1.0 - token for token in range(8)}
    _, asked, _ = advance(make_search(), every)
    assert asked == [(0, 0), (0, 1)]
    live, asked, _ = advance(make_search(), every, stops=(0, 2))
    assert asked == [(0, 0), (0, 1), (0, 2), (0, 3)] and live == [(0, 1), (0, 3)]
    _, asked, _ = advance(make_search(max_new_tokens=1), every)
    assert asked == [(0, 0), (0, 1)]


@pytest.mark.parametrize(("num_stop_ids", "num_asked"), [(0, 4), (1, 4), (3, 8)])
def test_no_more_than_the_best_are_looked_at(num_stop_ids, num_asked):
    search = make_search(num_stop_ids=num_stop_ids)
    live, asked, kept = advance(search, {token: -1.0 - token for token in range(20)}, stops=range(20))
    assert len(asked) == search.num_candidates == num_asked
    assert (live, kept, search.done) == ([], [(0, 0), (1, 1)], True)


def test_only_the_best_of_a_step_can_finish():
    search = make_search()
    live, _, kept = advance(search, {1: -1.0, 2: -2.0, 3: -3.0, 4: -4.0}, stops=(2, 3))
    assert (live, kept) == ([(0, 1), (0, 4)], [(2, 2)])
    (found,) = search.finished
    assert found == (-2.0, Continuation(0, 2, -2.0, -3.0, 3), 2, [2])


def test_a_reason_comes_before_the_length():
    search = make_search(3, max_new_tokens=1, length_penalty=2.0)
    live, _, kept = advance(search, {1: -1.0, 2: -2.0, 3: -3.0, 4: -4.0}, stops=(2,))
    assert (live, search.scores, search.done) == ([], [], True)
    assert kept == [(1, LENGTH), (2, 2), (3, LENGTH)]
    assert [found.reason for found in search.best(2)] == [LENGTH, 2]


def test_finished_are_normalized_cut_and_kept_once():
    search = make_search(early_stopping="never", length_penalty=1.0)
    advance(search, {1: -1.0, 2: -1.5, 3: -2.0, 4: -5.0}, stops=(1, 2))
    assert [found.score for found in search.finished] == [-1.0, -1.5]
    _, _, kept = advance(search, {5: -0.2, 6: -0.4, 7: -0.5}, {7: -9.0}, stops=(5, 6))
    assert kept == [(5, 5)]  # -2.2 / 2; the other, -2.4 / 2, is the third
    assert [found.score for found in search.finished] == pytest.approx([-1.0, -1.1])
    assert [found.payload for found in search.finished] == [[1], [5]]


def test_who_finished_first_stays_among_equals():
    search = make_search(1, early_stopping="never", length_penalty=1.0)
    advance(search, {1: -1.0, 2: -1.0}, stops=(1,))
    _, _, kept = advance(search, {3: -1.0, 4: -1.0}, stops=(3,))
    assert kept == [] and search.finished[0].continuation.token == 1


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "num_steps"),
    [
        (True, 1.0, 2),
        (False, -1.0, 3),
        (False, 0.0, 3),
        (False, 1.0, 4),
        ("never", -1.0, 3),
        ("never", 0.0, 3),
        ("never", 1.0, 7),
        ("never", 2.0, 10),
    ],
)
def test_when_it_is_over(early_stopping, length_penalty, num_steps):
    """Beams finish with -1.5 and -2.2 in the first and second step, where the best live one has -1 and -2."""
    search = make_search(early_stopping=early_stopping, length_penalty=length_penalty)
    advance(search, {1: -1.0, 2: -1.5, 3: -3.0}, stops=(2,))
    advance(search, {4: -1.0, 5: -1.2}, {}, stops=(5,))
    assert len(search.finished) == 2
    while not search.done:
        advance(search, {6: -2.0 if search.num_tokens == 2 else -3.0})
    assert search.num_tokens == num_steps


def test_a_copy_stays_as_it_was():
    search = make_search(1, early_stopping="never", length_penalty=1.0)
    advance(search, {1: -1.0, 2: -1.5}, stops=(1,))
    before, as_it_was = copy.copy(search), copy.deepcopy(vars(search))
    advance(search, {3: -0.1, 4: -0.2}, stops=(3,))
    assert search.finished != before.finished and search.scores != before.scores
    assert vars(before) == as_it_was


def test_few_candidates_give_few_beams():
    search = make_search(3)
    assert advance(search, {5: -1.0})[0] == [(0, 5)]
    assert advance(search, {6: -1.0, 7: -2.0})[0] == [(0, 6), (0, 7)]
    assert advance(search, {}, {8: -1.0})[0] == [(1, 8)]
    assert search.scores == [-4.0] and not search.done


@pytest.mark.parametrize("stops", [(), (1,)])
def test_nothing_left(stops):
    search = make_search()
    advance(search, {1: -1.0, 2: -2.0}, stops=stops)
    assert advance(search, *[{}] * len(search.scores))[0] == []
    assert search.done and search.scores == []
    assert [found.payload for found in search.best(2)] == [[1]] * len(stops)


def test_what_there_is_of_a_search_that_is_given_up():
    search = make_search(3, length_penalty=1.0)
    assert search.best(3) == [0]
    advance(search, {1: -3.0, 2: -4.0, 3: -4.5, 4: -6.0}, stops=(2,))
    assert search.best(3) == [0, search.finished[0], 1]
    advance(search, {5: -2.0}, {6: -1.0}, {7: -9.0})
    assert search.scores == [-5.0, -5.5, -15.0]
    assert search.best(3) == [0, 1, search.finished[0]]  # -2.5, -2.75, -4
    assert search.best(1) == [0] and search.best(9)[3] == 2
    assert [search.normalized(score) for score in search.scores] == [-2.5, -2.75, -7.5]
