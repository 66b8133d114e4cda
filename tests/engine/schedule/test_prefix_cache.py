"""When a block may be found by others, and when it may not."""

import pytest

from jaxllm.engine.schedule.sequence import Status
from tests.fake_engine import FakeEngine, rows, truth


def test_prompt_block_is_hit_only_by_a_later_plan():
    engine = FakeEngine(block_size=2)
    first, second = engine.add([1, 2, 1, 2, 1]), engine.add([1, 2, 1, 2, 2])
    assert rows(engine.step()) == [first]  # the second waits for blocks that are being written
    assert engine.step().admitted == [(second, 4)]
    assert second.table.ids[:2] == first.table.ids[:2] and second.num_cached == 4
    engine.run()


def test_blocks_are_hit_only_by_requests_with_the_same_salt():
    """Also those of the end of another's prompt, and while they are being written."""
    engine = FakeEngine(block_size=2, max_tokens=16)
    prompt = [1, 2, 1, 2, 1]
    first, other, none = (engine.add(prompt, cache_salt=salt) for salt in ("a", "b", None))
    assert rows(engine.step()) == [first, other, none]  # none waits for another
    again = {salt: engine.add(prompt, cache_salt=salt) for salt in ("a", "b", None, "\ud800")}
    engine.run()
    assert {salt: request.num_cached for salt, request in again.items()} == {"a": 4, "b": 4, None: 4, "\ud800": 0}
    assert len({tuple(request.table.keys[:2]) for request in again.values()}) == 4


def test_waits_for_blocks_of_a_chunked_prefill():
    engine = FakeEngine(block_size=2, max_tokens=4)
    prompt = [1, 2, 1, 1, 2, 2, 1, 2, 1]
    first, second = engine.add(prompt), engine.add(prompt)
    assert [rows(engine.step()) for _ in range(2)] == [[first], [first]]
    plan = engine.step()
    assert plan.admitted == [(second, 8)] and second in plan.decodes
    engine.run()


def test_nobody_waits_for_the_end_of_a_prompt_that_nobody_sees_tokens_of():
    """Whose last token is computed like a decode, as the step before had no room for it."""
    engine = FakeEngine(block_size=2, max_tokens=3, num_blocks=64, reports_tokens=False)
    first, second = engine.add([1, 2, 1, 2], 40), engine.add([1, 2, 1, 2, 1], 1)
    for _ in range(5):
        engine.step()
    assert not first.finish_reason and second.finish_reason and second.num_cached == 4
    engine.run()


def test_waiting_ends_when_the_writer_is_aborted():
    engine = FakeEngine(block_size=2, max_tokens=4)
    first, second = engine.add([1] * 9), engine.add([1] * 9)
    engine.step()
    engine.abort(first)
    assert engine.step().admitted == [(second, 4)]
    engine.run()


def test_generated_block_is_hit_after_its_commit():
    engine = FakeEngine(block_size=2)
    first = engine.add([1, 2, 1], 2, seed=5)
    engine.step()
    engine.step()
    assert first.num_computed == 4 and len(first.output_token_ids) == 1
    early = engine.add(truth(first, 5), 1)
    engine.step()
    assert first.finish_reason and early.num_cached == 4
    engine.run()


def test_blocks_that_nobody_has_seen_are_cached_some_at_once_and_all_in_the_end():
    engine = FakeEngine(block_size=2, num_blocks=64, reports_tokens=False)
    first, num_keyed = engine.add([1, 2, 1], 45, seed=5), set()
    while not first.finish_reason:
        num_keyed.add(first.table.num_keyed)
        engine.step()
    assert num_keyed == {0, 1, 9, 17, 23}, "the last ones when it leaves the batch"
    again = engine.add(truth(first, 47), 1)
    engine.run()
    assert again.num_cached == 46


def test_update_params_forgets_blocks_that_were_half_written_before():
    engine = FakeEngine(block_size=4)
    first = engine.add([1, 2], 6)
    engine.step()
    engine.update_params()
    engine.run()
    second = engine.add(truth(first, 5), 1)
    engine.run()
    assert second.num_cached == 0


@pytest.mark.parametrize("event", ["update", "failure"])
def test_caches_again_after_the_cache_was_dropped(event):
    engine = FakeEngine(block_size=2)
    first = engine.add([1, 2, 1, 2, 1], 4)
    engine.step()
    if event == "update":
        engine.update_params()
        first = engine.add([1, 2, 1, 2, 1], 4)
    else:
        engine.step(fail="collect")
    engine.run()
    assert first.num_cached == 0
    second = engine.add(truth(first, 9), 1)
    engine.run()
    assert second.num_cached == 8


def test_no_prefix_caching():
    engine = FakeEngine(prefix_caching=False)
    requests = [engine.add([1, 2, 1, 2, 1]) for _ in range(3)]
    engine.run()
    assert all(request.num_cached == 0 for request in requests)


def test_draining_request_offers_only_what_was_dispatched():
    """The victim's row was planned before it was chosen, and taken back: its block lacks that token."""
    engine = FakeEngine(num_blocks=4, block_size=2)
    victim = engine.add([2, 2], 4, seed=2, priority=1)
    engine.step()
    old, third = engine.add([1, 1], 2, seed=1), engine.add([1], 4, host_dependent=True)
    engine.step()
    engine.step()
    assert victim.status is Status.DRAINING and victim.num_tokens == 4 and victim.num_computed == 3
    engine.abort(third)  # so that its block is the next to be reused, not the victim's
    engine.abort(victim)
    related = engine.add(truth(victim, 5), 1)
    engine.run()
    assert old.finish_reason == "length" and related.num_cached == 2
