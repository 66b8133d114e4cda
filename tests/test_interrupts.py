"""Ctrl-C, streams read in turns, and threads that share an `LLM`: nobody loses or gets what is another's."""

import gc
import linecache
import signal
import sys
import threading
from collections import Counter

import pytest

from jaxllm import RequestOutputKind, SamplingParams
from jaxllm.errors import EngineError
from jaxllm.interrupts import HeldSignals
from tests.tiny import greedy, ids, prompts_of, tokens

PROMPTS = prompts_of([5, 9, 13, 2])
DELTA = greedy(8, output_kind=RequestOutputKind.DELTA)


def press_ctrl_c(count: int = 1) -> None:
    for _ in range(count):
        signal.raise_signal(signal.SIGINT)


def in_step(llm, monkeypatch, work, *, when: int = 1) -> None:
    """Does `work` in the `when`-th step from now, while its result is read."""
    collect, calls = llm.engine.runner.collect, Counter()

    def disturbed(handle):
        calls["collect"] += 1
        if calls["collect"] == when:
            work()
        return collect(handle)

    monkeypatch.setattr(llm.engine.runner, "collect", disturbed)


def drain(llm) -> None:
    while llm.engine.has_work():
        llm.engine.step()


def test_it_takes_effect_behind_the_step(llm, monkeypatch):
    handler = signal.getsignal(signal.SIGINT)
    in_step(llm, monkeypatch, press_ctrl_c, when=3)
    steps = []
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: [step(), steps.append(1)][0])
    with pytest.raises(KeyboardInterrupt):
        llm.generate(ids(*PROMPTS), greedy(20))
    assert len(steps) == 4, "the step in which it came was finished, and none followed"
    assert signal.getsignal(signal.SIGINT) is handler
    assert not llm.engine.requests
    monkeypatch.undo()
    drain(llm)


def test_another_stream_loses_nothing(llm, tiny, monkeypatch):
    other = llm.stream(ids(PROMPTS[0]), DELTA)
    found = next(other)[1].outputs[0].token_ids
    in_step(llm, monkeypatch, press_ctrl_c, when=2)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(ids(*PROMPTS[1:]), greedy(20))
    found += [token for _, out in other for token in out.outputs[0].token_ids]
    assert len(found) == 8
    tiny.assert_greedy(PROMPTS[0], found)


