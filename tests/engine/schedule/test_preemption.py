"""A pool too small for what runs: who leaves, where its blocks go, and that nobody can tell from the outputs."""

import jax
import pytest
from flax import nnx

from jaxllm import SamplingParams
from tests.engine.schedule.test_forks import assert_close
from tests.engine.test_step_contract import fail_once
from tests.tiny import Tiny, clean, greedy, ids, make_llm, prompts_of

PROMPTS = prompts_of([9, 14, 20, 5, 12, 17, 3, 8, 22, 11], seed=3)
MODES = ["swap", "recompute"]
EVERYTHING = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {3: 4.0, 9: -4.0},
    "min_tokens": 5,
    "stop_token_ids": [1, 2, 3],
    "logprobs": 2,
    "prompt_logprobs": 1,
}


def drawn(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **({"seed": 11} | fields))


def beams(width: int, max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(beam_width=width, n=width, max_tokens=max_tokens, **fields)


WORKLOADS = {
    "greedy": [greedy(18)] * 8,
    "drawn": [drawn(18, top_k=20, temperature=0.8)] * 8,
    "samples": [drawn(12, n=3)] * 6,
    "more samples than fit": [drawn(14, n=8, stop_token_ids=[4, 40, 50])] * 3,
    "best": [drawn(12, n=2, best_of=4)] * 4,
    "beams": [beams(2, 18)] * 6,
    "beams and others": [beams(4, 9, stop_token_ids=list(range(16))), greedy(18), drawn(12, n=2)] * 3,
    "everything": [drawn(18, **EVERYTHING)] * 6,
    "samples with everything": [drawn(12, n=3, **EVERYTHING)] * 4,
    "beams with everything": [beams(2, 18, **EVERYTHING)] * 5,
}


@pytest.fixture(scope="module")
def shared_small(tiny):
    llm = make_llm(tiny.model, num_blocks=20)
    yield llm
    llm.close()


@pytest.fixture
def small(shared_small):
    """An engine of 20 blocks, idle and clean before and after the test."""
    config, preemption = shared_small.engine.config, shared_small.engine.scheduler.preemption
    max_host_pages = preemption.max_host_pages
    yield shared_small
    shared_small.engine.config, preemption.max_host_pages = config, max_host_pages
    drain(shared_small)
    assert shared_small.stats().blocks_on_host == 0 == shared_small.engine.runner.executor.moves.num_kept
    clean(shared_small)


def prefer(llm, mode: str) -> None:
    llm.engine.set_preemption(mode)


def drain(llm) -> None:
    """The step that was dispatched before the host saw a stop token."""
    while llm.engine.has_work():
        assert llm.engine.step() == []


def add(llm, workload, **options) -> None:
    for i, (prompt, params) in enumerate(zip(PROMPTS, workload, strict=False)):
        llm.engine.add(prompt, params, request_id=f"r{i}", **options)


def run(llm, max_steps: int = 1000) -> dict:
    done = {}
    for _ in range(max_steps):
        done |= {out.request_id: out for out in llm.engine.step()}
        llm.engine.scheduler.check()
        if not llm.engine.has_work():
            return done
    raise AssertionError(f"not done after {max_steps} steps")


def until_swapped(llm) -> dict:
    """Steps until blocks lie in host memory and nothing else is on its way there."""
    done = {}
    while not llm.stats().blocks_on_host:
        assert llm.engine.has_work(), "nothing was swapped out"
        done |= {out.request_id: out for out in llm.engine.step()}
        llm.engine.scheduler.check()
    return done


def assert_same(llm, workload, done) -> None:
    """What each says on its own, where there is room."""
    for i, (prompt, params) in enumerate(zip(PROMPTS, workload, strict=False)):
        (want,), got = llm.generate(ids(prompt), params), done[f"r{i}"]
        assert got.error is None and len(got.outputs) == len(want.outputs) == params.n
        for ours, theirs in zip(got.outputs, want.outputs, strict=True):
            assert (ours.token_ids, ours.finish_reason, ours.stop_reason) == (
                theirs.token_ids,
                theirs.finish_reason,
                theirs.stop_reason,
            )
            assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
            assert_close(ours.logprobs, theirs.logprobs)
        assert_close(got.prompt_logprobs, want.prompt_logprobs)
    drain(llm)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WORKLOADS)
def test_nobody_can_tell(small, llm, name, mode):
    prefer(small, mode)
    before = small.stats()
    add(small, WORKLOADS[name])
    done = run(small)
    after = small.stats()
    num_swapped = after.num_swapped - before.num_swapped
    num_recomputed = after.num_preemptions - before.num_preemptions - num_swapped
    if mode == "recompute":
        assert (num_swapped, after.blocks_swapped_out) == (0, before.blocks_swapped_out) and num_recomputed > 0
    else:
        assert num_swapped > 0
        assert 0 < after.blocks_swapped_in - before.blocks_swapped_in <= after.blocks_swapped_out
    assert after.blocks_on_host == 0
    assert_same(llm, WORKLOADS[name], done)


