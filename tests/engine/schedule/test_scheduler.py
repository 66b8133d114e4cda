"""One test for each clause of the step contract (docs/step_contract.md) that the scheduler keeps."""

import gc
import itertools
import weakref

import numpy as np
import pytest

from jaxllm.engine.device.compile_plan import CompilePlan
from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.scheduler import Scheduler
from jaxllm.engine.schedule.sequence import End, Sequence, Status
from jaxllm.engine.schedule.sequence_group import Samples
from jaxllm.engine.stats import StepCounter, read_stats
from jaxllm.sampling_params import SamplingParams
from tests.fake_engine import FakeEngine, expected, rows


def test_abort_in_flight_drops_the_result_and_frees_the_blocks():
    engine = FakeEngine()
    a, b = engine.add([1], 6), engine.add([2], 6)
    engine.step()
    engine.step()
    assert a in engine.sampling_in_flight() and len(a.output_token_ids) == 1
    engine.abort(a)
    assert a.table.ids == [] and a.slot == -1
    assert rows(engine.step()) == [b]
    assert len(a.output_token_ids) == 1 and a.finish_reason == "abort"
    engine.run()
    assert len(b.output_token_ids) == 6


def test_abort_while_waiting_and_twice():
    engine = FakeEngine(max_num_seqs=1)
    a, b, c = engine.add([1]), engine.add([2]), engine.add([1])
    engine.step()
    engine.abort(b)
    engine.abort(b)
    assert len(engine.scheduler.waiting) == 1
    engine.run()
    assert (a.finish_reason, b.finish_reason, c.finish_reason) == ("length", "abort", "length")
    assert b.output_token_ids == []


def full_pool():
    """Two requests that fill the pool's four blocks; the next step needs a block for the older one."""
    engine = FakeEngine(num_blocks=4, block_size=2, max_num_seqs=2)
    old, young = engine.add([1, 1, 1], 5, seed=1), engine.add([2, 2, 2], 5, seed=2)
    engine.step()
    engine.step()
    assert engine.pool.num_free == 0 and old.num_computed == young.num_computed == 4
    return engine, old, young


def test_victim_in_flight_is_drained_then_evicted_and_keeps_its_token():
    engine, old, young = full_pool()
    assert young in engine.sampling_in_flight() and len(young.output_token_ids) == 1
    plan = engine.step()
    assert plan is None and young.status is Status.DRAINING
    assert len(young.output_token_ids) == 2 and young.table.ids
    plan = engine.step()
    assert plan.decodes == [old] and len(plan.new_blocks) == 1
    assert young.status is Status.WAITING and not young.table.ids and len(young.output_token_ids) == 2
    assert engine.scheduler.preemption.num_recomputed == 1
    engine.run()


def test_abort_of_a_draining_request():
    engine, old, young = full_pool()
    engine.step()
    assert young.status is Status.DRAINING
    engine.abort(young)
    assert engine.step().decodes == [old]
    engine.run()
    assert engine.scheduler.preemption.num_recomputed == 0 and len(old.output_token_ids) == 5


def test_victim_is_last_by_priority_then_arrival():
    engine = FakeEngine(num_blocks=6, block_size=2, max_num_seqs=3)
    a, b, c = (engine.add([t] * 3, 5, seed=t, priority=p) for t, p in ((1, 0), (2, 1), (3, 0)))
    engine.step()
    engine.step()
    engine.step()
    assert [r.status for r in (a, b, c)] == [Status.RUNNING, Status.DRAINING, Status.RUNNING]
    engine.run()


def test_victim_takes_no_block_in_the_plan_that_preempts_it():
    engine = FakeEngine(num_blocks=4, block_size=2)
    victim = engine.add([2], 5, seed=2, priority=1)
    engine.step()
    old, third = engine.add([1, 1], 3, seed=1), engine.add([1], 3)
    engine.step()
    plan = engine.step()
    assert victim.status is Status.DRAINING and victim.num_computed == 2
    assert set(plan.rows) == {old, third} and [new[0] for new in plan.new_blocks] == [old.slot]
    engine.run()
    assert old.finish_reason == "length"


def test_preempted_prefill_loses_its_row_at_once():
    """No token of it is in flight, so nothing has to be drained."""
    engine = FakeEngine(num_blocks=9, block_size=2, max_num_seqs=2)
    decode, prefill = engine.add([1], 6), engine.add([2] * 15, 2)
    plans = [engine.step(max_tokens=max_tokens) for max_tokens in (3, 12, 1, 1)]
    assert [rows(plan) for plan in plans] == [[decode, prefill], [decode, prefill], [decode], [decode]]
    assert engine.pool.num_free == 0 and prefill.num_computed == 13 and prefill.slot >= 0
    plan = engine.step(max_tokens=2)
    assert plan.rows == [decode] and len(plan.new_blocks) == 1
    assert prefill.epoch == 1 and prefill.status is Status.WAITING
    engine.run()


