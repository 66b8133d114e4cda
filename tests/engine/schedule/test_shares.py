"""Who gets how many tokens of a step: prompts go by priority, a long one not at once, host-dependent rows together."""

import pytest

from tests.fake_engine import FakeEngine, rows


def make_engine(**fields):
    return FakeEngine(**{"num_blocks": 100, "block_size": 4, "max_num_seqs": 4, "max_tokens": 16} | fields)


def tokens_of(plan):
    """Sequence -> its tokens in the plan's chunks."""
    return {chunk.sequence: chunk.stop - chunk.start for chunk in plan.chunks}


def steps_until_first_token(engine, request):
    for num_steps in range(1, 100):
        engine.step()
        if request.output_token_ids:
            return num_steps
    raise AssertionError("no token")


def test_a_waiting_prompt_of_higher_priority_goes_before_a_running_one():
    engine = make_engine()
    long = engine.add([1] * 200, priority=10)
    assert tokens_of(engine.step()) == {long: 16}
    first = engine.add([2] * 20, priority=-10)
    assert tokens_of(engine.step()) == {first: 16}
    assert tokens_of(engine.step()) == {first: 4, long: 12}
    engine.run()


def test_running_prompts_go_by_priority():
    engine = make_engine()
    low = engine.add([1] * 40, priority=1)
    engine.step()
    high = engine.add([2] * 40)
    engine.step()
    middle = engine.add([2, 1] * 20)
    sizes = [tokens_of(engine.step()) for _ in range(4)]
    assert sizes[0] == {high: 8, middle: 8} and sizes[1] == {high: 16}
    assert sizes[2:] == [{middle: 15}, {middle: 15}], low
    engine.run()


@pytest.mark.parametrize("priority", [0, -1])
def test_a_short_prompt_does_not_wait_for_a_long_one(priority):
    """Of the same priority or a higher one. The long one's steps stay full."""
    engine = make_engine()
    long = engine.add([1] * 300)
    engine.step()
    short = engine.add([2] * 4, priority=priority)
    plan = engine.step()
    assert tokens_of(plan) == {long: 12, short: 4} and plan.num_tokens == 16
    assert steps_until_first_token(engine, short) == 1
    engine.run()


def test_a_prompt_of_lower_priority_waits():
    engine = make_engine()
    long, low = engine.add([1] * 40), engine.add([2] * 4, priority=1)
    assert [tokens_of(engine.step()) for _ in range(3)] == [{long: 16}, {long: 16}, {long: 8, low: 4}]
    engine.run()


def test_a_prompt_that_the_step_can_finish_is_not_cut():
    engine = make_engine()
    first, second = engine.add([1] * 12), engine.add([2] * 12)
    assert tokens_of(engine.step()) == {first: 12, second: 4}
    engine.run()


def test_long_prompts_hold_few_rows_and_the_step_stays_full():
    engine = make_engine(max_tokens=32, max_num_seqs=20)
    prompts = [engine.add([1 + i % 2] * 100, seed=i, cache_salt=str(i)) for i in range(12)]
    plan = engine.step()
    assert tokens_of(plan) == dict(zip(prompts, (20, 8, 4), strict=False)) and plan.num_tokens == 32
    sizes = []
    while any(prompt.num_computed < 100 for prompt in prompts):
        sizes.append(engine.step().num_tokens)
    assert all(size == 32 for size in sizes[:-1])
    engine.run()


def test_what_is_left_goes_back_to_the_first():
    engine = make_engine(max_num_seqs=1)
    long = engine.add([1] * 40)
    engine.add([2] * 4)
    assert tokens_of(engine.step()) == {long: 16}, "there is no slot for the other"
    engine.run()


def test_beams_that_come_at_different_steps_run_in_the_same_ones():
    engine = make_engine(max_num_seqs=8)
    groups, plans = [], []
    for prompt in ([1, 2], [2, 1], [2, 2, 1], [1] * 9):
        groups.append(engine.add_beams(prompt, 20, width=2))
        plans.append(engine.step())
    plans = [engine.step() for _ in range(12)]
    served = [{request.group for request in rows(plan)} for plan in plans]
    assert all(found in (set(), set(groups)) for found in served)
    assert sum(map(bool, served)) == 6, "every other step"
    engine.run()


def test_host_dependent_rows_run_although_others_arrive_in_each_step():
    engine = make_engine(max_num_seqs=30)
    first, num_steps = engine.add([1, 2], 5, host_dependent=True), 0
    while not first.finish_reason:
        engine.step()
        engine.add([2], 3, seed=num_steps, host_dependent=True)
        num_steps += 1
    assert num_steps <= 2 * 5 + 1
    engine.run()