def test_both_ways_at_once(small, llm, monkeypatch):
    choices = iter([True, False, False] * 1000)
    monkeypatch.setattr(small.engine.scheduler.preemption, "_prefers_swap", lambda *sizes: next(choices))
    workload = WORKLOADS["beams and others"]
    before = small.stats()
    add(small, workload)
    done = run(small)
    after = small.stats()
    assert 0 < after.num_swapped - before.num_swapped < after.num_preemptions - before.num_preemptions
    assert_same(llm, workload, done)


def test_the_last_by_priority_and_arrival_leaves(small, llm):
    prefer(small, "swap")
    workload = [greedy(18)] * 4
    for i, priority in enumerate([0, 1, 0, 0]):
        small.engine.add(PROMPTS[i], workload[i], request_id=f"r{i}", priority=priority)
    done, left = {}, []
    while small.engine.has_work():
        before = small.stats().num_swapped
        done |= {out.request_id: out for out in small.engine.step()}
        if small.stats().num_swapped > before:
            left.append({r.request.request_id for r in small.engine.scheduler.waiting.sequences() if r.group.host_copy})
    assert left[0] == {"r1"} and left[1] == {"r1", "r3"}
    assert_same(llm, workload, done)


@pytest.mark.parametrize(
    ("mode", "params"),
    [("swap", drawn(14, n=3)), ("swap", beams(3, 14)), ("recompute", beams(3, 14))],
    ids=["swapped samples", "swapped beams", "recomputed beams"],
)
def test_siblings_leave_and_return_together(small, llm, mode, params):
    """Once all sequences of a group have had a slot, all have one or none. (Samples begin, and return if they are
    recomputed, as soon as the first has a slot.)"""
    prefer(small, mode)
    workload = [greedy(18)] * 3 + [params]
    add(small, workload)
    seen, done = set(), {}
    while small.engine.has_work():
        done |= {out.request_id: out for out in small.engine.step()}
        small.engine.scheduler.check()
        if "r3" not in done:
            (group,) = {sample.group for sample in small.engine.requests["r3"].sequences}
            have_slots = frozenset(member.slot >= 0 for member in group.sequences)
            if seen or have_slots == {True}:
                seen.add(have_slots)
    assert seen == {frozenset([False]), frozenset([True])}
    assert_same(llm, workload, done)


def test_prompt_logprobs_of_one_that_leaves_in_the_middle_of_its_prompt(small, llm):
    """All but the last token of its prompt are on the device, and scored, and the result is not read yet."""
    prefer(small, "swap")
    shared, prompt = prompts_of([37, 22], seed=4)
    small.engine.add(shared, drawn(12, n=3), request_id="three")
    for _ in range(4):
        small.engine.step()
    params = greedy(6, prompt_logprobs=1)
    small.engine.add(prompt, params, request_id="last")
    small.engine.step()
    (last,) = small.engine.requests["last"].sequences
    assert last.num_computed == 21 and small.stats().blocks_used == 9 + 3 + 6
    small.engine.step()  # three blocks are wanted, two are free
    assert last.slot < 0
    out, (want,) = run(small)["last"], llm.generate(ids(prompt), params)
    assert out.outputs[0].token_ids == want.outputs[0].token_ids
    assert_close(out.prompt_logprobs, want.prompt_logprobs)


def test_shared_blocks_are_swapped_once(small):
    prefer(small, "swap")
    before = small.stats()
    small.engine.add(PROMPTS[8], drawn(12, n=3), request_id="group", priority=1)  # 22 tokens
    for _ in range(3):
        small.engine.step()
    assert small.stats().blocks_used == 5 + 3
    add(small, [greedy(30)] * 2)
    done = until_swapped(small)
    assert small.stats().blocks_swapped_out - before.blocks_swapped_out in (5 + 3, 5 + 2 * 3)  # they may have grown
    assert small.stats().num_swapped - before.num_swapped == 3
    done |= run(small)
    assert len(done) == 3 and done["group"].error is None


@pytest.mark.parametrize("max_host_pages", [0, 1, 6])
def test_no_room_in_host_memory(small, llm, max_host_pages):
    prefer(small, "swap")
    small.engine.scheduler.preemption.max_host_pages = max_host_pages
    before = small.stats()
    add(small, WORKLOADS["greedy"])
    done = run(small)
    after = small.stats()
    num_swapped = after.num_swapped - before.num_swapped
    assert num_swapped < after.num_preemptions - before.num_preemptions
    assert (num_swapped > 0) == (max_host_pages == 6)
    assert_same(llm, WORKLOADS["greedy"], done)


