"""Samples that share a prompt: computed once, its blocks shared, the half-full one copied when it is written."""

import numpy as np
import pytest

from jaxllm import SamplingParams
from tests.plain_search import cumulative_logprob, draw
from tests.tiny import Tiny, greedy, ids, prompts_of

INSIDE, FULL, LONG, BEHIND = prompts_of([7, 8, 30, 25], seed=2)  # BEHIND: one token more than a step takes


def samples(n: int, max_tokens: int = 6, **fields) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, **({"seed": 2**40 + 7} | fields))


def assert_drawn(tiny: Tiny, prompt, completions, params: SamplingParams) -> None:
    """Each sample is the draw of its own index."""
    for completion in completions:
        want = draw(tiny, prompt, params.seed, completion.index, params.max_tokens)
        assert completion.token_ids == want


def watch_plans(llm, monkeypatch) -> list:
    plans, dispatch = [], llm.engine.runner.dispatch_forward
    monkeypatch.setattr(llm.engine.runner, "dispatch_forward", lambda plan: plans.append(plan) or dispatch(plan))
    return plans


@pytest.mark.parametrize("prompt", [INSIDE, FULL, LONG, BEHIND, [5]], ids=len)
def test_a_prompt_is_computed_and_held_once(llm, tiny, monkeypatch, prompt):
    before, params = llm.stats(), samples(3)
    llm.engine._peak_blocks = 0
    plans = watch_plans(llm, monkeypatch)
    llm.engine.add(prompt, params, request_id="r")
    shared, done = [], []
    while llm.engine.has_work():
        done += llm.engine.step()
        llm.engine.scheduler.check()
        shared.append(llm.stats().blocks_shared)
    assert_drawn(tiny, prompt, done[0].outputs, params)
    num_generated = 3 * (params.max_tokens - 1)  # of which the last ones are never computed
    assert sum(plan.num_tokens for plan in plans) == len(prompt) + num_generated
    assert sum(len(plan.admitted) for plan in plans) == 3
    num_full, is_inside = divmod(len(prompt), 4)
    assert max(shared) == num_full + (is_inside > 0)
    stats = llm.stats()
    assert stats.blocks_copied - before.blocks_copied == 2 * (is_inside > 0)
    num_blocks = -(-(len(prompt) + params.max_tokens - 1) // 4)
    assert stats.peak_blocks_used == num_full + 3 * (num_blocks - num_full)
    assert stats.num_prompt_tokens - before.num_prompt_tokens == len(prompt)
    assert stats.num_preemptions == before.num_preemptions


def test_as_samples_that_are_drawn_one_by_one(llm, monkeypatch):
    """Whatever forks: the first of `n` is the only one of 1, and the others don't depend on how many there are."""
    alone = llm.generate(ids(INSIDE), samples(1))[0].outputs
    few, many = (llm.generate(ids(INSIDE), samples(n))[0].outputs for n in (3, 8))
    assert [c.token_ids for c in many[:3]] == [c.token_ids for c in few]
    assert few[0].token_ids == alone[0].token_ids
    assert len({tuple(c.token_ids) for c in many}) == 8


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("n", [9, 20])
def test_more_samples_than_slots(llm, tiny, monkeypatch, n, prefix_caching):
    monkeypatch.setattr(llm.engine.scheduler.prefix_cache, "enabled", prefix_caching)
    plans = watch_plans(llm, monkeypatch)
    before = llm.stats()
    outs = llm.generate(ids(LONG, FULL), samples(n))
    for prompt, out in zip((LONG, FULL), outs, strict=True):
        assert [completion.index for completion in out.outputs] == list(range(n))
        assert_drawn(tiny, prompt, out.outputs, samples(n))
    num_late = 2 * n - 2 - sum(len(plan.forks) for plan in plans)
    assert num_late >= 2 * (n - 8), "each computes the prompt's last token, for its logits"
    assert sum(plan.num_tokens for plan in plans) == len(LONG) + len(FULL) + num_late + 2 * n * 5
    after = llm.stats()
    assert after.num_prompt_tokens - before.num_prompt_tokens == len(LONG) + len(FULL)
    assert after.num_cached_tokens == before.num_cached_tokens and after.num_preemptions == before.num_preemptions


def test_forks_differ_where_they_end(llm, tiny):
    """One that stops early leaves the others their blocks."""
    params = samples(8, 10)
    want = [draw(tiny, INSIDE, params.seed, i, 10) for i in range(8)]
    stops = [want[1][0], want[3][2], want[5][4]]
    (out,) = llm.generate(ids(INSIDE), samples(8, 10, stop_token_ids=stops))
    for completion, tokens in zip(out.outputs, want, strict=True):
        end = next((i for i, token in enumerate(tokens) if token in stops), None)
        assert completion.token_ids == tokens[: None if end is None else end + 1]
        assert (completion.finish_reason, completion.stop_reason) == (
            ("length", None) if end is None else ("stop", tokens[end])
        )
    while llm.engine.has_work():
        assert llm.engine.step() == []


@pytest.mark.parametrize(
    "fields", [{"logprobs": 2}, {"repetition_penalty": 1.5, "frequency_penalty": 0.5}, {"logit_bias": {4: 3.0}}]
)
def test_forks_equal_samples_that_find_one_slot(llm, fields):
    """Penalties and the like are of a slot: each fork has its own."""
    params = samples(3, 7, prompt_logprobs=1, **fields)
    (together,) = llm.generate(ids(INSIDE), params)
    copied = llm.stats().blocks_copied
    *_, apart = llm.generate(ids(*prompts_of([2] * 7), INSIDE), [greedy(30)] * 7 + [params])
    assert llm.stats().blocks_copied == copied + 2, "one after the other: the last one owns the tail"
    assert [c.token_ids for c in together.outputs] == [c.token_ids for c in apart.outputs]
    for ours, theirs in zip(together.outputs, apart.outputs, strict=True):
        assert_close(ours.logprobs, theirs.logprobs)
    assert_close(together.prompt_logprobs, apart.prompt_logprobs)


def assert_close(found, wanted) -> None:
    assert (found is None) == (wanted is None)
    for mine, theirs in zip(found or [], wanted or [], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert list(mine) == list(theirs)
            assert [p.logprob for p in mine.values()] == pytest.approx([p.logprob for p in theirs.values()], abs=2e-4)


@pytest.mark.parametrize("num_steps", range(7))
def test_abort_at_any_time(llm, tiny, num_steps):
    llm.engine.add(BEHIND, samples(5), request_id="forks")
    llm.engine.add(FULL, greedy(9), request_id="other")
    done = {}
    for _ in range(num_steps):
        done |= {out.request_id: out for out in llm.engine.step()}
        llm.engine.scheduler.check()
    out = llm.engine.abort("forks")
    assert {completion.finish_reason for completion in out.outputs} == {"abort"}
    for completion in out.outputs:
        want = draw(tiny, BEHIND, samples(5).seed, completion.index, 6)
        assert completion.token_ids == want[: len(completion.token_ids)]
    while llm.engine.has_work():
        done |= {out.request_id: out for out in llm.engine.step()}
        llm.engine.scheduler.check()
    tiny.assert_greedy(FULL, done["other"].outputs[0].token_ids)


@pytest.mark.parametrize(("n", "best_of"), [(1, 4), (2, 8), (3, 12), (4, 4)])
def test_the_best_are_returned(llm, tiny, n, best_of):
    params = samples(n, 6, best_of=best_of)
    outs = llm.generate(ids(INSIDE, LONG), params)
    for prompt, out in zip((INSIDE, LONG), outs, strict=True):
        drawn = [draw(tiny, prompt, params.seed, i, 6) for i in range(best_of)]
        totals = {tuple(tokens): cumulative_logprob(tiny, prompt, tokens) for tokens in drawn}
        assert [completion.index for completion in out.outputs] == list(range(n))
        got = [tuple(completion.token_ids) for completion in out.outputs]
        if n < best_of:
            assert got == sorted(totals, key=totals.get, reverse=True)[:n]
            assert all(c.cumulative_logprob == pytest.approx(totals[tuple(c.token_ids)], abs=1e-3) for c in out.outputs)
        else:
            assert got == list(map(tuple, drawn)) and {c.cumulative_logprob for c in out.outputs} == {None}
        assert {completion.logprobs is None for completion in out.outputs} == {True}


def test_the_best_a_token_not_the_best_in_all(llm, tiny):
    """A short sample has a higher sum than the long ones, and must not win by that."""
    params = samples(8, 8)
    drawn = [draw(tiny, INSIDE, params.seed, i, 8) for i in range(8)]
    means = [cumulative_logprob(tiny, INSIDE, tokens) / 8 for tokens in drawn]
    worst = min(range(8), key=lambda i: cumulative_logprob(tiny, INSIDE, drawn[i][:1]))
    stop = drawn[worst][0]
    assert not any(stop in tokens for i, tokens in enumerate(drawn) if i != worst)
    (out,) = llm.generate(ids(INSIDE), samples(1, 8, best_of=8, stop_token_ids=[stop]))
    means[worst] = cumulative_logprob(tiny, INSIDE, drawn[worst][:1])
    assert out.outputs[0].token_ids == drawn[int(np.argmax(means))]
    while llm.engine.has_work():
        assert llm.engine.step() == []


def test_samples_to_choose_from_stream_once(llm):
    ordinary = samples(2)
    streamed = list(llm.stream(ids(INSIDE, INSIDE), [samples(2, best_of=4), ordinary]))
    (out,) = [out for index, out in streamed if index == 0]
    assert out.finished and len(out.outputs) == 2
    assert len([out for index, out in streamed if index == 1]) > 3
