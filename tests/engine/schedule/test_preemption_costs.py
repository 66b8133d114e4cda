"""Swap or recompute, by numbers."""

import pytest

from jaxllm.engine.schedule.preemption_costs import PreemptionCosts

MB = 10**6


def test_the_faster_way_is_taken():
    costs = PreemptionCosts(page_bytes=2 * MB)
    costs.copy_bytes_per_s = 20e9  # a block out and back in 0.1 ms
    costs.observe_step(2000, 2000, 0.02)  # a token in 0.01 ms, 16 of a block in 0.16 ms
    assert costs.prefill_s == pytest.approx(1e-5)
    assert costs.prefers_swap(num_pages=100, num_tokens=1600)
    assert not costs.prefers_swap(num_pages=100, num_tokens=900)  # half-empty blocks are copied whole
    costs.copy_bytes_per_s = 10e9
    assert not costs.prefers_swap(num_pages=100, num_tokens=1600)
    costs.page_bytes //= 2
    assert costs.prefers_swap(num_pages=100, num_tokens=1600)


def test_what_is_not_known_yet():
    costs = PreemptionCosts(page_bytes=MB)
    assert costs.prefill_s is None
    assert not costs.prefers_swap(1, 16)
    costs.observe_step(100, 100, 1e6)
    assert not costs.prefers_swap(1, 16)  # no bandwidth, however slow the prefill
    costs = PreemptionCosts(page_bytes=MB)
    costs.copy_bytes_per_s = 1.0
    assert costs.prefers_swap(1, 16)  # no prefill was seen
    costs.observe_step(100, 100, 1e-3)
    assert not costs.prefers_swap(1, 16)


@pytest.mark.parametrize(
    ("num_tokens", "num_prompt_tokens", "learns"),
    [(64, 0, False), (64, 31, False), (64, 32, True), (64, 64, True), (1, 1, True), (0, 0, False)],
)
def test_only_prefills_teach(num_tokens, num_prompt_tokens, learns):
    costs = PreemptionCosts(page_bytes=MB)
    costs.observe_step(num_tokens, num_prompt_tokens, 0.5)
    assert costs.prefill_s == (pytest.approx(0.5 / num_tokens) if learns else None)


def test_long_steps_weigh_more_and_old_ones_less():
    costs = PreemptionCosts(page_bytes=MB)
    costs.observe_step(8, 8, 0.008)  # a millisecond a token, of reading parameters
    costs.observe_step(1992, 1992, 0.0192)
    assert costs.prefill_s == pytest.approx(0.0272 / 2000, rel=0.05)
    for _ in range(200):
        costs.observe_step(1000, 1000, 1.0)
    assert costs.prefill_s == pytest.approx(1e-3, rel=1e-3)
    before = costs.prefill_s
    costs.observe_step(1000, 1000, 2.0)
    assert before < costs.prefill_s < 1.1 * before  # one slow step changes little


def test_impossible_steps_are_refused():
    costs = PreemptionCosts(page_bytes=MB)
    with pytest.raises(AssertionError):
        costs.observe_step(4, 5, 1.0)
    with pytest.raises(AssertionError):
        costs.observe_step(4, 4, -1.0)
