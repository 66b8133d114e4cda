"""The loop that every entrance hands its requests to, with an engine that is none."""

import threading
import time

import pytest

from jaxllm import SamplingParams, StructuredOutputs
from jaxllm.engine.loop import EngineLoop
from jaxllm.errors import EngineDeadError
from tests.fake_engine_process import BUG, DEADLY, REFUSED, FakeEngine

LONG = SamplingParams(max_tokens=100_000)
SHORT = SamplingParams(max_tokens=3)
SLOW = SamplingParams(max_tokens=3, structured_outputs=StructuredOutputs(regex="slow"))
OPTIONS = {"priority": 0, "stream": True, "lean": True}


class Receivers:
    """Everything that was delivered, by request."""

    def __init__(self):
        self.news: dict[str, list] = {}
        self.gone: set[str] = set()

    def deliver(self, deliveries):
        for request_id, _, news in deliveries:
            self.news.setdefault(request_id, []).append(news)
        return [one.request_id for one in deliveries if one.request_id in self.gone]

    def wait(self, request_id: str, condition=lambda news: True) -> list:
        end = time.monotonic() + 30
        while not (request_id in self.news and condition(self.news[request_id])):
            assert time.monotonic() < end, "nothing came"
            time.sleep(0.005)
        return self.news[request_id]


@pytest.fixture
def receivers():
    return Receivers()


@pytest.fixture
def loop(receivers):
    engine = FakeEngine()
    engine.close = lambda: None
    loop = EngineLoop(engine, receivers.deliver)
    loop.start()
    yield loop
    loop.close()


def is_over(news) -> bool:
    return isinstance(news[-1], Exception) or news[-1].finished


def test_outputs_come_and_end(loop, receivers):
    loop.add([9], SHORT, request_id="a", **OPTIONS)
    outputs = receivers.wait("a", is_over)
    assert "".join(output.outputs[0].text for output in outputs) == "abc"


def test_what_is_wrong_with_one_is_its_own(loop, receivers):
    loop.add([9], LONG, request_id="good", **OPTIONS)
    loop.add([REFUSED], SHORT, request_id="refused", **OPTIONS)
    loop.add([BUG], SHORT, request_id="bug", **OPTIONS)
    assert isinstance(receivers.wait("refused")[0], ValueError)
    assert isinstance(receivers.wait("bug")[0], RuntimeError)
    count = len(receivers.wait("good"))
    receivers.wait("good", lambda news: len(news) > count)


def test_an_id_is_in_use_from_the_moment_that_its_grammar_is_compiled(loop, receivers):
    loop.add([9], SLOW, request_id="a", receiver=1, **OPTIONS)
    loop.add([9], SHORT, request_id="a", receiver=2, **OPTIONS)
    (error,) = receivers.wait("a")
    assert isinstance(error, ValueError) and "in use" in str(error)
    outputs = receivers.wait("a", lambda news: len(news) == 4)[1:]
    assert outputs[-1].finished, "the first one is served"


def test_an_abort_waits_for_the_grammar(loop, receivers):
    loop.add([9], SLOW, request_id="a", **OPTIONS)
    loop.abort("a")
    loop.add([9], SLOW, request_id="b", receiver=1, **OPTIONS)
    loop.drop(["b"], 1)
    (output,) = receivers.wait("a")
    assert output.outputs[0].finish_reason == "abort"
    while loop.engine.has_work() or loop._receivers:
        time.sleep(0.01)
    assert "b" not in receivers.news


def test_only_its_own_receiver_drops_a_request(loop, receivers):
    loop.add([9], LONG, request_id="a", receiver=1, **OPTIONS)
    receivers.wait("a")
    loop.drop(["a", "never seen"], 2)
    count = len(receivers.news["a"])
    receivers.wait("a", lambda news: len(news) > count + 2)
    receivers.gone.add("a")  # nobody is there to read it
    while loop.engine.has_work():
        time.sleep(0.01)


def test_all_are_told_of_a_death(loop, receivers):
    for i in range(3):
        loop.add([9], LONG, request_id=f"r{i}", **OPTIONS)
    receivers.wait("r2")
    assert loop.is_alive
    loop.add([DEADLY], LONG, request_id="bad", **OPTIONS)
    for name in ("r0", "r1", "r2", "bad"):
        error = receivers.wait(name, is_over)[-1]
        assert isinstance(error, EngineDeadError) and "the device is gone" in str(error)
    assert not loop.is_alive
    with pytest.raises(EngineDeadError, match="the device is gone"):
        loop.add([9], SHORT, request_id="late", **OPTIONS)
    loop.abort("r0")  # nothing happens


def test_those_who_wait_for_a_grammar_are_told_of_the_end(loop, receivers):
    loop.add([9], SLOW, request_id="a", **OPTIONS)
    while "a" not in loop._compiling:
        time.sleep(0.005)
    loop.close()
    assert isinstance(receivers.wait("a")[0], EngineDeadError)
    assert not any(thread.name == "jaxllm-engine" for thread in threading.enumerate())