def test_at_any_line_the_engine_stays_usable(llm, tiny):
    """Also between two steps, and where outputs are handed out."""
    sampled = SamplingParams(n=2, max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
    beams = SamplingParams(beam_width=2, max_tokens=4, temperature=0.0, ignore_eos=True)

    def work():
        for _ in llm.stream(ids(*PROMPTS[:3]), [greedy(4), sampled, beams]):
            pass

    num_lines, _ = lines_of(work)
    other = llm.stream(ids(PROMPTS[3]), greedy(60, output_kind=RequestOutputKind.DELTA))
    found = next(other)[1].outputs[0].token_ids
    num_pressed = 0
    for i in range(1, 24):
        _, outcome = lines_of(work, stop=num_lines * i // 30)  # a prompt that is cached takes fewer lines
        assert outcome in ("interrupted", "undisturbed")
        num_pressed += outcome == "interrupted"
        assert len(llm.engine.requests) <= 1
        llm.engine.scheduler.check()
    assert num_pressed > 15
    found += [token for _, out in other for token in out.outputs[0].token_ids]
    assert len(found) == 60
    tiny.assert_greedy(PROMPTS[3], found)
    drain(llm)


def lines_of(work, stop: int | None = None) -> tuple[int, str]:
    """Does `work`, with a Ctrl-C after `stop` lines of ours; returns how many there were, and what came of it.

    Where a with statement is left, it comes a line later: a tracer would come before `__exit__`, and no signal does.
    """
    lines, outcome, entered = 0, "undisturbed", set()

    def trace(frame, event, arg):
        nonlocal lines, outcome
        if "/jaxllm/" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        is_left = False
        if event == "line" and linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            is_left = (frame, frame.f_lineno) in entered
            entered.symmetric_difference_update({(frame, frame.f_lineno)})
        if stop is not None and lines >= stop and outcome == "undisturbed" and not is_left:
            outcome = "lost"
            press_ctrl_c()
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        assert outcome == "lost"
        outcome = "interrupted"
    finally:
        sys.settrace(outer)
    return lines, outcome


def test_a_second_one_is_taken_at_once(llm, tiny, monkeypatch):
    other = llm.stream(ids(PROMPTS[0]), greedy(20))
    next(other)
    in_step(llm, monkeypatch, lambda: press_ctrl_c(2))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(ids(*PROMPTS), greedy(20))
    monkeypatch.undo()
    with pytest.raises(EngineError, match="stopped halfway"):
        list(other)
    (output,) = tokens(llm.generate(ids(PROMPTS[1]), greedy(6)))
    tiny.assert_greedy(PROMPTS[1], output)


def test_leaving_costs_as_much_as_there_is_to_leave(llm, monkeypatch):
    counts = Counter()
    for name in ("finish", "restart", "schedule", "check"):
        real = getattr(llm.engine.scheduler, name)

        def counting(*args, name=name, real=real):
            counts[name] += 1
            return real(*args)

        monkeypatch.setattr(llm.engine.scheduler, name, counting)
        if name == "finish":
            monkeypatch.setattr(llm.engine.requests, "_finish", counting)
    stream = llm.stream(ids(*[[1, 2, 3]] * 1000), greedy(20))
    next(stream)
    before = counts["schedule"]
    stream.close()
    assert counts["finish"] == 1000 and counts["restart"] == 0 and counts["schedule"] == before
    assert not llm.engine.requests and llm.stats().num_waiting == 0
    monkeypatch.undo()
    drain(llm)


def test_signals_are_held_once():
    handler = signal.getsignal(signal.SIGINT)
    with HeldSignals(signal.SIGINT) as outer:
        with HeldSignals(signal.SIGINT) as inner:
            press_ctrl_c()
        inner.act()  # nothing: the outer one has it
        assert outer.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(KeyboardInterrupt):
        outer.act()


def test_streams_are_read_in_turns(llm, tiny):
    found = [[] for _ in PROMPTS]
    streams = [llm.stream(ids(prompt), DELTA) for prompt in PROMPTS]
    for outputs in zip(*streams, strict=True):
        for tokens_of_one, (_, out) in zip(found, outputs, strict=True):
            tokens_of_one += out.outputs[0].token_ids
    for prompt, output in zip(PROMPTS, found, strict=True):
        assert len(output) == 8
        tiny.assert_greedy(prompt, output)


def test_a_stream_left_open_keeps_its_outputs(llm, tiny):
    left = llm.stream(ids(PROMPTS[0]), DELTA)
    first = next(left)[1].outputs[0].token_ids
    for _ in range(2):
        (output,) = tokens(llm.generate(ids(PROMPTS[1]), greedy(12)))
        tiny.assert_greedy(PROMPTS[1], output)
    rest = [out.outputs[0].token_ids for _, out in left]
    assert len(rest) == 7, "one output a token, none joined or dropped"
    tiny.assert_greedy(PROMPTS[0], sum(rest, first))


def test_of_outputs_so_far_the_newest_is_kept(llm, tiny):
    left = llm.stream(ids(*PROMPTS[:2]), greedy(8))
    next(left)
    llm.generate(ids(PROMPTS[2]), greedy(12))
    rest = list(left)
    assert len(rest) <= 3, "one that came with the first, and the newest of each"
    newest = dict(rest)
    for prompt, output in zip(PROMPTS[:2], tokens([newest[0], newest[1]]), strict=True):
        assert len(output) == 8
        tiny.assert_greedy(prompt, output)


def test_a_stream_that_nobody_has_any_more_is_aborted(llm):
    stream = llm.stream(ids(PROMPTS[0]), greedy(50))
    next(stream)
    del stream
    gc.collect()
    assert not llm.engine.requests
    drain(llm)


def test_threads_take_turns(llm, tiny):
    found: dict[int, list[list[int]]] = {i: [] for i in range(len(PROMPTS))}

    def work(i: int) -> None:
        for _ in range(3):
            found[i] += tokens(llm.generate(ids(PROMPTS[i]), greedy(12), use_tqdm=False))

    threads = [threading.Thread(target=work, args=(i,)) for i in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for i, outputs in found.items():
        assert len(outputs) == 3
        for output in outputs:
            assert len(output) == 12
            tiny.assert_greedy(PROMPTS[i], output)
    drain(llm)


def test_waiting_for_the_compiler_may_be_left(llm, monkeypatch):
    """A step that has to wait for its executables has not begun."""
    waits = []

    def wait_first(*needs, **_):
        waits.append(needs)
        press_ctrl_c()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "max_tokens", lambda *needs: 0)
        patch.setattr(llm.engine.runner, "wait_first", wait_first)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(ids(PROMPTS[0]), greedy(3, logprobs=1))
    assert waits == [(True,)], "for what the new request needs"
    assert not llm.engine.has_work()
