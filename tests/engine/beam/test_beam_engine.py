"""Beam search beside everything else that the engine does, and while something goes wrong."""

import jax
import pytest
from flax import nnx

from jaxllm import SamplingParams
from jaxllm.text.foreign_tokenizer import wrap
from tests.engine.beam.test_beam_search import OFTEN, PROMPTS, beams, seen
from tests.engine.test_step_contract import Letters, fail_once
from tests.plain_search import assert_found, beam_search, cumulative_logprob, draw
from tests.tiny import Tiny, clean, drain, greedy, ids, make_llm, prompts_of


def add(llm, name, prompt, params, **options) -> None:
    llm.engine.add(prompt, params, request_id=name, **options)


def run(llm) -> dict:
    done = {}
    while llm.engine.has_work():
        done |= {out.request_id: out for out in llm.engine.step() if out.finished}
        llm.engine.scheduler.check()
    return done


def test_others_get_a_token_each_step(llm, tiny):
    add(llm, "beams", PROMPTS[2], beams(4, 12))
    add(llm, "one", PROMPTS[1], greedy(12), stream=True)
    lengths = []
    while llm.engine.has_work():
        news = {out.request_id: out for out in llm.engine.step()}
        if "one" in news:
            lengths.append(len(news["one"].outputs[0].token_ids))
        elif lengths and lengths[-1] < 12:
            lengths.append(None)
        if "beams" in news:
            assert_found(news["beams"].outputs, beam_search(tiny, PROMPTS[2], beams(4, 12)), beams(4, 12))
            assert lengths[-1] == 12, "beams take two steps a token"
    assert lengths == list(range(1, 13))


@pytest.mark.parametrize("priority", [-1, 1])
def test_priorities(llm, tiny, priority):
    """Six beams and three others are more than there are slots for."""
    for i in range(3):
        add(llm, f"r{i}", PROMPTS[i], greedy(8))
    add(llm, "beams", PROMPTS[3], beams(6, 4), priority=priority)
    llm.engine.step()
    running = {request.request.request_id for request in llm.engine.scheduler.running}
    assert ("beams" in running) == (priority < 0)
    done = run(llm)
    assert_found(done["beams"].outputs, beam_search(tiny, PROMPTS[3], beams(6, 4)), beams(6, 4))
    for i in range(3):
        tiny.assert_greedy(PROMPTS[i], done[f"r{i}"].outputs[0].token_ids)


def test_the_prefix_cache_serves_beams_and_is_fed_by_them(llm):
    prompt, params = PROMPTS[3], beams(4, 10)
    (first,), (second,) = (llm.generate(ids(prompt), params) for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 28)
    assert seen(first) == seen(second)
    (related,) = llm.generate(ids(prompt + first.outputs[0].token_ids), greedy(1))
    assert related.num_cached_tokens == 36  # of 40 tokens; the last generated one was never computed


def test_beams_share_their_blocks(llm):
    prompt = PROMPTS[3]
    llm.engine._peak_blocks = 0
    copied = llm.stats().blocks_copied
    add(llm, "r", prompt, beams(4, 6))
    shared = []
    while llm.engine.has_work():
        llm.engine.step()
        shared.append(llm.stats().blocks_shared)
    assert max(shared) >= 7 and llm.stats().blocks_copied > copied
    assert llm.stats().peak_blocks_used <= 7 + 4 * 2


@pytest.mark.parametrize("num_steps", range(0, 14, 2))
def test_abort_gives_what_there_is(llm, tiny, num_steps):
    add(llm, "other", PROMPTS[1], greedy(9))
    add(llm, "beams", PROMPTS[3], beams(4, 6, stop_token_ids=OFTEN))
    done = {}
    for _ in range(num_steps):
        done |= {out.request_id: out for out in llm.engine.step()}
        llm.engine.scheduler.check()
    out = llm.engine.abort("beams")
    llm.engine.scheduler.check()
    assert (out is None) == ("beams" in done)
    if out is not None:
        assert out.finished and {c.finish_reason for c in out.outputs} <= {"abort", "stop"}
        assert any(c.finish_reason == "abort" for c in out.outputs)
        scores = [cumulative_logprob(tiny, PROMPTS[3], c.token_ids) / max(1, len(c.token_ids)) for c in out.outputs]
        assert scores == sorted(scores, reverse=True) and len(out.outputs) == (4 if num_steps > 3 else 1)
    tiny.assert_greedy(PROMPTS[1], (done | run(llm))["other"].outputs[0].token_ids)


