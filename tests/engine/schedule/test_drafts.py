"""Sequences whose drafts are verified have none, one or several samples in a step, and take a list of tokens of which
the device decides how long it is. `test_scheduler_random.py` has them among all others."""

import pytest

from jaxllm.engine.schedule.cache_groups import CacheGroup
from jaxllm.engine.schedule.plan import NO_TOKEN, NOT_ACCEPTED, NOT_FINITE, Chunk
from jaxllm.engine.schedule.sequence import Sequence
from tests.fake_engine import Ends, FakeEngine, truth


def right(request: Sequence, num_tokens: int) -> list[int]:
    """What the device will draw."""
    known = request.num_tokens
    return truth(request, known + num_tokens)[known:]


def drafting(engine, prompt=(1, 2, 1), max_new=12, *, num_drafts=2, **fields) -> Sequence:
    """A sequence with its first token committed, all of whose drafts are right."""
    fields["propose"] = lambda request, most: right(request, min(most, num_drafts))
    request = engine.add(prompt, max_new, **fields)
    engine.step()
    engine.step()
    assert request.num_in_flight == 0 and len(request.output_token_ids) == 1
    return request


def answer(engine, tokens: list[int]) -> list[Sequence]:
    """The device gives these tokens for the step in flight, whatever it has drawn. Returns those that are updated."""
    assert len(engine.in_flight.plan.samples) == len(tokens)
    engine.expected.clear()
    return engine.answer(tokens)


def test_a_row_of_drafts_has_a_sample_for_each_of_its_tokens():
    engine = FakeEngine()
    request, other = drafting(engine), engine.add([2], 9)
    first, second = right(request, 2)
    plan = engine.step()
    assert plan.decodes == [other] and plan.chunks == [Chunk(request, 3, 4, 3, [first, second])]
    assert (plan.num_tokens, plan.num_samples) == (4, 4)
    assert plan.samples == [other, request, request, request] and plan.sample_tokens == [0, 1, 2, 3]
    assert plan.drafts == {2: first, 3: second}
    assert (request.num_computed, request.num_in_flight) == (6, 3)
    engine.step()
    assert len(request.output_token_ids) == 4
    engine.run()


@pytest.mark.parametrize("num_accepted", range(4))
def test_lengths_advance_by_what_was_accepted(num_accepted):
    """On the host and on the device; and blocks that only drafts had are given back."""
    engine = FakeEngine(block_size=1)
    request = drafting(engine)
    engine.executor.accepts = [num_accepted]
    engine.step()
    assert request.num_computed == len(request.table.ids) == 6
    engine.step()
    assert len(request.output_token_ids) == 1 + num_accepted
    assert request.num_computed == len(request.table.ids) == 3 + num_accepted == engine.executor.lengths[request.slot]
    assert request.num_in_flight == 0
    engine.executor.accepts = [3]
    engine.run()
    assert request.finish_reason == "length"


def test_nobody_else_waits_and_one_update_tells_of_all_tokens():
    engine = FakeEngine()
    request, others = drafting(engine), [engine.add([2, i], 20) for i in (1, 2)]
    for _ in range(4):
        num_tokens = [len(other.output_token_ids) for other in others]
        engine.step()
    assert [len(other.output_token_ids) - n for other, n in zip(others, num_tokens, strict=True)] == [1, 1]
    assert set(engine.scheduler.running_set.batch.sequences) == set(others)
    assert engine.updated.count(request) == 1 and len(request.output_token_ids) == 7
    engine.run()


@pytest.mark.parametrize(
    ("tokens", "output", "reason"),
    [
        ([1, 7, 2], [1, 7], ("stop", 7)),
        ([7, 7, 7], [7], ("stop", 7)),
        ([1, 0, 7], [1, 0], ("stop", None)),
        ([1, 2, 7], [1, 2, 7], ("stop", 7)),
        ([1, 7, NOT_ACCEPTED], [1, 7], ("stop", 7)),
        ([1, NOT_ACCEPTED, NOT_ACCEPTED], [1], (None, None)),
        ([1, 2, 1], [1, 2, 1], (None, None)),
    ],
)
def test_what_comes_after_a_stop_token_is_dropped(tokens, output, reason):
    engine = FakeEngine()
    request = drafting(engine, stop_ids=(0, 7))
    before = list(request.output_token_ids)
    engine.step()
    assert answer(engine, tokens) == [request]
    assert request.output_token_ids == before + output and (request.finish_reason, request.stop_reason) == reason
    assert (request.slot < 0) == (reason != (None, None))


def test_min_tokens_are_counted_within_the_list():
    engine = FakeEngine()
    request = drafting(engine, stop_ids=(7,), min_tokens=3)
    engine.step()
    answer(engine, [7, 7, 7])
    assert (request.output_token_ids[1:], request.finish_reason) == ([7, 7], "stop")


@pytest.mark.parametrize("max_new", [2, 3, 4, 5, 6])
def test_drafts_end_where_the_length_does(max_new):
    engine = FakeEngine()
    request = drafting(engine, max_new=max_new)
    num_samples = []
    while engine.scheduler.has_work():
        plan = engine.step()
        num_samples.append(0 if plan is None else plan.num_samples)
    assert num_samples[::2] == [min(3, max_new - 1), *[max_new - 4] * (max_new > 4)]
    assert (len(request.output_token_ids), request.finish_reason) == (max_new, "length")
    engine.run()


