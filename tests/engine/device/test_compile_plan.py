"""The compile plan: its order, what waits for it, and what a failure leaves."""

import os
import sys
import threading
import time

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

    def make(*jobs, **options):
        plans.append(CompilePlan({job.name: job for job in jobs}, **options))
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
    flaky = Fake("flaky", lambda: order.append("flaky") or once())
    plan = made(flaky, *jobs, first=["flaky", "first", "second"])  # by one thread
    plan.wait_all()
    assert order == ["flaky", "first", "second", "flaky"] and plan.num_done == 3 and plan.num_failed == 0


def test_what_failed_once_is_tried_next_if_someone_waits_for_it(made):
    gate, once, order = threading.Event(), failing(1), []
    jobs = [Fake(i, lambda i=i: order.append(i)) for i in range(3)]
    plan = made(Fake("flaky", lambda: order.append("flaky") or once()), Fake("slow", lambda: gate.wait(10)), *jobs)
    ticks = iter(range(10**6))
    plan.wait(["flaky"], lambda: next(ticks) > 0 and gate.set())
    assert plan.ready("flaky") and order[:2] == ["flaky"] * 2


def quickly(lowered):
    """Of what is called so, the executable that is wanted is at hand."""
    return (lowered.name, True) if lowered.name == "kept" else (f"quick {lowered.name}", False)


def test_what_is_wanted_is_compiled_quickly_and_then_once_more_before_the_rest(made):
    order, gate = [], threading.Event()

    def compile(lowered):
        gate.wait(10)
        order.append(lowered.name)
        return lowered.name

    jobs = [Fake(name) for name in ("first", "kept", "later", "last")]
    plan = made(*jobs, first=["first", "kept"], compile=compile, compile_quickly=quickly)
    plan.wait(["first", "kept"])
    assert (plan["first"], plan["kept"], plan.num_done) == ("quick first", "kept", 2)
    assert plan.is_passing("first") and not plan.is_passing("kept")
    plan.stepped(is_stepping=False)
    gate.set()
    wait_until(lambda: plan.num_done == 4)
    assert order == ["first", "later", "last"] and plan["first"] == "first"


def test_who_waits_for_all_waits_for_what_is_compiled_once_more(made):
    plan = made(Fake("first"), Fake("other"), first=["first"], compile_quickly=quickly)
    plan.stepped(is_stepping=True)  # so that the rest is not for now
    plan.wait(["first"])
    plan.wait_all()
    assert (plan["first"], plan["other"]) == ("first", "other")


def test_what_can_not_be_compiled_quickly_is_compiled_as_always(made):
    def compile_quickly(lowered):
        raise RuntimeError("no such option")

    plan = made(Fake("first"), first=["first"], compile_quickly=compile_quickly)
    plan.wait(["first"])
    assert plan["first"] == "first" and plan.num_failed == 0


def test_what_can_not_be_compiled_once_more_stays_as_it_is(made, caplog):
    def compile(lowered):
        raise RuntimeError("out of registers")

    plan = made(Fake("first"), first=["first"], compile=compile, compile_quickly=quickly)
    plan.wait_all()
    plan.wait(["first"])
    assert plan["first"] == "quick first" and plan.num_failed == 0
    assert "compiling first once more failed; it stays as it is: out of registers" in caplog.text


def test_closing_stops_after_the_current_job(made):
    started, gate = threading.Event(), threading.Event()
    plan = made(Fake("slow", lambda: started.set() or gate.wait(10)), Fake("never"))
    started.wait(10)
    threading.Timer(0.05, gate.set).start()
    plan.close()
    assert plan.ready("slow") and not plan.ready("never")
    with pytest.raises(EngineDeadError, match="closed"):
        plan.wait(["never"])


def wait_until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_what_is_first_comes_first_then_what_is_wanted_then_the_rest(made):
    gate, order = threading.Event(), []
    jobs = [Fake(i, lambda i=i: order.append(i) or gate.wait(10)) for i in range(6)]
    plan = made(*jobs, first=[4, 2])
    wait_until(lambda: order)
    plan.want([5])
    gate.set()
    plan.wait_all()
    assert order[:3] == [4, 2, 5] and sorted(order[3:]) == [0, 1, 3]


def test_the_rest_does_not_go_on_while_the_engine_steps(made):
    order = []
    jobs = [Fake(i, lambda i=i: order.append(i) or time.sleep(0.02)) for i in range(4)]
    plan = made(*jobs, first=[0], share=1e-6)
    plan.stepped(is_stepping=True)
    plan.wait([0])
    time.sleep(0.5)
    assert order == [0]
    plan.want([3])
    wait_until(lambda: plan.ready(3))
    assert order == [0, 3]
    plan.stepped(is_stepping=False)
    plan.stepped(is_stepping=False)  # it has just done something: whoever reads that may ask for more
    time.sleep(0.1)
    assert order == [0, 3]
    wait_until(lambda: plan.num_done == 4)
    assert order == [0, 3, 1, 2]


def test_the_rest_has_its_share_of_a_busy_engine(made):
    jobs = [Fake(i, lambda: time.sleep(0.01)) for i in range(4)]
    plan = made(*jobs, first=[0], share=0.1)
    plan.stepped(is_stepping=True)
    wait_until(lambda: plan.num_done == 4)