def test_request_that_fills_the_pool_is_served():
    """Room for others to grow is kept free only while there are others."""
    engine = FakeEngine(num_blocks=16, block_size=2)
    a, b = engine.add([1] * 31, 1), engine.add([2] * 31, 1)
    engine.run()
    assert a.finish_reason == b.finish_reason == "length"


def test_few_tokens_go_round():
    """While the engine compiles, a step may hold fewer tokens than requests run."""
    engine = FakeEngine()
    requests = [engine.add([1], 9, seed=seed) for seed in range(3)]
    engine.step()
    served = [request for _ in range(6) for request in rows(engine.step(max_tokens=1))]
    assert [served.count(request) for request in requests] == [2, 2, 2]
    engine.run()


def ends_after(num_tokens):
    """A request whose last token of so many is the end of sequence."""
    for seed in itertools.count():
        engine = FakeEngine()
        request = engine.add([1], 9, seed=seed, eos=True)
        if len(expected(request)[0]) == num_tokens:
            return engine, request


def test_end_of_sequence_in_flight_computes_one_token_too_many_and_drops_it():
    engine, request = ends_after(3)
    computed = 0
    while engine.scheduler.has_work() or engine.in_flight:
        computed += len(rows(engine.step()))
    assert request.finish_reason == "stop" and request.stop_reason is None
    assert len(request.output_token_ids) == 3 and computed == 4


def test_stop_token_is_the_stop_reason_but_end_of_sequence_is_not():
    engine = FakeEngine()
    request = engine.add([1], 9, stop_ids=[1])
    engine.run()
    assert (request.finish_reason, request.stop_reason, request.output_token_ids[-1]) == ("stop", 1, 1)


def test_length_stop_is_known_when_planning():
    engine = FakeEngine()
    request = engine.add([1, 2, 1], 3)
    assert [rows(engine.step()) for _ in range(4)] == [[request]] * 3 + [[]]
    assert request.finish_reason == "length" and len(request.output_token_ids) == 3


def test_host_dependent_runs_every_other_step_and_nobody_waits():
    engine = FakeEngine()
    slow, fast = engine.add([1], 4, host_dependent=True), engine.add([2], 4)
    plans = [rows(engine.step()) for _ in range(4)]
    assert [slow in plan for plan in plans] == [True, False, True, False]
    assert all(fast in plan for plan in plans)
    engine.run()


@pytest.mark.parametrize("fail", ["dispatch", "collect"])
def test_failed_step_is_recomputed(fail):
    engine = FakeEngine()
    a, b = engine.add([1, 2, 1], 6, seed=1), engine.add([2], 6, seed=2)
    for _ in range(3):
        engine.step()
    before = len(a.output_token_ids)
    engine.step(fail=fail)
    assert engine.pool.num_used == 0 and a.status is b.status is Status.WAITING
    assert len(a.output_token_ids) == before + (fail == "dispatch")  # the step before had succeeded
    engine.run()
    assert a.finish_reason == b.finish_reason == "length"


def test_poison_request_is_quarantined_alone():
    engine = FakeEngine()
    neighbours = [engine.add([1], 6, seed=1), engine.add([2], 6, seed=2)]
    poison = engine.add([1, 1], 6)
    later = [engine.add([2, 2], 6, seed=3), engine.add([2, 1], 6, seed=4)]
    engine.poison.add(poison)
    engine.run()
    assert poison.finish_reason == "error" and "2 times" in poison.error and poison.output_token_ids == []
    assert all(request.finish_reason == "length" for request in neighbours + later)
    assert engine.failures[poison] == 2


def test_failures_are_forgotten_when_a_request_gets_further():
    engine = FakeEngine(num_blocks=100)
    a, b = engine.add([1], 90, seed=1), engine.add([2], 90, seed=2)
    for _ in range(4):
        for _ in range(20):
            engine.step()
        engine.step(fail="collect")
    engine.run()
    assert engine.failures[a] > 2 and engine.failures[b] > 2
    assert a.finish_reason == b.finish_reason == "length"


def test_logits_that_are_not_finite_end_only_their_request():
    engine = FakeEngine()
    a, b = engine.add([1], 5), engine.add([2], 5)
    engine.step()
    engine.in_flight.tokens.value[0] = -1
    engine.run()
    assert (a.finish_reason, a.output_token_ids) == ("error", []) and "not finite" in a.error
    assert b.finish_reason == "length"


