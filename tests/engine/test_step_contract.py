"""The step contract (docs/step_contract.md) on the real executables; the scheduler has tests of its own."""

import jax
import jax.monitoring
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine import sizing
from jaxllm.engine.device.packing import StepLayout, pool_ladder, token_ladder
from jaxllm.errors import EngineDeadError
from jaxllm.pallas_kernels import native
from tests.on_demand import as_for_users
from tests.tiny import greedy, ids, make_llm, prompts_of, tokens


def add(llm, name, prompt, params):
    llm.engine.add(prompt, params, request_id=name)


def run(llm) -> dict:
    done = {}
    while llm.engine.has_work():
        done |= {out.request_id: out for out in llm.engine.step()}
    return done


def test_the_next_step_is_dispatched_before_this_one_is_read(llm, monkeypatch):
    events, runner = [], llm.engine.runner
    dispatch, collect = runner.dispatch_forward, runner.collect
    monkeypatch.setattr(runner, "dispatch_forward", lambda plan: events.append("dispatch") or dispatch(plan))
    monkeypatch.setattr(runner, "collect", lambda handle: events.append("collect") or collect(handle))
    llm.generate(ids([1, 2, 3]), greedy(4))
    assert events == ["dispatch"] + ["dispatch", "collect"] * 3 + ["collect"]


def test_state_is_donated_and_a_step_takes_one_fresh_array(llm, monkeypatch):
    llm.generate(ids([1]), greedy(1))
    before, arrays, pack = llm.engine.runner.executor.state, [], StepLayout.pack
    monkeypatch.setattr(StepLayout, "pack", lambda *args: arrays.append(pack(*args)) or arrays[-1])
    llm.generate(ids(*prompts_of([3, 9])), greedy(6))
    assert all(x.is_deleted() for x in jax.tree.leaves((before.kv_pools, before.history, before.slots, before.hidden)))
    assert all(a.dtype == np.int32 and a.ndim == 1 and a.base is None for a in arrays)
    assert len({id(a) for a in arrays}) == len(arrays) > 5


@as_for_users()
def test_the_compile_plan_is_known_and_nothing_compiles_after_it(tiny):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    with make_llm(tiny.model, max_num_seqs=6) as llm:
        llm.wait_compiled()
        ladder = token_ladder(24, free_padding=native.is_built())
        assert ladder == ((1, 8, 24) if native.is_built() else (1, 8, 16, 24))
        seqs = {min(t, 6) for t in ladder}
        others = ["init", "admit", "admit", "rules", "prompt_logprobs", *["copy"] * 2, *["swap_out", "swap_in"] * 2]
        others += ["pool"] * len(pool_ladder(24))
        assert llm.stats().num_executables == len(ladder) + 4 * len(seqs) + len(others)
        assert llm.stats().num_compiled == llm.stats().num_executables
        compiled.clear()
        plain = greedy(5)
        sampled = SamplingParams(temperature=0.9, top_k=5, top_p=0.9, min_p=0.01, seed=1, max_tokens=7, min_tokens=3)
        everything = SamplingParams(
            seed=1, max_tokens=5, frequency_penalty=1.0, logit_bias={3: 2.0}, logprobs=3, prompt_logprobs=2
        )
        for lengths in ([1], [2, 3], [30], [1, 8, 24, 25, 50, 7, 3, 2, 9], [60]):
            prompts = ids(*prompts_of(lengths))
            llm.generate(prompts, plain)
            llm.generate(prompts, sampled)
            llm.generate(prompts, everything)
        llm.generate(ids(*prompts_of([3, 9])), SamplingParams(n=3, max_tokens=5))
        llm.generate(ids(*prompts_of([3, 9])), SamplingParams(beam_width=3, max_tokens=5, frequency_penalty=1.0))
        for kind in ("swap", "auto"):
            llm.engine.set_preemption(kind)
            llm.generate(ids(*prompts_of([20] * 6)), greedy(40))
        assert llm.stats().num_swapped > 0
        fail_once(llm, 3, pytest.MonkeyPatch())
        llm.generate(ids([1, 2, 3]), plain)
        assert compiled == []