def test_a_list_that_is_longer_than_the_sequence_may_be_is_cut():
    engine = FakeEngine()
    request = drafting(engine)
    engine.step()
    request.max_total_len = request.num_tokens + 2
    answer(engine, [1, 2, 1])
    assert (request.output_token_ids[1:], request.finish_reason) == ([1, 2], "length")


def test_a_grammar_ends_in_the_middle_of_the_list():
    engine = FakeEngine()
    request = drafting(engine, matcher=Ends(50))
    engine.step()
    answer(engine, [20, 40, 1])
    assert (request.output_token_ids[1:], request.finish_reason) == ([20, 40], "stop")


@pytest.mark.parametrize(("token", "error"), [(NO_TOKEN, "leave no token"), (NOT_FINITE, "not finite")])
def test_an_error_ends_the_list(token, error):
    engine = FakeEngine()
    request, other = drafting(engine), engine.add([2], 9)
    engine.step()
    answer(engine, [2, 1, token, 1])
    assert (request.output_token_ids[1:], request.finish_reason) == ([1], "error") and error in request.error
    assert other.finish_reason is None and engine.scheduler.committer.num_not_finite == (token == NOT_FINITE)


def test_log_probabilities_are_those_of_accepted_tokens():
    engine = FakeEngine()
    request = drafting(engine, logprobs=0)
    for accepts in (2, 0, 1, 3):
        engine.executor.accepts = [accepts]
        engine.step()
        engine.step()  # which compares them
    assert len(request.logprobs) == len(request.output_token_ids) == 7
    engine.run()


@pytest.mark.parametrize("event", ["abort", "fail"])
def test_drafts_in_flight_are_dropped_with_their_epoch(event):
    engine = FakeEngine()
    request = drafting(engine)
    engine.step()
    if event == "abort":
        engine.abort(request)
        engine.step()
        assert len(request.output_token_ids) == 1
    else:
        engine.step(fail="collect")
        assert (len(request.output_token_ids), request.num_computed) == (1, 0)
    engine.run()


@pytest.mark.parametrize("swap_blocks", [0, 100])
def test_a_victim_is_drained_and_comes_back_with_its_drafts(swap_blocks):
    engine = FakeEngine(num_blocks=12, swap_blocks=swap_blocks, prefix_caching=False)
    requests = [engine.add([1, 2, i], 12, drafts=True, seed=i) for i in (1, 2, 1, 2)]
    engine.executor.accepts = [3, 1, 0, 2]
    engine.run()  # whose device knows what each block holds
    preemption = engine.scheduler.preemption
    assert (preemption.num_swapped > 0) == (swap_blocks > 0)
    assert preemption.num_swapped + preemption.num_recomputed > 0 and engine.executor.num_verified > 6
    assert all(request.finish_reason == "length" for request in requests)


def test_a_window_keeps_what_is_read_again_when_drafts_are_taken_back():
    groups = (CacheGroup(), CacheGroup(window=4))
    engine = FakeEngine(num_blocks=5, block_size=4, max_num_seqs=2, prefix_caching=False, groups=groups)
    engine.executor.accepts = [0, 3]
    for prompt, seed in (([1, 2, 1, 2], 3), ([1, 2, 1, 2, 1, 2], 2)):  # in a pool that they just fit
        engine.add(prompt, 9, seed=seed, drafts=True)
    engine.run()


def test_nobody_is_preempted_for_a_draft():
    engine = FakeEngine(num_blocks=8, block_size=1)
    request = drafting(engine, prompt=[1, 2], max_new=5, num_drafts=9)
    assert engine.step().num_samples == 4, "as many as it may have tokens"
    engine.run()
    engine = FakeEngine(num_blocks=5, block_size=1)
    request = drafting(engine, prompt=[1, 2], max_new=4, num_drafts=9)
    assert engine.step().num_samples == 2, "one block is free for the next token, and one is left for the one after"
    engine.run()
    assert request.finish_reason == "length" and engine.scheduler.preemption.num_recomputed == 0


def test_decodes_and_prompts_come_before_drafts():
    engine = FakeEngine(num_blocks=32)
    request = drafting(engine)
    engine.add([1] * 9, 4)
    assert [chunk.num_tokens for chunk in engine.step(max_tokens=8).chunks] == [7]
    engine.step()
    assert engine.step(max_tokens=8).chunks[-1].sequence is request
    engine.run()


@pytest.mark.parametrize("accepts", [[3], [1, 2], [0, 3, 1]])
def test_generated_blocks_are_hit_if_their_tokens_were_accepted(accepts):
    engine = FakeEngine(num_blocks=32)
    engine.executor.accepts = accepts
    request = engine.add([1, 2, 1], 8, drafts=True, seed=1)  # of whose drafts some are wrong
    engine.run()
    follower = engine.add(truth(request, 11), 2)
    engine.run()  # the device looks at what the hits hold
    assert follower.num_cached == 10


def test_beams_samples_and_grammars_beside_drafts():
    engine = FakeEngine(num_blocks=40, max_num_seqs=8, max_tokens=16)
    engine.executor.accepts = [2, 0, 3]
    group = engine.add_beams([1, 2, 2], 8, width=2)
    requests = [
        engine.add([1, 2], 9, drafts=True),
        engine.add([2, 2], 9, drafts=True, n=3),
        engine.add([2, 1], 9, matcher=Ends(7)),
        engine.add([1, 1], 9, drafts=True, matcher=Ends(7), logprobs=0),
    ]
    engine.run()
    assert group.sequences[0].finish_reason is not None and all(request.finish_reason for request in requests)
    assert engine.executor.num_verified >= 6
