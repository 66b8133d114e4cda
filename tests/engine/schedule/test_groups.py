"""Samples and beams on the scheduler: what they share, and how they leave the device and come back."""

import pytest

from jaxllm.engine.config import CacheGroup
from jaxllm.engine.schedule.sequence import Status
from tests.fake_engine import FakeEngine, rows


def test_forks_share_the_prompt_and_copy_its_last_block_on_the_first_write():
    engine = FakeEngine(block_size=4)
    first = engine.add([1, 2, 1, 2, 1, 1], 4, n=3)
    plan = engine.step()
    assert plan.rows == [first] and plan.samples == engine.samples[first] and plan.num_tokens == 6
    assert engine.pool.num_used == 2 and engine.pool.refs[:2] == [3, 3]
    plan = engine.step()
    assert len(plan.copies) == 2 and plan.num_tokens == 3
    assert engine.pool.num_used == 4 and engine.pool.num_shared == 1
    engine.run()
    assert engine.scheduler.num_copied == 2


def test_nothing_is_copied_at_the_end_of_a_block():
    engine = FakeEngine(block_size=4)
    engine.add([1, 2, 1, 2], 4, n=3)
    engine.step()
    assert engine.pool.num_used == 1
    plan = engine.step()
    assert plan.copies == [] and len(plan.new_blocks) == 3 and engine.pool.num_used == 4
    engine.run()


def test_forks_of_a_prompt_that_the_cache_has_but_for_one_token():
    engine = FakeEngine(block_size=2)
    engine.add([1, 2, 1], 1)
    engine.run()
    first = engine.add([1, 2, 1], 3, n=2)
    plan = engine.step()
    assert plan.decodes == [first] and plan.samples == engine.samples[first]
    engine.run()


def test_samples_without_a_slot_come_later():
    engine = FakeEngine(max_num_seqs=2)
    first = engine.add([1, 2, 1], 3, n=5)
    engine.step()
    assert [request.status is Status.RUNNING for request in engine.samples[first]] == [True, True, False, False, False]
    engine.run()


def test_samples_that_a_small_step_has_no_room_for_come_later():
    engine = FakeEngine()
    first = engine.add([1], 3, n=3)
    assert engine.step(max_tokens=2).samples == engine.samples[first][:2]
    assert len(engine.scheduler.waiting) == 1
    engine.run()


def test_forks_of_a_leader_that_ends_before_its_prompt_is_computed():
    engine = FakeEngine(max_tokens=2)
    first = engine.add([1, 2, 1, 2, 1], 3, n=3)
    engine.step()
    engine.abort(first)
    engine.run()
    assert [request.finish_reason for request in engine.samples[first]] == ["abort", "length", "length"]


def test_a_group_leaves_and_comes_back_as_a_whole():
    engine = FakeEngine(num_blocks=13, block_size=2, max_num_seqs=4, swap_blocks=13)
    old, first = engine.add([1] * 8, 6, seed=1), engine.add([2, 2, 1], 6, n=3)
    members = engine.samples[first]
    swapped = None
    while swapped is None:
        plan = engine.step()
        swapped = plan.swap_outs[0] if plan is not None and plan.swap_outs else None
    assert all(member.status is Status.WAITING and not member.table.ids for member in members)
    assert engine.scheduler.preemption.num_host_pages == len(swapped.pages) > 0
    assert plan.swap_ins == [] and len(engine.scheduler.waiting) == 3
    newcomer = engine.add([1], 2)
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_waiting_preempted, stats.num_free_slots) == (4, 3, 3)
    engine.abort(newcomer)
    while not (plan is not None and plan.swap_ins):
        plan = engine.step()
    assert plan.swap_ins[0].key == swapped.key and {request for request, _ in plan.admitted} == set(members)
    assert old.finish_reason == "length"
    engine.run()
    assert engine.stats().num_waiting_preempted == 0 and engine.stats().num_free_slots == 4
    assert 0 < engine.stats().device_wait_s < engine.stats().step_s
    assert engine.scheduler.preemption.num_swapped == 3 and engine.scheduler.preemption.num_recomputed == 0


def test_shared_blocks_are_swapped_once():
    engine = FakeEngine(num_blocks=10, block_size=2, max_num_seqs=4, swap_blocks=100)
    engine.add([1] * 11, 6, seed=1)
    first = engine.add([2, 2, 1, 1], 8, n=3)
    while not engine.scheduler.preemption.num_swapped:
        engine.step()
    prompt_blocks = {tuple(places.of_groups[0][1][:2]) for places in first.group.host_copy.places.values()}
    assert len(prompt_blocks) == 1
    engine.run()


