"""Several shards of data: who gets which request, and what must hold of each shard under random events."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from jaxllm.engine.schedule.cache_groups import EVERYTHING
from tests.engine.schedule.test_scheduler_random import GROUPS, SchedulerMachine, generates, numbers, requests
from tests.fake_engine import PROMPT_TOKENS
from tests.fake_shards import ShardedEngine


class ShardsMachine(SchedulerMachine):
    @initialize(
        num_shards=st.integers(2, 3),
        num_blocks=st.integers(3, 8),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 4),
        prefix_caching=st.sampled_from([True, True, True, False]),
        swap_blocks=st.sampled_from([0, 0, 6, 100]),
        groups=st.sampled_from([EVERYTHING, EVERYTHING, *GROUPS]),
        whole_prompts=st.sampled_from([False, False, False, True]),
        most_tokens=st.sampled_from([4, 8, 64]),  # longer prompts may be shared
    )
    def start(self, **sizes):
        if sizes["whole_prompts"]:
            sizes |= {"groups": EVERYTHING, "most_tokens": 64}
        if sizes["most_tokens"] < 64:
            sizes["num_blocks"] += 10
        sizes["max_tokens"] = min(8, sizes["most_tokens"])
        self.engine = ShardedEngine(**sizes)

    @precondition(generates)
    @rule(prompt=st.lists(st.sampled_from(PROMPT_TOKENS), min_size=14, max_size=30), fields=requests, n=numbers)
    def add_long(self, prompt, fields, n):
        """Alone, if nobody else is there: so that it may be shared."""
        self.engine.add(prompt[: self.engine.capacity - 1], n=n, **fields)
        self.engine.step()
        self.engine.step()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("max_examples", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_random_events(max_examples):
    sizes = settings(
        max_examples=max_examples, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    run_state_machine_as_test(ShardsMachine, settings=sizes)


def shard_of(engine, sequence) -> int:
    return engine.scheduler.shards.index(engine.scheduler.of(sequence))


def running(engine) -> list[int]:
    return [len(scheduler.running_set) for scheduler in engine.scheduler.shards]


def test_shards_fill_evenly_and_nobody_waits_for_a_full_one():
    engine = ShardedEngine(max_num_seqs=2, num_blocks=60, max_tokens=8)
    for i in range(12):
        engine.add(
            [1, 2, 1, 2], 3 + 8 * (i % 2), seed=i
        )  # those that end soon are all that a blind turn would give one
    most = 0
    while engine.has_work():
        engine.step()
        if engine.scheduler.waiting:
            most += 1
            assert min(running(engine)) > 0, "one idles while others wait"
    assert most > 2


def test_a_long_queue_is_not_given_away_before_there_is_room():
    engine = ShardedEngine(max_num_seqs=2, num_blocks=60)
    sequences = [engine.add([1] * 5, 10 + 2 * i, seed=i) for i in range(20)]
    urgent = None
    for _ in range(6):
        engine.step()
        if urgent is None and running(engine) == [2, 2]:
            assert sum(len(scheduler.waiting) for scheduler in engine.scheduler.shards) <= 2
            urgent = engine.add([2, 2], 2, priority=-1)
    while urgent.finish_reason is None:
        engine.step()
    assert sum(one.num_computed > 0 for one in sequences) <= 5, "it went before those that waited"
    engine.run()


def test_a_prompt_goes_where_its_beginning_is_unless_that_shard_is_busier():
    engine = ShardedEngine(max_num_seqs=4, num_blocks=60, block_size=2)
    first = engine.add([1, 2] * 6, 1)
    engine.run()
    home, other = shard_of(engine, first), 1 - shard_of(engine, first)
    again = engine.add([1, 2] * 6 + [1], 30)
    engine.step()
    assert shard_of(engine, again) == home and again.num_cached == 12
    beside = engine.add([1, 2] * 6 + [2], 30)
    engine.step()
    assert shard_of(engine, beside) == home and beside.num_cached == 12  # a quarter of the slots more
    third = engine.add([1, 2] * 6 + [1, 1], 30)
    engine.step()
    assert shard_of(engine, third) == other and third.num_cached == 0
    engine.run()


def test_a_victim_that_is_computed_again_may_go_to_another_shard():
    engine = ShardedEngine(max_num_seqs=4, num_blocks=8, block_size=2, prefix_caching=False)
    long, _, victim = (engine.add([1, 2, 1], max_new, seed=i) for i, max_new in enumerate((12, 4, 12)))
    engine.step()
    home = shard_of(engine, victim)
    assert shard_of(engine, long) == home
    while victim.num_tokens < 15:
        engine.step()
    assert engine.scheduler.shards[home].preemption.num_recomputed == 1 and shard_of(engine, victim) != home
    engine.run()


def test_samples_of_a_request_stay_together():
    engine = ShardedEngine(max_num_seqs=3, num_blocks=60, num_shards=3)
    firsts = [engine.add([1, 2, 1], 9, n=3, seed=i) for i in range(3)]
    for _ in range(4):
        engine.step()
    for first in firsts:
        assert len({shard_of(engine, sequence) for sequence in engine.samples[first]}) == 1
    assert running(engine) == [3, 3, 3]
    engine.run()


def test_a_failed_step_is_blamed_on_one_request_of_all_shards():
    engine = ShardedEngine(max_num_seqs=2, num_blocks=60)
    sequences = [engine.add([1, 2, i % 2 + 1], 6, seed=i) for i in range(4)]
    engine.poison = {sequences[2]}
    engine.run()
    assert [sequence.finish_reason for sequence in sequences].count("error") == 1
    assert sequences[2].finish_reason == "error"


def test_a_long_prompt_is_computed_by_all_shards():
    engine = ShardedEngine(num_shards=3, max_num_seqs=2, num_blocks=60, most_tokens=8)
    first = engine.add([1, 2, 2] * 16, 4)
    steps = 0
    while not first.output_token_ids:
        engine.step()
        steps += 1
    assert engine.executor.num_shared_steps == 2 and steps == 4  # two of 24 tokens, less the last
    assert all(not scheduler.running_set.guests for scheduler in engine.scheduler.shards)
    engine.run()
    others = [engine.add([1, 2, 2] * 15 + [2, 1], 30, seed=i) for i in range(3)]
    engine.step()
    assert len({shard_of(engine, other) for other in others}) == 3
    assert all(other.num_cached >= 44 for other in others), "each shard has kept it"
    engine.run()


@pytest.mark.parametrize("event", ["abort", "dispatch", "collect", "update", "others", "small"])
def test_a_shared_prompt_and_what_may_happen(event):
    engine = ShardedEngine(max_num_seqs=3, num_blocks=40, most_tokens=8)
    first, others = engine.add([1, 2, 2, 1] * 12, 6, n=2), []
    for _ in range(2):
        engine.step()
    assert engine.executor.num_shared_steps == 2
    match event:
        case "abort":
            for sequence in engine.samples[first].copy():
                engine.abort(sequence)
            assert engine.scheduler.num_used == 0
        case "update":
            engine.update_params()
        case "others":
            others = [engine.add([2, 1] * 6, 9, seed=i) for i in range(4)]
        case "small":
            engine.step(max_tokens=3)
        case _:
            engine.step(fail=event)
    if others:
        for _ in range(8):
            engine.step()
        assert all(other.output_token_ids for other in others), "short prompts have half of the steps"
    engine.run()
