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


def test_a_failure_is_raised_to_who_waits_and_leaves_the_rest(made):
    def broken():
        raise RuntimeError("out of registers")

    plan = made(Fake("good"), Fake("bad", broken), Fake("never"))
    plan.wait(["good"])
    with pytest.raises(EngineDeadError, match="out of registers"):
        plan.wait(["never"])
    assert plan.ready("good") and not plan.ready("bad")


@pytest.mark.parametrize("times", [1, 2])
def test_a_lowering_that_lost_a_variable_is_tried_once_more(made, times):
    left = [KeyError("Var(id=1)")] * times

    def flaky():
        if left:
            raise left.pop()

    plan = made(Fake("step", flaky))
    if times == 1:
        plan.wait(["step"])
    else:
        with pytest.raises(EngineDeadError, match="Var"):
            plan.wait(["step"])


def test_closing_stops_after_the_current_job(made):
    started, gate = threading.Event(), threading.Event()
    plan = made(Fake("slow", lambda: started.set() or gate.wait(10)), Fake("never"))
    started.wait(10)
    threading.Timer(0.05, gate.set).start()
    plan.close()
    assert plan.ready("slow") and not plan.ready("never")
    with pytest.raises(EngineDeadError, match="closed"):
        plan.wait(["never"])