@pytest.mark.parametrize("num_steps", [1, 9])  # in the middle of the prompt, or of the search
def test_new_parameters_while_beams_run(llm, num_steps):
    """They count from the next token on, and nothing of the old ones is found by others."""
    old = jax.tree.unflatten(
        jax.tree.structure(llm.engine.runner.executor.abstract_params), llm.engine.runner.executor.leaves
    )
    (want,) = llm.generate(ids(PROMPTS[3]), beams(4, 10))
    llm.engine.scheduler.pool.forget_keys()
    add(llm, "r", PROMPTS[3], beams(4, 10))
    for _ in range(num_steps):
        llm.engine.step()
    assert llm.engine.scheduler.running[0].num_computed == {1: 24, 9: 33}[num_steps]
    llm.update_params(nnx.state(Tiny(seed=1).model, nnx.Param))
    changed = run(llm)["r"]
    llm.engine.update_params(old)
    assert seen(changed) != seen(want) and len(changed.outputs) == 4
    (again,) = llm.generate(ids(PROMPTS[3]), beams(4, 10))
    assert again.num_cached_tokens == 0 and seen(again) == seen(want)


SEARCHES = [beams(4, 9), beams(3, 9, repetition_penalty=1.3, stop_token_ids=OFTEN), beams(1, 9, logprobs=1), greedy(9)]


def undisturbed(llm) -> list:
    outs = llm.generate(ids(*PROMPTS), SEARCHES)
    drain(llm)
    return [seen(out) for out in outs[:3]]


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("when", [1, 2, 4, 7, 12])
def test_a_failed_step_is_searched_again(llm, monkeypatch, when, after):
    want = undisturbed(llm)
    with monkeypatch.context() as patch:
        fail_once(llm, when, patch, after=after)
        assert undisturbed(llm) == want


def test_a_search_that_keeps_failing_is_quarantined_alone(llm, tiny, monkeypatch):
    runner, poison = llm.engine.runner, PROMPTS[2]
    dispatch = runner.dispatch_forward

    def failing(plan):
        if any(r.prompt_token_ids == poison and len(r.output_token_ids) == 2 for r in plan.rows):
            raise jax.errors.JaxRuntimeError("INTERNAL: injected")
        return dispatch(plan)

    monkeypatch.setattr(runner, "dispatch_forward", failing)
    outs = llm.generate(ids(PROMPTS[1], poison, PROMPTS[3]), beams(4, 6))
    assert "failed" in outs[1].error and {c.finish_reason for c in outs[1].outputs} == {"error"}
    for prompt, out in zip(PROMPTS[1::2], outs[::2], strict=True):
        assert out.error is None
        assert_found(out.outputs, beam_search(tiny, prompt, beams(4, 6)), beams(4, 6))


def test_a_tokenizer_that_breaks_ends_one_search(llm, tiny, monkeypatch):
    found = llm.generate(ids(PROMPTS[1]), beams(3, 6))[0].outputs[0].token_ids

    class Broken(Letters):
        def decode(self, token_ids, skip_special_tokens=True):
            if found[2] in token_ids:
                raise RuntimeError("broken decoder")
            return super().decode(token_ids)

    monkeypatch.setattr(llm.engine.intake, "tokenizer", wrap(Broken()))
    params = [beams(3, 6, stop="no such text"), beams(3, 6, detokenize=False)]
    bad, good = llm.generate(ids(PROMPTS[1], PROMPTS[2]), params)
    assert "broken decoder" in bad.error and {c.finish_reason for c in bad.outputs} == {"error"}
    assert_found(good.outputs, beam_search(tiny, PROMPTS[2], params[1]), params[1])


def test_a_tokenizer_that_breaks_on_the_prompt_refuses_the_request(llm, monkeypatch):
    class Broken(Letters):
        def decode(self, token_ids, skip_special_tokens=True):
            raise RuntimeError("broken decoder")

    monkeypatch.setattr(llm.engine.intake, "tokenizer", wrap(Broken()))
    with pytest.raises(ValueError, match="fails on the prompt: broken decoder"):
        llm.generate(ids(PROMPTS[1]), beams(3, 6, stop="no such text"))
    assert not llm.engine.has_work()


@pytest.mark.parametrize("mesh", [pytest.param("tensor=2", marks=pytest.mark.slow), "tensor=4"])
def test_the_same_beams_on_several_devices(mesh):
    wide = Tiny(kv_heads=4)
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=8, num_blocks=20)
    with make_llm(wide.model, mesh=mesh, preemption="swap", **sizes) as llm:
        params = [beams(3, 8), beams(2, 8, stop_token_ids=OFTEN), beams(4, 4, logit_bias={8: 3.0})]
        outs = llm.generate(ids(*PROMPTS[1:]), params)
        for prompt, one, out in zip(PROMPTS[1:], params, outs, strict=True):
            assert_found(out.outputs, beam_search(wide, prompt, one), one)
        assert llm.stats().blocks_copied > 0
        (out,) = llm.generate(ids(PROMPTS[2]), SamplingParams(n=3, seed=4, max_tokens=6))
        for i, completion in enumerate(out.outputs):
            assert completion.token_ids == draw(wide, PROMPTS[2], 4, i, 6)
        outs = llm.generate(ids(*prompts_of([12, 17, 20, 24])), greedy(14))  # 4 x 7 to 10 blocks
        for prompt, out in zip(prompts_of([12, 17, 20, 24]), outs, strict=True):
            wide.assert_greedy(prompt, out.outputs[0].token_ids)
        assert llm.stats().num_swapped > 0
        drain(llm)
        clean(llm)