@pytest.mark.parametrize("name", ["greedy", "samples", "beams"])
def test_abort_of_what_is_swapped_out(small, llm, name):
    prefer(small, "swap")
    add(small, WORKLOADS[name])
    done = until_swapped(small)
    swapped = {r.request.request_id for r in small.engine.scheduler.waiting.sequences() if r.group.host_copy}
    for request_id in swapped:
        done[request_id] = small.engine.abort(request_id)
        assert "abort" in {completion.finish_reason for completion in done[request_id].outputs}
        small.engine.scheduler.check()
    assert small.stats().blocks_on_host == 0
    for _ in range(2):  # beams run in every other step
        done |= {out.request_id: out for out in small.engine.step()}
    kept = {r.group.host_copy for r in small.engine.scheduler.waiting.sequences()} - {None}
    assert small.engine.runner.executor.moves.num_kept == len(kept)
    done |= run(small)
    survivors = {request_id: out for request_id, out in done.items() if request_id not in swapped}
    for request_id, out in survivors.items():
        index = int(request_id[1:])
        (want,) = llm.generate(ids(PROMPTS[index]), WORKLOADS[name][index])
        assert [c.token_ids for c in out.outputs] == [c.token_ids for c in want.outputs]


def test_abort_of_the_last_that_is_swapped_out(small):
    """Nobody plans another step that would forget the copy."""
    prefer(small, "swap")
    add(small, [greedy(18)] * 4)
    until_swapped(small)
    for i in range(4):
        small.engine.abort(f"r{i}")
    drain(small)
    assert small.stats().blocks_on_host == 0
    add(small, [greedy(2)])
    run(small)


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("name", ["greedy", "samples", "beams", "everything"])
def test_a_failed_step_while_something_is_swapped_out(small, llm, monkeypatch, name, after):
    prefer(small, "swap")
    add(small, WORKLOADS[name])
    done = until_swapped(small)
    with monkeypatch.context() as patch:
        calls = fail_once(small, 1, patch, after=after)
        while not calls:  # beams make a row in every other step
            done |= {out.request_id: out for out in small.engine.step()}
    assert small.stats().blocks_on_host == 0 == small.engine.runner.executor.moves.num_kept
    done |= run(small)
    assert_same(llm, WORKLOADS[name], done)


def test_new_parameters_while_something_is_swapped_out(small, llm):
    """What comes back is of the old ones, and must not be found by others."""
    prefer(small, "swap")
    runner = small.engine.runner
    old = jax.tree.unflatten(jax.tree.structure(runner.executor.abstract_params), runner.executor.leaves)
    add(small, WORKLOADS["greedy"])
    until_swapped(small)
    small.update_params(nnx.state(Tiny(seed=1).model, nnx.Param))
    small.engine.update_params(old)
    run(small)
    add(small, WORKLOADS["greedy"])
    done = run(small)
    assert {out.num_cached_tokens for out in done.values()} == {0}
    assert_same(llm, WORKLOADS["greedy"], done)


@pytest.mark.parametrize(("bytes_per_s", "swaps"), [(1e15, True), (1e-3, False)])
def test_auto_takes_what_costs_less(small, llm, bytes_per_s, swaps):
    prefer(small, "auto")
    before, costs = small.stats(), small.engine.runner.costs
    costs.copy_bytes_per_s = bytes_per_s
    add(small, WORKLOADS["greedy"])
    done = run(small)
    after = small.stats()
    assert costs.prefill_s is not None
    assert after.num_preemptions > before.num_preemptions
    assert after.num_swapped - before.num_swapped == (after.num_preemptions - before.num_preemptions if swaps else 0)
    assert_same(llm, WORKLOADS["greedy"], done)


def test_auto_measures_once(small, llm):
    prefer(small, "auto")
    costs = small.engine.runner.costs
    costs.copy_bytes_per_s = None
    add(small, WORKLOADS["beams and others"])
    done = run(small)
    measured = costs.copy_bytes_per_s
    assert measured > 0
    assert_same(llm, WORKLOADS["beams and others"], done)
    add(small, WORKLOADS["greedy"])
    run(small)
    assert costs.copy_bytes_per_s == measured


@pytest.mark.parametrize("mode", MODES)
def test_a_burst_of_eight_pools(small, llm, mode):
    """It ends, in no more steps than if each ran alone."""
    prefer(small, mode)
    kinds = [greedy(18), beams(4, 8), drawn(12, n=3), drawn(10, n=8), beams(2, 14), drawn(12, n=1, best_of=4)]
    workload = [kinds[i % len(kinds)] for i in range(len(PROMPTS))]
    num_blocks = sum(
        (params.beam_width or params.num_samples) * -(-(len(prompt) + params.max_tokens) // 4)
        for prompt, params in zip(PROMPTS, workload, strict=True)
    )
    assert num_blocks > 8 * 20
    add(small, workload)
    done = run(small, max_steps=sum(2 * (1 + params.max_tokens) for params in workload))
    assert_same(llm, workload, done)