def test_steps_and_samplers_of_eight_say_what_those_of_one_do(tiny, monkeypatch):
    """As on a TPU, where nothing is smaller; samplers have no more rows than there are slots."""

    def engine(least: int) -> LLM:
        monkeypatch.setattr(sizing, "min_bucket", lambda platform: least)
        return make_llm(tiny.model, max_num_seqs=6)

    monkeypatch.setattr(sizing, "has_free_padding", lambda shape, mesh: False)
    prompts = ids(*prompts_of([1, 2, 9]))
    with engine(8) as padded, engine(1) as llm:
        steps = [name[1] for name in padded.engine.runner.compile_plan.names if name[0] == "step"]
        assert steps == [8, 16, 24]
        for params in (greedy(5), SamplingParams(temperature=0.9, seed=1, max_tokens=5, frequency_penalty=1.0)):
            assert tokens(padded.generate(prompts, params)) == tokens(llm.generate(prompts, params))


def test_an_executable_refuses_what_it_was_not_compiled_for_by_name(llm):
    runner = llm.engine.runner
    llm.generate(ids([1]), greedy(1))
    state = runner.executor.state
    step = runner.compile_plan["step", 8]
    with pytest.raises(TypeError, match="packed"):
        step(runner.executor.leaves, state.kv_pools, state.history, state.slots, state.hidden, np.zeros(3, np.int32))


def test_sequences_are_served_while_executables_compile(tiny):
    with LLM(tiny.model, max_num_seqs=8, max_num_batched_tokens=24, block_size=4, num_blocks=64) as llm:
        assert llm.stats().num_compiled < llm.stats().num_executables
        prompts = prompts_of([3, 9, 5])
        for prompt, output in zip(prompts, tokens(llm.generate(ids(*prompts), greedy(6))), strict=True):
            tiny.assert_greedy(prompt, output)


def test_abort_at_any_time(llm, tiny):
    prompts = prompts_of([6, 30, 12])
    for steps in range(12):
        for i, prompt in enumerate(prompts):
            add(llm, f"r{i}", prompt, greedy(8))
        outputs = {}
        for _ in range(steps):
            outputs |= {out.request_id: out for out in llm.engine.step()}
        aborted = llm.engine.abort("r1")
        llm.engine.scheduler.check()
        outputs |= run(llm)
        if aborted is not None:
            assert aborted.outputs[0].finish_reason == "abort" and "r1" not in outputs
        for i in (0, 2):
            assert len(outputs[f"r{i}"].outputs[0].token_ids) == 8
            tiny.assert_greedy(prompts[i], outputs[f"r{i}"].outputs[0].token_ids)
        llm.engine.scheduler.check()


def fail_once(llm, when: int, monkeypatch, *, after: bool = True, verb: str | None = None) -> list:
    """The `when`-th step from now fails: after the device took the state (`after`), or when its result is read. `verb`
    says which of the runner's calls fails instead. Returns a list that grows with each call."""
    runner = llm.engine.runner
    verb = verb or ("dispatch_forward" if after else "collect")
    real, calls = getattr(runner, verb), []

    def failing(*given):
        calls.append(1)
        if len(calls) == when:
            if verb != "collect":
                real(*given)  # the donated state is gone
            raise jax.errors.JaxRuntimeError("INTERNAL: injected")
        return real(*given)

    monkeypatch.setattr(runner, verb, failing)
    return calls


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("when", [1, 2, 3, 5, 9])
def test_a_failed_step_is_recomputed(llm, tiny, monkeypatch, when, after):
    prompts = prompts_of([3, 20, 9, 30])
    fail_once(llm, when, monkeypatch, after=after)
    outputs = tokens(llm.generate(ids(*prompts), greedy(8)))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == 8
        tiny.assert_greedy(prompt, output)