class Counted(Sequence):
    """A request that counts how often anyone looks at one."""

    looks = 0

    def __getattribute__(self, name):
        Counted.looks += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("max_num_seqs", [2, 64])
def test_schedule_does_not_look_at_the_waiting_queue(max_num_seqs):
    """Neither when slots are short nor when blocks are."""
    looks = []
    for num_waiting in (10, 2_000):
        scheduler = Scheduler(BlockPool(16, 2), max_num_seqs=max_num_seqs)
        for arrival in range(num_waiting):
            fields = {"prompt_token_ids": [arrival] * 7, "arrival": arrival, "seed": 0, "max_total_len": 32}
            scheduler.add(Samples([Counted(params=SamplingParams(), **fields)]))
        for _ in range(3):
            plan = scheduler.schedule(64)
            scheduler.commit(plan, np.ones(len(plan.rows), np.int32))
        Counted.looks = 0
        assert 2 <= len(scheduler.schedule(64).rows) < 10
        looks.append(Counted.looks)
    assert looks[0] == looks[1] < 1000


class Watched(Sequence):
    """A sequence that a weak reference can point at."""


def test_requests_aborted_while_they_wait_are_let_go():
    """At any point fewer of those that have ended are kept than wait."""
    scheduler = Scheduler(BlockPool(4, 2), max_num_seqs=1)
    waiting = []
    for arrival in range(2_000):
        fields = {"prompt_token_ids": [1], "arrival": arrival, "seed": 0, "max_total_len": 4}
        waiting.append(Watched(params=SamplingParams(), **fields))
        scheduler.add(Samples(waiting[-1:]))
    kept = [weakref.ref(sequence) for sequence in waiting]
    while waiting:
        scheduler.finish(waiting.pop(), End("abort"))
        assert len(scheduler.waiting._entries) <= 2 * len(waiting)
    gc.collect()
    assert not scheduler.waiting._entries and not scheduler.has_work() and not any(ref() for ref in kept)


def test_an_aborted_parent_leaves_its_forks_in_the_queue():
    engine = FakeEngine(max_num_seqs=1)
    running, first = engine.add([2], 6), engine.add([1, 2], 3, n=4)
    engine.step()
    for request in engine.samples[first][:3]:
        engine.abort(request)
    assert engine.scheduler.waiting.sequences() == engine.samples[first][3:]
    engine.run()
    assert running.finish_reason == engine.samples[first][3].finish_reason == "length"


class Compared(Sequence):
    """A sequence that counts how often one is compared with another."""

    comparisons = 0
    __hash__ = Sequence.__hash__

    def __eq__(self, other):
        Compared.comparisons += 1
        return self is other


def test_many_that_end_at_once_are_not_searched_for():
    Compared.comparisons, count = 0, 500
    scheduler = Scheduler(BlockPool(2 * count, 2), max_num_seqs=count)
    for arrival in range(count):
        fields = {"prompt_token_ids": [arrival], "arrival": arrival, "seed": 0, "max_total_len": 2}
        scheduler.add(Samples([Compared(params=SamplingParams(), **fields)]))
    assert scheduler.schedule(count).num_samples == count
    for sequence in reversed(scheduler.running):
        scheduler.finish(sequence, End("abort"))
    assert not scheduler.has_work()
    assert Compared.comparisons < count


def test_stats_look_at_no_block():
    """They are asked for several times a second, between two steps."""

    class Blocks(list):
        def __iter__(self):
            raise AssertionError("O(blocks)")

    engine = FakeEngine(num_blocks=8, block_size=2)
    engine.add([1, 2, 1, 2, 1], 1)
    engine.run()
    engine.add([1, 2, 1, 1, 1], 4, n=2)
    engine.step()
    refs, engine.pool.refs = engine.pool.refs, Blocks(engine.pool.refs)
    stats = read_stats(engine.scheduler, CompilePlan({}), 0, StepCounter())
    engine.pool.refs = refs
    assert (stats.blocks_used, stats.blocks_shared, stats.blocks_cached, stats.wasted_slots) == (3, 3, 1, 1)
    engine.run()


def test_a_group_whose_first_has_ended_goes_on_in_its_place():
    engine = FakeEngine(max_num_seqs=1)
    running, first = engine.add([2], 6), engine.add([1, 2], 3, n=3)
    other = engine.add([2, 1], 2)
    engine.step()
    engine.abort(other)
    engine.abort(first)
    engine.run()
    assert all(request.finish_reason == "length" for request in (running, *engine.samples[first][1:]))
