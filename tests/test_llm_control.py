"""An engine gives its memory away and takes it back, and is stepped by hand."""

import asyncio
import gc

import jax
import numpy as np
import pytest
from flax import nnx

from jaxllm import AsyncLLM, SamplingParams
from jaxllm.errors import EngineAsleepError
from tests.tiny import greedy, ids, make_llm, prompts_of, tokens

PROMPTS = prompts_of([3, 9], seed=4)


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture(scope="module")
def own_params(tiny):
    """On the host, so that the engine alone has them on the device."""
    return tiny.cfg, jax.tree.map(np.asarray, nnx.state(tiny.model, nnx.Param))


@pytest.fixture(scope="module")
def sleeper(own_params):
    llm = make_llm(own_params)
    yield llm
    llm.close()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_the_devices_memory(sleeper, own_params, level):
    llm = sleeper
    said = tokens(llm.generate(ids(*PROMPTS), greedy(6)))
    awake = live_bytes()
    held = sum(x.nbytes for x in jax.tree.leaves((llm.engine.runner.executor.leaves, llm.engine.runner.executor.state)))
    llm.sleep(level)
    assert llm.engine.is_sleeping and live_bytes() <= awake - held
    for refused in (lambda: llm.generate(ids(PROMPTS[0])), lambda: llm.params, lambda: llm.enqueue(ids(PROMPTS[0]))):
        with pytest.raises(EngineAsleepError, match=r"wake_up\(\) first"):
            refused()
    llm.wake_up()
    assert not llm.engine.is_sleeping
    if level == 2:
        with pytest.raises(EngineAsleepError, match="give new ones to update_params"):
            llm.generate(ids(PROMPTS[0]))
        llm.update_params(own_params[1])
    (first, second) = llm.generate(ids(*PROMPTS), greedy(6))
    assert tokens([first, second]) == said and second.num_cached_tokens == 0
    assert live_bytes() <= awake * 1.01


def test_wake_up_in_two_parts(sleeper):
    said = tokens(sleeper.generate(ids(PROMPTS[1]), greedy(4)))
    sleeper.sleep()
    sleeper.sleep()  # nothing more happens
    sleeper.wake_up(["weights"])
    with pytest.raises(EngineAsleepError, match="sleeps without its kv_cache"):
        sleeper.generate(ids(PROMPTS[1]))
    assert len(sleeper.engine.runner.executor.leaves)
    sleeper.wake_up(["kv_cache"])
    assert tokens(sleeper.generate(ids(PROMPTS[1]), greedy(4))) == said


def test_what_sleep_and_wake_up_refuse(sleeper):
    stream = sleeper.stream(ids(PROMPTS[0]), greedy(20))
    next(stream)
    with pytest.raises(ValueError, match="1 requests run; let them finish, or abort them, before sleep"):
        sleeper.sleep()
    stream.close()
    with pytest.raises(ValueError, match="level=3 must be 1"):
        sleeper.sleep(3)
    with pytest.raises(ValueError, match="tags has 'memory'; it may have 'weights' and 'kv_cache'"):
        sleeper.wake_up(["memory"])
    assert tokens(sleeper.generate(ids(PROMPTS[0]), greedy(2)))


def test_enqueued_requests_run_beside_others(llm):
    first = llm.enqueue(ids(*PROMPTS), [greedy(6), greedy(3)])
    second = llm.enqueue(ids(PROMPTS[0]), greedy(2), priority=1)
    assert len(llm.generate(ids(PROMPTS[1]), greedy(12))[0].outputs[0].token_ids) == 12
    done = llm.wait_for_completion()
    assert [output.request_id for output in done] == [*first, *second]
    assert [len(output.outputs[0].token_ids) for output in done] == [6, 3, 2]
    assert llm.wait_for_completion() == []


def test_an_engine_stepped_by_hand(llm):
    engine = llm.llm_engine
    engine.add_request("a", ids(PROMPTS[0])[0], greedy(4))
    llm.llm_engine.add_request("b", ids(PROMPTS[1])[0], greedy(30), lora_request=None, arrival_time=0.0)
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        engine.add_request("a", ids(PROMPTS[0])[0], greedy(4))
    with pytest.raises(TypeError, match="add_request has no argument 'priorty'; did you mean priority"):
        engine.add_request("c", ids(PROMPTS[0])[0], greedy(4), priorty=1)
    last = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
        if "a" in last and last["a"].finished and engine.get_num_unfinished_requests():
            engine.abort_request("b")
    assert len(last["a"].outputs[0].token_ids) == 4 and not last["b"].finished and engine.step() == []
    llm.generate(ids(PROMPTS[0]), greedy(1))  # the step after an abort


def test_profile_needs_a_directory(llm, monkeypatch):
    for name in ("JAXLLM_PROFILE_DIR", "VLLM_TORCH_PROFILER_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="start_profile needs a directory: give one, or set JAXLLM_PROFILE_DIR"):
        llm.start_profile()


def test_a_request_in_flight_keeps_its_parameters(llm):
    params = greedy(12)
    stream = llm.stream(ids(PROMPTS[0]), params)
    next(stream)
    params.max_tokens, params.temperature = 3, 1.0
    *_, (_, last) = stream
    assert len(last.outputs[0].token_ids) == 12


def test_the_async_interface_sleeps_too(tiny):
    llm = AsyncLLM(tiny.model, max_num_seqs=4, max_num_batched_tokens=8, block_size=4, num_blocks=64)

    async def text() -> list[int]:
        outputs = [o async for o in llm.generate(ids(PROMPTS[0])[0], greedy(4), "mine", lora_request=None)]
        return outputs[-1].outputs[0].token_ids

    async def main() -> None:
        said = await text()
        await llm.sleep()
        assert await llm.is_sleeping()
        with pytest.raises(EngineAsleepError):
            await text()
        await llm.wake_up()
        assert await llm.reset_prefix_cache() and await text() == said
        with pytest.raises(TypeError, match="has no argument 'lora'"):
            async for _ in llm.generate("", SamplingParams(), lora=None):
                pass

    try:
        asyncio.run(main())
    finally:
        llm.shutdown()
