"""Rows that follow a grammar run every step (docs/step_contract.md, clause 5), and nothing else changes for anyone."""

import numpy as np
import pytest

from jaxllm import SamplingParams, StructuredOutputs
from tests.chat_model import backend
from tests.engine.test_step_contract import fail_once
from tests.tiny import Tiny, clean, drain, ids, make_llm, prompts_of

PROMPTS = prompts_of([9, 14, 5, 12, 17, 3, 8, 11], vocab=256, seed=5)
LETTERS = StructuredOutputs(regex="[a-z ]{200}")
WORD = StructuredOutputs(regex="[a-z]{6}[0-9]")


@pytest.fixture(scope="module")
def shared():
    llm = make_llm(Tiny(vocab=270, max_len=256).model, tokenizer=backend(), num_blocks=256)
    yield llm
    llm.close()


@pytest.fixture
def llm(shared):
    shared.engine.scheduler.pool.forget_keys()
    yield shared
    drain(shared)
    clean(shared)


def bound(max_tokens=12, form=LETTERS, **fields) -> SamplingParams:
    return SamplingParams(**dict(seed=3, max_tokens=max_tokens, ignore_eos=True, structured_outputs=form) | fields)


MIXED = [
    bound(),
    bound(form=WORD, max_tokens=20),
    bound(n=2, max_tokens=9),
    bound(beam_width=2, n=2, temperature=0.0, seed=None),
    SamplingParams(seed=4, max_tokens=12, ignore_eos=True),
    bound(repetition_penalty=1.3, logprobs=1, max_tokens=11),
    bound(max_tokens=1),
]


def seen(out) -> list[tuple]:
    return [(c.token_ids, c.finish_reason) for c in out.outputs]


@pytest.fixture(scope="module")
def alone(shared) -> list[list[tuple]]:
    """What each of `MIXED` gets when it is served alone."""
    found = [seen(shared.generate(ids(prompt), one)[0]) for prompt, one in zip(PROMPTS, MIXED, strict=False)]
    clean(shared)
    return found


def run(llm, done=None, steps: int | None = None) -> dict:
    """Steps to the end, or so many; returns the finished outputs."""
    done = {} if done is None else done
    while llm.engine.has_work() and steps != 0:
        done |= {out.request_id: out for out in llm.engine.step() if out.finished}
        llm.engine.scheduler.check()
        steps = None if steps is None else steps - 1
    return done


def test_two_waves_run_side_by_side(llm, monkeypatch):
    """Half of the requests come a step later: each step serves all."""
    lone = [seen(llm.generate(ids(prompt), bound(20))[0]) for prompt in PROMPTS]
    llm.engine.scheduler.pool.forget_keys()
    plans, dispatch = [], llm.engine.runner.dispatch_forward
    monkeypatch.setattr(llm.engine.runner, "dispatch_forward", lambda plan: plans.append(plan) or dispatch(plan))
    done = {}
    for wave in (range(4), range(4, 8)):
        for i in wave:
            llm.engine.add(PROMPTS[i], bound(20), request_id=f"r{i}")
        run(llm, done, steps=1)
    run(llm, done)
    assert len([plan for plan in plans if plan.num_tokens]) <= 20 + 6, "prompts take a few"
    assert sum(len(plan.decodes) == 8 for plan in plans) >= 12
    assert [seen(done[f"r{i}"]) for i in range(8)] == lone


def test_a_mask_is_filled_after_the_step_before_is_read_and_others_sample_at_once(llm, monkeypatch):
    events, runner, grammars = [], llm.engine.runner, llm.engine.intake.grammars
    for owner, name in ((runner, "dispatch_forward"), (runner, "dispatch_sample"), (runner, "collect")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, real=real, name=name: events.append(name) or real(*given))
    fill = grammars.fill
    monkeypatch.setattr(grammars, "fill", lambda rows, masks: events.append("fill") or fill(rows, masks))
    llm.generate(ids(PROMPTS[5]), SamplingParams(max_tokens=3, ignore_eos=True))
    forward, sample = "dispatch_forward", "dispatch_sample"
    assert events == [forward, sample] + [forward, sample, "collect"] * 2 + ["collect"]
    events.clear()
    llm.generate(ids(PROMPTS[5]), bound(3))
    assert events == [forward, "fill", sample] + [forward, "collect", "fill", sample] * 2 + ["collect"]


