"""The engine serves with the executables that could be compiled, and says which could not."""

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.device.compile_plan import CompilePlan
from jaxllm.engine.device.lowering import Lowering
from jaxllm.errors import EngineDeadError
from jaxllm.pallas_kernels import native
from tests.on_demand import as_for_users
from tests.tiny import clean, greedy, ids, prompts_of, tokens

SIZES = dict(max_num_seqs=4, max_num_batched_tokens=24, block_size=4, num_blocks=64)


@pytest.fixture
def without(tiny, monkeypatch):
    """An engine of which some executables can't be compiled, after it has tried all."""
    engines = []
    jobs = Lowering.jobs

    def make(*names):
        def broken():
            raise RuntimeError("internal compiler error")

        monkeypatch.setattr(Lowering, "jobs", lambda *args: jobs(*args) | dict.fromkeys(names, broken))
        with as_for_users():
            engines.append(LLM(tiny.model, **SIZES))
        with pytest.raises(EngineDeadError, match="failed twice: internal compiler error"):
            engines[-1].wait_compiled()
        return engines[-1]

    yield make
    for llm in engines:
        llm.close()


def test_a_missing_bucket_in_the_middle_costs_padding_alone(tiny, without):
    llm = without(("step", 8), ("sample_full", 1))
    runner, stats = llm.engine.runner, llm.stats()
    assert stats.num_failed_executables == 2 and stats.num_compiled == stats.num_executables - 2
    assert runner.max_tokens(False) == runner.max_tokens(True) == 24
    prompts = prompts_of([5, 1, 30, 8, 3])
    for prompt, output in zip(prompts, tokens(llm.generate(ids(*prompts), greedy(6))), strict=True):
        tiny.assert_greedy(prompt, output)
    outputs = llm.generate(ids(*prompts), greedy(3, logprobs=1))
    assert all(len(output.outputs[0].logprobs) == 3 for output in outputs)
    assert sum(llm.stats().step_counts[3:]) > 0  # steps of 17 tokens and more
    clean(llm)


def test_a_missing_first_bucket_is_stepped_over(tiny, without):
    llm = without(("step", 1))
    tiny.assert_greedy([1, 2, 3], tokens(llm.generate(ids([1, 2, 3]), greedy(4)))[0])


def test_a_kind_of_step_that_nothing_can_run_raises_the_cause(tiny, without):
    llm = without(*(("sample_full", samples) for samples in (1, 4)))
    tiny.assert_greedy([1, 2], tokens(llm.generate(ids([1, 2]), greedy(2)))[0])
    with pytest.raises(EngineDeadError, match=r"\('sample_full', 1\) failed twice: internal compiler error"):
        llm.generate(ids([1, 2]), SamplingParams(logprobs=1, max_tokens=2))


@pytest.mark.skipif(not native.is_built(), reason="XLA's own loops are optimised from the first")
@pytest.mark.parametrize("is_fixed", [False, True])
def test_first_executables_are_replaced_and_tokens_stay(tiny, is_fixed, monkeypatch):
    monkeypatch.setattr(CompilePlan, "_next_of_rest", lambda self: None)  # none before it is asked for
    with as_for_users(), LLM(tiny.model, **SIZES, batch_invariant=is_fixed, compilation_cache=False) as llm:
        plan = llm.engine.runner.compile_plan
        first = {name: plan[name] for name in ("init", ("admit", 1), ("step", 1), ("sample", 1))}
        prompts = ids(*prompts_of((5, 9)))
        before = tokens(llm.generate(prompts, greedy(6)))
        llm.wait_compiled()
        after = {name: plan[name] for name in first}
        assert all((first[name] is after[name]) == is_fixed for name in first)
        assert tokens(llm.generate(prompts, greedy(6))) == before


@pytest.mark.skipif(not native.is_built(), reason="what XLA computes itself is optimised at once")
def test_what_many_at_once_need_comes_before_anything_is_asked_for(tiny):
    """On a CPU: the largest step, and the one in which all decode; and nothing else."""
    with as_for_users(), LLM(tiny.model, compilation_cache=False, **SIZES | {"max_num_batched_tokens": 64}) as llm:
        plan = llm.engine.runner.compile_plan
        ahead = ["init", ("admit", 1), ("step", 1), ("sample", 1), ("step", 64), ("sample", 4), ("step", 8)]
        plan.wait(ahead)
        assert {*plan.compiled[:7]} == {*ahead}
