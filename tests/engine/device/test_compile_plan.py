"""The compile plan: its order, what waits for it, and what a failure leaves."""

import threading

import pytest

from jaxllm.engine.device.compile_plan import CompilePlan
from jaxllm.errors import EngineDeadError


class Fake:
    """Stands in for a lowered function: compiling returns its name."""

    def __init__(self, name, lowering=lambda: None):
        self.name, self.lowering = name, lowering

    def __call__(self):
        self.lowering()
        return self

    def compile(self):
        return self.name


@pytest.fixture
def made(monkeypatch):
    """Plans made by the test, closed after it."""
    plans = []

    def make(*jobs):
        plans.append(CompilePlan({job.name: job for job in jobs}))
        return plans[-1]

    yield make
    for plan in plans:
        plan.close()


def test_jobs_are_done_in_their_order(made):
    gate, order = threading.Event(), []
    first = Fake("first", lambda: order.append("first"))
    plan = made(first, Fake("second", lambda: order.append("second") or gate.wait(10)), Fake("third"))
    plan.wait(["first"])
    assert plan.ready("first") and not plan.ready("third") and plan.total == 3
    gate.set()
    plan.wait(["third", "second"])
    assert order == ["first", "second"] and plan.num_done == 3 and plan.seconds > 0


def failing(times):
    """Raises so many times."""
    left = [RuntimeError("out of registers")] * times

    def lowering():
        if left:
            raise left.pop()

    return lowering


def test_a_failure_stops_nobody_else_and_is_raised_to_those_who_wait_for_it(made, caplog):
    plan = made(Fake("good"), Fake("bad", failing(2)), Fake("later"))
    plan.wait(["good", "later"])
    with pytest.raises(EngineDeadError, match="compiling bad failed twice: out of registers") as error:
        plan.wait(["bad"])
    assert isinstance(error.value.__cause__, RuntimeError)
    with pytest.raises(EngineDeadError, match="compiling bad failed twice"):
        plan.wait_all()
    assert plan.ready("good") and plan.ready("later") and not plan.ready("bad")
    assert (plan.num_done, plan.num_failed, plan.total) == (2, 1, 3)
    assert "the engine goes on without it: out of registers" in caplog.text


def test_what_failed_once_is_tried_again_after_the_others(made):
    order, once = [], failing(1)
    jobs = [Fake(name, lambda name=name: order.append(name)) for name in ("first", "second")]
    plan = made(Fake("flaky", lambda: order.append("flaky") or once()), *jobs)
    plan.wait_all()
    assert order == ["flaky", "first", "second", "flaky"] and plan.num_done == 3 and plan.num_failed == 0


def test_what_failed_once_is_tried_next_if_someone_waits_for_it(made):
    gate, once, order = threading.Event(), failing(1), []
    jobs = [Fake(i, lambda i=i: order.append(i)) for i in range(3)]
    plan = made(Fake("flaky", lambda: order.append("flaky") or once()), Fake("slow", lambda: gate.wait(10)), *jobs)
    ticks = iter(range(10**6))
    plan.wait(["flaky"], lambda: next(ticks) > 0 and gate.set())
    assert plan.ready("flaky") and order[:2] == ["flaky"] * 2


def test_closing_stops_after_the_current_job(made):
    started, gate = threading.Event(), threading.Event()
    plan = made(Fake("slow", lambda: started.set() or gate.wait(10)), Fake("never"))
    started.wait(10)
    threading.Timer(0.05, gate.set).start()
    plan.close()
    assert plan.ready("slow") and not plan.ready("never")
    with pytest.raises(EngineDeadError, match="closed"):
        plan.wait(["never"])