def test_the_rest_is_compiled_at_low_priority(made):
    seen = {}

    def note(name):
        seen[name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    made(*(Fake(i, lambda i=i: note(i)) for i in range(2)), first=[0])
    wait_until(lambda: len(seen) == 2)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert seen[0] == own and seen[1] == (19 if sys.platform == "linux" else own)


def test_what_is_ahead_is_compiled_beside_what_is_first_until_the_engine_steps(made):
    order, gates = [], {name: threading.Event() for name in ("first", "ahead", "behind")}
    jobs = [Fake(name, lambda name=name: order.append(name) or gates[name].wait(10)) for name in gates]
    plan = made(*jobs, first=["first"], ahead=["first", "ahead", "behind"], share=1e-9, compile_quickly=quickly)
    wait_until(lambda: len(order) == 2)
    assert {*order} == {"first", "ahead"}
    (thread,) = (each for each in threading.enumerate() if each.name == "jaxllm-compile-ahead" and each.is_alive())
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == own
    gates["first"].set()
    plan.wait(["first"])
    plan.stepped(is_stepping=False)
    assert plan.is_passing("first") and os.getpriority(os.PRIO_PROCESS, thread.native_id) == own, "no step yet"
    plan.stepped(is_stepping=True)
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == (19 if sys.platform == "linux" else own)
    gates["ahead"].set()
    plan.wait(["ahead"])
    thread.join(10)
    assert plan.is_passing("ahead") and not thread.is_alive() and "behind" not in order
    gates["behind"].set()
    plan.wait(["behind"])


def test_what_is_ahead_is_compiled_once_and_gone_by_the_first_step(made):
    order = []
    jobs = [Fake(i, lambda i=i: order.append(i)) for i in range(6)]
    plan = made(*jobs, first=[0, 1], ahead=[0, 1, 5, 3], share=1e-9, compile_quickly=quickly)
    wait_until(lambda: plan.num_done == 4)
    wait_until(lambda: not any(each.name == "jaxllm-compile-ahead" for each in threading.enumerate()))
    plan.stepped(is_stepping=True)
    assert sorted(order) == [0, 1, 3, 5] and order.index(5) < order.index(3)


def test_nothing_is_ahead_where_executables_are_at_hand(made):
    order = []
    jobs = [Fake(name, lambda name=name: order.append(name)) for name in ("first", "kept", "later")]
    plan = made(*jobs, first=["first"], ahead=["kept", "later"], share=1e-9, compile_quickly=quickly)
    wait_until(lambda: plan.num_done == 2)
    wait_until(lambda: not any(each.name == "jaxllm-compile-ahead" for each in threading.enumerate()))
    assert {*order} == {"first", "kept"} and not plan.ready("later")


def test_what_someone_waits_for_passes_what_is_compiled_for_nobody(made):
    gate, started = threading.Event(), threading.Event()
    plan = made(Fake("slow", lambda: started.set() or gate.wait(10)), Fake("awaited"), Fake("later"))
    assert started.wait(10)
    plan.wait(["awaited"])
    assert plan.ready("awaited") and not plan.ready("slow") and not plan.ready("later")
    gate.set()


def test_what_someone_waits_for_is_compiled_two_at_a_time(made):
    running, most = [], {"awaited": 0, "wanted": 0}

    def note(kind):
        running.append(kind)
        most[kind] = max(most[kind], len(running))
        time.sleep(0.1)
        running.pop()

    jobs = [Fake((kind, i), lambda kind=kind: note(kind)) for kind in most for i in range(4)]
    plan = made(Fake("first"), *jobs, first=["first"], share=1e-6)
    plan.stepped(is_stepping=True)
    plan.wait(["first"])
    plan.wait([("awaited", i) for i in range(4)])
    plan.want([("wanted", i) for i in range(4)])
    wait_until(lambda: plan.num_done == plan.total)
    assert most == {"awaited": 2, "wanted": 1}


def test_settling_outlives_failures_and_the_end(made):
    plan = made(Fake("bad", failing(2)), Fake("good"))
    plan.settle(["good", "bad"])
    assert plan.ready("good") and plan.num_failed == 1
    started, gate = threading.Event(), threading.Event()
    plan = made(Fake("slow", lambda: started.set() or gate.wait(10)), first=["slow"])
    started.wait(10)
    threading.Timer(0.05, plan.abandon).start()
    plan.settle(["slow"])
    assert not plan.ready("slow")
    gate.set()


def test_compiling_goes_through_what_the_plan_is_given(made):
    plan = made(Fake("a"), compile=lambda lowered: f"from the cache: {lowered.name}")
    plan.wait_all()
    assert plan["a"] == "from the cache: a"


def test_the_rest_waits_as_if_what_was_compiled_quickly_had_taken_its_whole_time(made):
    times = {}

    def compile_quickly(lowered):
        time.sleep(0.2)
        times["quick"] = time.monotonic()
        return lowered.name, False

    later = Fake("later", lambda: times.setdefault("rest", time.monotonic()))
    plan = made(Fake("first"), later, first=["first"], share=0.5, compile_quickly=compile_quickly)
    plan.stepped(is_stepping=True)
    wait_until(lambda: plan.num_done == 2)
    assert times["rest"] - times["quick"] >= 0.5  # three times 0.2, less what the clock may be off
