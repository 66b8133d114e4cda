"""Engines of layers that cache differently, beside the same layers over whole sequences: windows shorter and longer
than a block and than the prompt, recurrences, and layers with two caches."""

import jax
import numpy as np
import pytest

from jaxllm import SamplingParams
from tests.models.toy_caches import FULL, LARGE, RECURRENT, TWICE, window
from tests.tiny import Tiny, clean, drain, greedy, ids, make_llm, prompts_of, tokens

KINDS = {
    "windows shorter than a block": (window(3), FULL, window(3), FULL),
    "a window of a block": (window(4), FULL, window(4)),
    "two windows": (window(7), FULL, window(30), window(7)),
    "windows alone": (window(9), window(9)),
    "one longer than any sequence": (window(200), FULL),
    "a recurrence": (RECURRENT, FULL, FULL),
    "recurrences alone": (RECURRENT, RECURRENT),
    "a recurrence, windows": (LARGE, window(6), FULL, RECURRENT),
    "two caches a layer": (TWICE, FULL, TWICE),
}
GROUPS = {  # window, pages of a block, whether they are states
    "windows shorter than a block": [(None, 1, False), (3, 1, False)],
    "a window of a block": [(None, 1, False), (4, 2, False)],
    "two windows": [(None, 1, False), (7, 2, False), (30, 1, False)],
    "windows alone": [(9, 1, False)],
    "one longer than any sequence": [(None, 1, False)],
    "a recurrence": [(None, 2, False), (2, 1, True)],
    "recurrences alone": [(2, 1, True)],
    "a recurrence, windows": [(None, 1, False), (6, 1, False), (2, 4, True)],
    "two caches a layer": [(None, 3, False), (6, 2, False)],
}
LENGTHS = (1, 2, 5, 16, 33, 50)


SLOW = {"a window of a block", "windows shorter than a block", "one longer than any sequence", "a recurrence"}


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS]
)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def tiny(kind):
    return Tiny(layers=KINDS[kind])


@pytest.fixture(scope="module")
def llm(tiny):
    with make_llm(tiny.model, num_blocks=48) as llm:
        yield llm


def test_layers_are_grouped_by_what_they_keep(kind, llm):
    assert [tuple(group) for group in llm.engine.config.groups] == GROUPS[kind]


def test_tokens_are_those_of_the_whole_sequence(tiny, llm):
    """Beside others, in chunks."""
    prompts = prompts_of(LENGTHS)
    for prompt, output in zip(prompts, tokens(llm.generate(ids(*prompts), greedy(40))), strict=True):
        tiny.assert_greedy(prompt, output)
    clean(llm)


def test_the_next_turn_of_a_conversation_is_a_hit(tiny, llm):
    """Of a prompt, its answer and more: all that is there of the windows' blocks is what a longer one needs."""
    (given,), num_computed = prompts_of([19]), 0
    for _ in range(3):
        (result,) = llm.generate(ids(given), greedy(14))
        tiny.assert_greedy(given, result.outputs[0].token_ids)
        assert result.num_cached_tokens == num_computed // 4 * 4
        num_computed = len(given) + 14 - 1  # nobody needs what the last token leaves
        given = [*given, *result.outputs[0].token_ids, 7, 8]
    clean(llm)


def test_a_hit_whose_window_is_gone_is_none(tiny, llm):
    """Of a long answer's tokens the windows keep the last; a prompt that leaves it in the middle has to start over."""
    (prompt,) = prompts_of([20])
    (answer,) = tokens(llm.generate(ids(prompt), greedy(60)))
    prompts = [[*prompt, *answer[:n], 5] for n in (10, 25, 40, 58)]
    for given, output in zip(prompts, tokens(llm.generate(ids(*prompts), greedy(8))), strict=True):
        tiny.assert_greedy(given, output)
    clean(llm)


def test_forks_wait_while_their_leader_goes_on(tiny, llm):
    """More samples than slots, of one prompt: those that enter late go on from what the first has kept for them."""
    (prompt,) = prompts_of([23])
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, n=20)
    for completion in llm.generate(ids(prompt), params)[0].outputs:
        tiny.assert_greedy(prompt, completion.token_ids)
    clean(llm)