@pytest.mark.parametrize("poison_len", [0, 3])  # fails from its prompt on, or after a few tokens
def test_a_poison_request_is_quarantined_alone(llm, tiny, monkeypatch, poison_len):
    prompts, poison = prompts_of([5, 9, 14]), [7, 7, 7, 7, 7]
    runner = llm.engine.runner
    dispatch = runner.dispatch_forward

    def failing(plan):
        for request in plan.rows:
            if request.prompt_token_ids == poison and len(request.output_token_ids) >= poison_len:
                raise jax.errors.JaxRuntimeError("INTERNAL: injected")
        return dispatch(plan)

    monkeypatch.setattr(runner, "dispatch_forward", failing)
    *good, bad = llm.generate(ids(*prompts, poison), greedy(10))
    assert bad.outputs[0].finish_reason == "error" and "failed" in bad.error
    assert len(bad.outputs[0].token_ids) >= poison_len
    for prompt, out in zip(prompts, good, strict=True):
        assert out.outputs[0].finish_reason == "length" and out.error is None
        tiny.assert_greedy(prompt, out.outputs[0].token_ids)


def test_a_device_that_can_not_be_rebuilt_is_dead_and_says_so(tiny, monkeypatch):
    with make_llm(tiny.model, max_num_seqs=1, max_num_batched_tokens=1) as llm:
        llm.generate(ids([1]), greedy(1))
        fail_once(llm, 1, monkeypatch)
        monkeypatch.setattr(llm.engine.runner, "reset", lambda: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(EngineDeadError, match="no memory"):
            llm.generate(ids([1]), greedy(1))
        with pytest.raises(EngineDeadError, match="no memory"):
            llm.generate(ids([1]), greedy(1))


def test_rows_with_nan_logits_end_with_an_error_alone(llm, tiny, monkeypatch):
    prompts = prompts_of([5, 6, 7])
    collect = llm.engine.runner.collect

    def spoiled(handle):
        row = next((i for i, r in enumerate(handle.plan.rows) if r.prompt_token_ids == prompts[1]), None)
        found = collect(handle)
        if row is not None and len(handle.plan.rows[row].output_token_ids) == 2:
            tokens = found.tokens.copy()
            tokens[row] = -1  # what the sampler gives for a row that is not finite
            found = found._replace(tokens=tokens)
        return found

    monkeypatch.setattr(llm.engine.runner, "collect", spoiled)
    outs = llm.generate(ids(*prompts), greedy(6))
    assert [out.outputs[0].finish_reason for out in outs] == ["length", "error", "length"]
    assert "not finite" in outs[1].error and len(outs[1].outputs[0].token_ids) == 2
    tiny.assert_greedy(prompts[2], outs[2].outputs[0].token_ids)


@pytest.mark.parametrize("stop", [None, "no such text"])  # decoded at the end, or while it comes
def test_errors_of_host_work_end_one_request(tiny, stop):
    class Broken(Letters):
        def decode(self, token_ids, skip_special_tokens=True):
            if list(token_ids[:2]) == [9, 9]:
                raise RuntimeError("broken decoder")
            return super().decode(token_ids)

    with make_llm(tiny.model, tokenizer=Broken(), max_num_seqs=2, max_num_batched_tokens=8) as llm:
        good, bad = llm.generate(ids([1, 2, 3], [9, 9]), greedy(6, stop=stop))
        assert good.outputs[0].finish_reason == "length" and len(good.outputs[0].text) == 6
        assert bad.outputs[0].finish_reason == "error" and "broken decoder" in bad.error
        assert not llm.engine.has_work()
        llm.engine.scheduler.check()


class Letters:
    """A tokenizer of single characters."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 32 for c in text]

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        return "".join(chr(i + 32) for i in token_ids)