def test_a_mask_in_flight_is_not_written_again(llm, monkeypatch):
    given, sample = [], llm.engine.runner.dispatch_sample

    def kept(forward, masks=None):
        given.append((masks, None if masks is None else masks.copy()))
        return sample(forward, masks)

    monkeypatch.setattr(llm.engine.runner, "dispatch_sample", kept)
    llm.generate(ids(*PROMPTS[:3]), bound(8))
    masks = [(mask, copy) for mask, copy in given if mask is not None]
    assert len(masks) >= 8 and len({id(mask) for mask, _ in masks}) == len(masks)
    assert all(np.array_equal(mask, copy) for mask, copy in masks)


def add_mixed(llm) -> None:
    for i, one in enumerate(MIXED):
        llm.engine.add(PROMPTS[i], one, request_id=f"r{i}")


def test_with_beams_samples_and_neighbours_as_alone(llm, alone):
    add_mixed(llm)
    done = run(llm)
    assert [seen(done[f"r{i}"]) for i in range(len(MIXED))] == alone


@pytest.mark.parametrize("verb", ["dispatch_forward", "dispatch_sample", "collect"])
@pytest.mark.parametrize("when", [2, 6])
def test_a_failed_half_step_is_recomputed(llm, alone, monkeypatch, when, verb):
    fail_once(llm, when, monkeypatch, verb=verb)
    add_mixed(llm)
    done = run(llm)
    assert [seen(done[f"r{i}"]) for i in range(len(MIXED))] == alone


def test_an_abort_in_flight(llm, alone):
    for steps in (1, 2, 3, 5, 8):
        llm.engine.scheduler.pool.forget_keys()
        add_mixed(llm)
        done = run(llm, steps=steps)
        aborted = [i for i in (0, 3, 5) if llm.engine.abort(f"r{i}") is not None]
        llm.engine.scheduler.check()
        run(llm, done)
        assert all(seen(done[f"r{i}"]) == alone[i] for i in range(len(MIXED)) if i not in aborted)


def test_a_preempted_row_goes_on_where_it_was():
    with make_llm(Tiny(vocab=270, max_len=256).model, tokenizer=backend(), num_blocks=40) as llm:
        params = [bound(30), bound(30, n=2), bound(25, beam_width=2, n=2, temperature=0.0, seed=None), bound(30)]
        lone = [seen(llm.generate(ids(prompt), one)[0]) for prompt, one in zip(PROMPTS, params, strict=False)]
        assert llm.stats().num_preemptions == 0
        for kind in ("swap", "recompute"):
            llm.engine.set_preemption(kind)
            llm.engine.scheduler.pool.forget_keys()
            num_preemptions = llm.stats().num_preemptions
            outs = llm.generate(ids(*PROMPTS[:4]), params)
            assert [seen(out) for out in outs] == lone and llm.stats().num_preemptions > num_preemptions
        clean(llm)


@pytest.mark.parametrize("num_tokens", [0, 1, 4])
def test_a_grammar_that_leaves_no_token_ends_its_request_alone(llm, alone, monkeypatch, num_tokens):
    fill = llm.engine.intake.grammars.fill

    def emptied(rows, masks):
        fill(rows, masks)
        for sequence in llm.engine.scheduler.running:
            if sequence.request.request_id == "stuck" and len(sequence.output_token_ids) == num_tokens:
                masks[[row for matcher, row in rows if matcher is sequence.matcher]] = 0

    monkeypatch.setattr(llm.engine.intake.grammars, "fill", emptied)
    for i in (0, 1, 4):
        llm.engine.add(PROMPTS[i], MIXED[i], request_id=f"r{i}")
    llm.engine.add(PROMPTS[7], bound(), request_id="stuck")
    done = run(llm)
    (stuck,) = done["stuck"].outputs
    assert (len(stuck.token_ids), stuck.finish_reason) == (num_tokens, "error")
    assert "allowed by its grammar" in done["stuck"].error
    assert all(seen(done[f"r{i}"]) == alone[i] for i in (0, 1, 4))


def test_a_stop_string_comes_before_a_grammar_without_tokens(llm, monkeypatch):
    """The mask of the token after the stop string is filled before the text is decoded."""
    fill, rows_at = llm.engine.intake.grammars.fill, []

    def emptied(rows, masks):
        fill(rows, masks)
        rows_at.append(len(rows))
        if len(rows_at) == 4:
            masks[:] = 0

    (text,) = (out.outputs[0].text for out in llm.generate(ids(PROMPTS[0]), bound(3)))
    monkeypatch.setattr(llm.engine.intake.grammars, "fill", emptied)
    (out,) = llm.generate(ids(PROMPTS[0]), bound(stop=text))
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason, out.error) == ("stop", text, None)