def test_recomputed_samples_compute_what_they_share_once():
    engine = FakeEngine(num_blocks=14, block_size=2, max_num_seqs=4, prefix_caching=False)
    engine.add([1] * 12, 8, seed=1)
    first = engine.add([2, 1] * 3, 8, n=3)
    while not engine.scheduler.preemption.num_recomputed:
        engine.step()
    assert [len(member.output_token_ids) > 0 for member in engine.samples[first]] == [True] * 3
    num_prompt_tokens = 0
    while first.status is not Status.FINISHED:
        plan = engine.step()
        chunks = [] if plan is None else plan.chunks
        num_prompt_tokens += sum(max(0, min(chunk.stop, 6) - chunk.start) for chunk in chunks)
    assert num_prompt_tokens == 6
    engine.run()


def test_the_last_sample_waits_where_all_together_do_not_fit():
    engine = FakeEngine(num_blocks=6, block_size=2, max_num_seqs=4)
    first = engine.add([1, 2], 8, n=4)
    engine.run()
    assert engine.scheduler.preemption.num_recomputed > 0
    assert all(member.finish_reason for member in engine.samples[first])


def test_full_host_memory_means_recompute():
    engine = FakeEngine(num_blocks=4, block_size=2, max_num_seqs=2, swap_blocks=1)
    for seed in (1, 2):
        engine.add([seed] * 3, 5, seed=seed)
    engine.run()
    preemption = engine.scheduler.preemption
    assert preemption.num_recomputed == 1 and preemption.num_swapped == 0


def test_abort_of_what_is_swapped_out_gives_host_memory_back():
    engine = FakeEngine(num_blocks=4, block_size=2, max_num_seqs=2, swap_blocks=9)
    old, young = engine.add([1] * 3, 5, seed=1), engine.add([2] * 3, 5, seed=2)
    while young.group.host_copy is None:
        engine.step()
    engine.abort(young)
    assert engine.scheduler.preemption.num_host_pages == 0
    plan = engine.step()
    assert len(plan.released_copies) == 1 and not engine.executor.host
    engine.run()
    assert old.finish_reason == "length"


def test_two_that_do_not_fit_together_take_turns():
    for swap_blocks in (0, 99):
        engine = FakeEngine(num_blocks=8, block_size=2, max_num_seqs=8, swap_blocks=swap_blocks)
        groups = [engine.add_beams([token] * 4, 6, width=2, seed=token) for token in (1, 2)]
        samples = engine.add([2, 2, 1, 1], 6, n=4)
        engine.run()
        assert all(group.results for group in groups) and samples.finish_reason


def test_beams_run_every_other_step_and_copy_a_block_each_at_most():
    engine = FakeEngine(num_blocks=40, block_size=4, max_num_seqs=8)
    group, other = engine.add_beams([1, 2, 1], 9, width=4), engine.add([1], 9)
    step = 0
    while engine.scheduler.has_work():
        plan = engine.step()
        if plan is not None:
            beams = [request for request in plan.rows if request.group is group]
            assert not beams or step % 2 == 0
            assert len(plan.copies) <= len(beams)
            assert other in plan.rows or step >= 9
        step += 1
    assert group.results and engine.scheduler.num_copied > 0


def test_a_round_waits_for_all_beams():
    """While the engine compiles, a step may hold fewer tokens than there are beams."""
    engine = FakeEngine(num_blocks=40)
    group = engine.add_beams([1, 2], 6, width=3)
    while engine.scheduler.has_work() or engine.in_flight:
        plan = engine.step(max_tokens=1)
        assert len(rows(plan)) <= 1
    assert group.results


def test_a_beam_is_preempted_while_it_waits_for_others():
    for swap_blocks in (0, 99):
        engine = FakeEngine(num_blocks=10, block_size=2, max_num_seqs=8, swap_blocks=swap_blocks)
        engine.add([2] * 6, 10, priority=-1)
        group = engine.add_beams([1, 2, 1], 6, width=3)
        while engine.scheduler.has_work() or engine.in_flight:
            engine.step(max_tokens=2)
        assert group.results
        preemption = engine.scheduler.preemption
        assert (preemption.num_swapped if swap_blocks else preemption.num_recomputed) > 0


def test_beams_with_few_candidates_left():
    engine = FakeEngine(num_blocks=40, max_num_seqs=8)
    group = engine.add_beams([1, 2, 1], 1, width=6)
    engine.run()
    assert len(group.results) == 4, "the vocabulary"


@pytest.mark.parametrize(
    ("num_blocks", "beams"),
    [
        (6, [(8, 8, 1), (5, 8, 2)]),  # recomputed beams held all of a chunk behind the window, and shared no prompt
        (9, [(6, 9, 1), (7, 7, 3)]),  # the last one left room for others, which were waiting for it
    ],
)
def test_beams_that_come_back_fit_as_before(num_blocks, beams):
    groups = (CacheGroup(), CacheGroup(window=3, num_pages=2))
    engine = FakeEngine(num_blocks=num_blocks, block_size=2, groups=groups, max_num_seqs=4, swap_blocks=0)
    found = [engine.add_beams([1] * prompt, most, width=width) for prompt, most, width in beams]
    engine.run()
    assert all(group.results for group in found) and engine.scheduler.preemption.num_recomputed
