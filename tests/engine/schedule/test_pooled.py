"""Prompts that are pooled, on a device that shows what it sums."""

import pytest

from tests.fake_engine import FakeEngine


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_a_cached_prefix_is_read_for_the_last_token_alone(pooling):
    engine = FakeEngine(num_blocks=16, block_size=2)
    prompt = [1, 2, 1, 1, 2, 2, 1]
    for _ in range(2):
        sequence = engine.add_pooled(prompt, pooling)
        engine.run()
        assert sequence.finish_reason == "stop" and sequence.pooled is not None
    assert sequence.num_cached == (6 if pooling == "last" else 0)


def test_one_token_that_is_left_is_no_decode():
    engine = FakeEngine(num_blocks=16, block_size=2)
    for _ in range(2):
        sequence = engine.add_pooled([1, 2, 1, 1, 2], "last")
        engine.run()
    assert sequence.num_cached == 4 and sequence.pooled is not None


def test_a_whole_prompt_waits_for_a_step_that_holds_it():
    engine = FakeEngine(num_blocks=16, block_size=2, whole_prompts=True)
    sequences = [engine.add_pooled([1, 2] * half, "mean") for half in (3, 3, 1, 4)]
    plan = engine.step(max_tokens=8)
    assert [chunk.stop for chunk in plan.chunks] == [6], "the next one does not fit beside it, and nobody passes it"
    engine.run()
    assert all(sequence.pooled is not None for sequence in sequences)


def test_one_that_is_preempted_starts_over():
    """Sums are lost with the slot, so that nothing of it is worth swapping."""
    engine = FakeEngine(num_blocks=6, block_size=2, max_num_seqs=3, swap_blocks=100)
    text = engine.add([1, 2, 1], max_new=7)
    engine.step(max_tokens=3)
    pooled = engine.add_pooled([2, 1, 2, 2, 1, 1], "mean")
    for _ in range(3):
        engine.step(max_tokens=2)
    engine.run()
    assert pooled.pooled is not None and text.finish_reason == "length"


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_chunks_add_up(pooling):
    engine = FakeEngine(num_blocks=16, block_size=2, max_tokens=3)
    sequence = engine.add_pooled([1, 2, 1, 1, 2, 2, 1], pooling)
    engine.run()
    assert sequence.pooled is not None  # the engine has compared it