def test_continuations_go_on_from_their_context(tiny, llm):
    """Where a layer has kept less of it, they compute it again."""
    contexts = prompts_of([1, 23, 24, 50])
    items = [(context, prompts_of([3, 1, 9], seed=1)) for context in contexts]
    for _ in range(2):  # the second time the prefix cache has the contexts
        tiny.assert_scored(items, llm.score(items, use_tqdm=False), atol=1e-4)
    clean(llm)


def test_beams(tiny, llm):
    """Each hypothesis has the score that the whole sequence gives it."""
    (prompt,) = prompts_of([18])
    params = SamplingParams(beam_width=3, n=3, max_tokens=20, ignore_eos=True, temperature=0.0, logprobs=1)
    for completion in llm.generate(ids(prompt), params)[0].outputs:
        logits = tiny.logits([*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
        logprobs = np.asarray(jax.nn.log_softmax(logits))
        wanted = logprobs[np.arange(len(completion.token_ids)), completion.token_ids].sum()
        assert completion.cumulative_logprob == pytest.approx(float(wanted), abs=1e-3)
    drain(llm)
    clean(llm)


def test_penalties_know_all_tokens(tiny, llm):
    """Also those that no layer reads any more."""
    (prompt,) = prompts_of([30])
    params = greedy(40, presence_penalty=2.0, frequency_penalty=2.0)
    (output,) = tokens(llm.generate(ids(prompt), params))
    seen = np.zeros(tiny.cfg.vocab)
    for i, token in enumerate(output):
        logits = tiny.logits([*prompt, *output[:i]])[-1] - 2.0 * seen - 2.0 * (seen > 0)
        assert logits[token] >= logits.max() - 1e-4 * np.abs(logits).max()
        seen[token] += 1
    clean(llm)


def test_on_two_devices():
    """Pages, states among them, are split by heads."""
    tiny = Tiny(layers=(LARGE, window(6), FULL, RECURRENT))
    with make_llm(tiny.model, mesh="tensor=2") as llm:
        prompts = prompts_of(LENGTHS)
        for prompt, output in zip(prompts, tokens(llm.generate(ids(*prompts), greedy(20))), strict=True):
            tiny.assert_greedy(prompt, output)


def test_penalties_that_can_never_fit_are_refused():
    """Without a layer that keeps all tokens a long sequence fits a small pool, unless its logits depend on them."""
    with make_llm(Tiny(layers=(window(9),) * 2).model, num_blocks=12, max_model_len=90) as llm:
        (prompt,) = prompts_of([60])
        assert len(tokens(llm.generate(ids(prompt), greedy(25)))[0]) == 25
        with pytest.raises(ValueError, match="penalties or bad_words .* may need 21 KV blocks .* the pool has 12"):
            llm.generate(ids(prompt), greedy(25, repetition_penalty=1.1))


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_preempted_sequences_go_on(tiny, llm, way):
    """Eight sequences run when the pool shrinks: less than two fit what is left."""
    prompts = prompts_of((20, 22, 24, 26, 28, 30, 32, 34), seed=3)
    pool, engine = llm.engine.scheduler.pool, llm.engine
    engine.set_preemption(way)
    before, held, outputs = llm.stats().num_preemptions, [], {}
    for i, prompt in enumerate(prompts):
        engine.add(prompt, greedy(50), request_id=str(i))
    most_held = (pool.num_pages - 3 * engine.config.count_pages(-(-84 // 4)) // 2) // pool.groups[0].num_pages
    while engine.has_work():
        for output in engine.step():
            outputs[int(output.request_id)] = output.outputs[0].token_ids
        shrinks = len(engine.scheduler.running) == len(prompts) or held
        while shrinks and pool.num_free >= pool.groups[0].num_pages and len(held) < most_held:
            held += pool.allocate(1, 0)
    pool.release(held)
    engine.set_preemption("auto")
    clean(llm)
    assert llm.stats().num_preemptions > before
    for i, prompt in enumerate(prompts):
        tiny.assert_greedy(prompt, outputs[i])
