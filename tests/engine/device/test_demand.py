"""Which executable the work lacks most, by the seconds that are lost without it."""

from jaxllm.engine.device.demand import Demand

SIZES = (1, 8, 64, 512)


def test_nothing_is_lacked_in_the_best_bucket():
    demand = Demand(SIZES)
    assert all(demand.observe(60, 64, 10.0, patience=0.1) is None for _ in range(20))


def test_padding_is_lost_by_and_by():
    demand = Demand(SIZES)
    told = [demand.observe(5, 64, 0.1, patience=0.3) for _ in range(6)]  # 7/8 of each step
    assert told == [None, None, None, 8, None, None]


def test_a_long_prompt_in_small_steps_says_so_at_once():
    demand = Demand(SIZES)
    assert demand.observe(61, 1, 0.2, patience=0.3) is None  # the first of all, which says nothing yet
    assert demand.observe(60, 1, 0.01, patience=0.3) == 64  # 59 steps more
    assert demand.observe(59, 1, 0.01, patience=0.3) is None  # said
    short = Demand(SIZES)
    assert [short.observe(n, 1, 0.01, patience=0.3) for n in (20, 19, 18)] == [None] * 3  # over sooner than compiled


def test_more_than_the_largest_bucket_wants_that_one():
    assert Demand(SIZES).observe(10_000, 64, 1.0, patience=0.3) == 512


def test_what_is_wanted_serves_smaller_steps_too():
    demand = Demand(SIZES)
    assert demand.observe(512, 8, 1.0, patience=0.3) == 512
    assert demand.observe(60, 8, 1.0, patience=0.3) is None  # the larger one comes
    assert demand.observe(400, 512, 1.0, patience=0.3) is None
    assert demand.observe(60, 512, 1.0, patience=0.3) == 64  # it is there, and too large


def test_small_steps_cost_little_where_padding_is_free():
    demand = Demand((64, 256, 2048), free_padding=True)
    told = {demand.observe(5, 256, 1.0, patience=0.1) for _ in range(9)}
    assert told == {None}, "what is too large costs nothing"
    told = [demand.observe(2048, 256, 0.1, patience=0.2) for _ in range(3)]
    assert told == [None, 2048, None]  # a quarter of 7/8, and of seven more steps
    few = Demand(SIZES, free_padding=True)
    assert [few.observe(512, 8, 0.1, patience=0.4) for _ in range(2)] == [None, 512]  # as without


def test_padding_of_what_was_compiled_quickly_is_not_free():
    demand = Demand((64, 256, 2048), free_padding=True)
    told = [demand.observe(5, 256, 0.4, patience=0.1, is_quick=True) for _ in range(4)]  # an eighth of 3/4 each time
    assert told == [None, None, 64, None]
    small = Demand((64, 256, 2048), free_padding=True)
    assert small.observe(2048, 256, 0.1, patience=0.02, is_quick=True) == 2048, "as of others"
    other = Demand((64, 256, 2048), free_padding=True)
    assert other.observe(2048, 256, 0.1, patience=0.02) == 2048
