"""Prompts get blocks as they are computed: who enters, who waits, and that long ones don't block each other."""

import random

import pytest

from jaxllm.engine.schedule.sequence import Status
from tests.fake_engine import PROMPT_TOKENS, FakeEngine, rows


def make_engine(**fields):
    return FakeEngine(**{"num_blocks": 16, "block_size": 4, "max_num_seqs": 4, "max_tokens": 16} | fields)


def num_computed(plans):
    """Prompt tokens in all chunks."""
    return sum(chunk.stop - chunk.start for plan in plans if plan is not None for chunk in plan.chunks)


def run(engine):
    plans = []
    while engine.scheduler.has_work() or engine.in_flight:
        plans.append(engine.step())
    return plans


def test_a_prompt_owns_the_blocks_of_what_it_has_computed():
    engine = make_engine()
    prompt = engine.add([1] * 50)
    held = []
    for _ in range(4):
        plan = engine.step()
        held.append(len(prompt.table))
        assert len(plan.new_blocks) == (0 if len(held) == 1 else held[-1] - held[-2]), "the first are in its slot's row"
    assert held == [4, 8, 12, 13]
    engine.run()


def test_a_long_prompt_begins_while_another_one_decodes():
    """There is no room for all of it. It goes on when the other one ends, and nothing is computed twice."""
    engine = make_engine(prefix_caching=False)
    first, second = engine.add([1] * 36, 5, seed=1), engine.add([2] * 40, 2, seed=2)
    plans = [engine.step() for _ in range(3)]
    assert [second in rows(plan) for plan in plans] == [False, False, True], "when the first one's prompt is computed"
    while not first.finish_reason:
        plans.append(engine.step())
        assert second.slot >= 0, "the first one grows into the reserve"
    assert 0 < second.num_computed < 39
    plans += run(engine)
    assert num_computed(plans) == 36 + 40 and engine.scheduler.preemption.num_recomputed == 0


def test_nobody_enters_while_one_that_has_begun_is_short_of_blocks():
    engine = make_engine()
    first, second, third = engine.add([1] * 36, 9), engine.add([2] * 40, 2), engine.add([2, 1], 2)
    while not first.finish_reason:
        engine.step()
        assert third.slot < 0 or second.num_computed >= 39
    engine.run()


def test_the_first_prompt_takes_the_blocks_of_the_last():
    """Decodes have grown into what both were promised."""
    engine = make_engine(num_blocks=12, block_size=2, max_tokens=4, prefix_caching=False)
    decodes = [engine.add([1], 20, seed=seed) for seed in range(2)]
    engine.step()
    first, last = engine.add([2] * 13, 1, priority=1, seed=3), engine.add([1] * 5, 1, priority=1, seed=4)
    engine.run()
    assert engine.scheduler.preemption.num_recomputed > 0
    assert all(request.finish_reason == "length" for request in (*decodes, first, last))


@pytest.mark.parametrize("seed", range(40))
def test_many_long_prompts_in_a_small_pool(seed):
    """Each takes half of the pool at least. They end, and little is computed twice."""
    rng = random.Random(seed)
    engine = FakeEngine(
        num_blocks=rng.randint(6, 16),
        block_size=rng.randint(1, 4),
        max_num_seqs=rng.randint(2, 6),
        max_tokens=rng.choice([3, 8, 16]),
        prefix_caching=rng.random() < 0.5,
        swap_blocks=rng.choice([0, 5, 100]),
    )
    for _ in range(rng.randint(3, 8)):
        prompt_len = rng.randint(engine.capacity // 2, engine.capacity - 1)
        prompt = [rng.choice(PROMPT_TOKENS) for _ in range(prompt_len)]
        fields = {"seed": rng.randrange(9), "priority": rng.choice([0, 0, 1])}
        if rng.random() < 0.2:
            engine.add_beams(prompt, rng.randint(1, 8), width=rng.randint(1, 3), **fields)
        else:
            engine.add(prompt, rng.randint(1, 8), n=rng.choice([1, 1, 2, 4]), **fields)
        for _ in range(rng.randint(0, 6)):
            engine.step()
    engine.run()


def test_a_request_for_many_samples_holds_one_slot_until_its_prompt_is_computed():
    engine = make_engine(num_blocks=100, max_num_seqs=8)
    many = engine.add([1] * 100, 3, n=8, priority=1)
    for _ in range(3):
        engine.step()
    assert len(engine.scheduler.running) == 1 and len(engine.scheduler.waiting) == 7
    others = [engine.add([2], 40, seed=seed) for seed in range(4)]
    engine.step()
    assert all(other.slot >= 0 for other in others)
    while many.fork_len:
        engine.step()
    have_slots = [sample.slot >= 0 for sample in engine.samples[many]]
    assert have_slots == [True] * 4 + [False] * 4, "as many as are free"
    engine.run()


@pytest.mark.parametrize("prompt_len", [1, 4, 5, 7, 8])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_late_samples_never_compute_the_prompt_again(prompt_len, prefix_caching):
    """But for its last token, which their logits come from: they wait with references to its blocks."""
    engine = make_engine(num_blocks=100, max_num_seqs=3, prefix_caching=prefix_caching)
    first = engine.add([1] * prompt_len, 5, n=8)
    tokens = sum(plan.num_tokens for plan in run(engine) if plan is not None)
    assert tokens == prompt_len + 5 + 8 * 4, "five come late"
    assert [sample.finish_reason for sample in engine.samples[first]] == ["length"] * 8


def test_late_samples_go_before_what_came_after_them():
    engine = make_engine(num_blocks=100, max_num_seqs=2)
    first, other = engine.add([1, 2, 1], 3, n=4), engine.add([2], 3)
    while not engine.samples[first][3].finish_reason:
        engine.step()
        assert other.slot < 0 or not first.group.waiting
    engine.run()


def test_what_waits_gives_its_blocks_up_when_nothing_else_can_go_on():
    """Nobody runs but a request that needs the whole pool; those that wait for a slot hold some of it."""
    engine = make_engine(num_blocks=6, block_size=2, max_num_seqs=1, prefix_caching=False)
    first = engine.add([1, 2, 1, 2, 1], 2, n=3, priority=1)
    engine.step()
    large = engine.add([2] * 9, 3)
    engine.step()
    assert engine.scheduler.running_set.stems
    while first.status is not Status.FINISHED:
        engine.step()
    while large.slot < 0:
        engine.step()
    assert not engine.scheduler.running_set.stems and len(first.group.waiting) == 2
    engine.run()


def test_an_abort_of_all_that_wait_frees_what_they_hold():
    engine = make_engine(max_num_seqs=1)
    first = engine.add([1, 2, 1, 2, 1], 9, n=3)
    engine.step()
    engine.step()
    assert len(engine.scheduler.running_set.stems) == 1
    for sample in engine.samples[first][1:]:
        engine.abort(sample)
    assert not engine.scheduler.running_set.stems
    engine.run()
