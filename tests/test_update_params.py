"""New parameters for an engine that runs: which tokens they make, and what becomes of the others."""

import asyncio
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import AsyncLLM, SamplingParams
from jaxllm.errors import EngineAsleepError, EngineError, EnginePausedError
from tests.tiny import Tiny, clean, drain, greedy, ids, make_llm, prompts_of, tokens

PROMPTS = prompts_of((5, 9), seed=22)
LONG = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def scaled(tiny: Tiny, factor: float = 2.0) -> nnx.State:
    return jax.tree.map(lambda array: array * factor, nnx.state(tiny.model, nnx.Param))


@pytest.fixture(scope="module")
def served(tiny):
    """With parameters of its own."""
    with make_llm((tiny.cfg, jax.tree.map(np.asarray, nnx.state(tiny.model, nnx.Param)))) as llm:
        yield llm


@pytest.fixture
def llm(served, tiny):
    yield served
    served.update_params(jax.tree.map(np.asarray, nnx.state(tiny.model, nnx.Param)), version=0)
    drain(served)
    clean(served)


def said(llm, prompt, params=LONG):
    (output,) = llm.generate(ids(prompt), params, use_tqdm=False)
    return output.outputs[0]


def test_versions_of_spans(llm, tiny):
    assert llm.params_version == 0
    old = said(llm, PROMPTS[0])
    assert old.versions == [(0, 0)]
    stream = llm.stream(ids(PROMPTS[0]), LONG)
    for _ in range(4):
        next(stream)
    llm.update_params(scaled(tiny))
    for _ in range(3):
        next(stream)
    llm.update_params(scaled(tiny, 3.0), version=70)
    *_, (_, last) = stream
    (first, second, third) = last.outputs[0].versions
    assert (first, second[1], third[1]) == ((0, 0), 1, 70)
    # What is in flight as new parameters come was computed with the old ones.
    assert 4 <= second[0] <= 5 and 7 <= third[0] <= 9
    assert last.outputs[0].token_ids[: second[0]] == old.token_ids[: second[0]]
    assert llm.params_version == 70
    llm.update_params(scaled(tiny))
    assert llm.params_version == 71 and said(llm, PROMPTS[0]).versions == [(0, 71)]


def test_deltas_have_the_spans_so_far(llm, tiny):
    params = LONG.clone()
    params.output_kind = type(params.output_kind).DELTA
    found = []
    for i, (_, output) in enumerate(llm.stream(ids(PROMPTS[0]), params)):
        found.append(output.outputs[0].versions)
        if i == 5:
            llm.update_params(scaled(tiny), version=9)
    assert found[0] == found[5] == [(0, 0)] and [version for _, version in found[-1]] == [0, 9]


def test_beams_have_the_versions_of_their_hypotheses(llm, tiny):
    params = SamplingParams(beam_width=3, n=3, max_tokens=10, temperature=0.0, ignore_eos=True)
    steps = llm.generate_iter([(PROMPTS[0], params)])
    for _ in range(6):
        next(steps)
    llm.update_params(scaled(tiny), version=9)
    ((_, output),) = [found for step in steps for found in step]
    for beam in output.outputs:
        (first, (start, last)) = beam.versions
        assert first == (0, 0) and last == 9 and 2 <= start <= 6


def test_recompute_goes_on_as_if_the_new_ones_had_made_all(llm, tiny):
    stream = llm.stream(ids(PROMPTS[0]), LONG)
    for _ in range(6):
        next(stream)
    llm.update_params(scaled(tiny), in_flight="recompute")
    *_, (_, last) = stream
    found = last.outputs[0]
    (_, (start, _)) = found.versions
    rest = greedy(24 - start)
    rest.ignore_eos = True
    assert found.token_ids[start:] == said(llm, PROMPTS[0] + found.token_ids[:start], rest).token_ids


def test_abort_tells_who_waits(llm, tiny):
    stream = llm.stream(ids(*PROMPTS), LONG)
    for _ in range(6):
        next(stream)
    llm.update_params(scaled(tiny), in_flight="abort")
    last = dict(stream)
    assert [last[i].outputs[0].finish_reason for i in range(2)] == ["abort"] * 2
    assert all(0 < len(last[i].outputs[0].token_ids) < 24 for i in range(2))


def test_the_prefix_cache_is_kept_if_asked(llm, tiny):
    prompt = prompts_of((40,), seed=3)[0]
    said(llm, prompt)
    llm.update_params(scaled(tiny), keep_prefix=True)
    (kept,) = llm.generate(ids(prompt), LONG, use_tqdm=False)
    llm.update_params(scaled(tiny))
    (dropped,) = llm.generate(ids(prompt), LONG, use_tqdm=False)
    assert kept.num_cached_tokens > 0 == dropped.num_cached_tokens


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_other_dtypes_are_cast(llm, tiny, make):
    half = jax.tree.map(lambda array: make(array).astype(jnp.bfloat16), nnx.state(tiny.model, nnx.Param))
    with pytest.raises(ValueError, match="is bfloat16, the engine's is float32; cast it first"):
        llm.update_params(half, cast=False)
    llm.update_params(half)
    rounded = jax.tree.map(lambda array: array.astype(jnp.float32), half)
    found = said(llm, PROMPTS[0])
    llm.update_params(rounded)
    assert said(llm, PROMPTS[0]).token_ids == found.token_ids


def test_float64_is_cast_or_refused(llm, tiny):
    wide = jax.tree.map(lambda array: np.asarray(array, np.float64), nnx.state(tiny.model, nnx.Param))
    before = said(llm, PROMPTS[0]).token_ids
    with pytest.raises(ValueError, match="is float64; cast it to float32"):
        llm.update_params(wide, cast=False)
    llm.update_params(wide)
    assert said(llm, PROMPTS[0]).token_ids == before
    with jax.enable_x64(True):
        llm.update_params(jax.tree.map(jnp.asarray, wide))
    assert said(llm, PROMPTS[0]).token_ids == before


def test_donated_arrays_that_are_not_shared_are_freed(llm, tiny):
    half = jax.tree.map(lambda array: array.astype(jnp.bfloat16), nnx.state(tiny.model, nnx.Param))
    llm.update_params(half, donate=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(half))
    shared = scaled(tiny)
    llm.update_params(shared, donate=True)
    assert said(llm, PROMPTS[0]).token_ids and not any(leaf.is_deleted() for leaf in jax.tree.leaves(shared))


def test_deleted_parameters_raise_at_once(llm, tiny):
    params = scaled(tiny)
    llm.update_params(params)
    for leaf in jax.tree.leaves(params)[3:5]:  # whichever they are
        leaf.delete()
    asks = (
        lambda: llm.generate(ids(PROMPTS[0])),
        lambda: llm.enqueue(ids(PROMPTS[0])),
        lambda: next(llm.generate_iter([(PROMPTS[0], None)])),
        lambda: llm.loglikelihood([(PROMPTS[0], [[1]])]),
        lambda: llm.rollout([PROMPTS[0]]),
        lambda: llm.params,
        lambda: llm.module,
        lambda: llm.sleep(params=True),
    )
    for ask in asks:
        with pytest.raises(EngineError, match="parameters were deleted.*update_params"):
            ask()
    with pytest.raises(ValueError, match="has been deleted or donated"):
        llm.update_params(params)


def test_a_version_may_be_a_number_of_another_library(llm, tiny):
    for version in (np.int64(7), jnp.int32(8)):
        llm.update_params(scaled(tiny), version=version)
        assert llm.params_version == int(version) and type(llm.params_version) is int


def test_traced_parameters_are_refused(llm, tiny):
    with pytest.raises(ValueError, match="embed.weight is traced: .* outside of jit"):
        jax.jit(lambda state: llm.update_params(state))(scaled(tiny))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"in_flight": "wait"}, "in_flight='wait' must be one of continue, recompute, abort"),
        ({"version": -1}, "version=-1"),
        ({"in_flight": "recompute", "keep_prefix": True}, "leave keep_prefix out"),
    ],
)
def test_what_is_refused(llm, tiny, options, says):
    with pytest.raises(ValueError, match=says):
        llm.update_params(scaled(tiny), **options)


def test_a_paused_engine_makes_no_steps(llm):
    before = said(llm, PROMPTS[0]).token_ids
    outputs, begun = [], threading.Event()

    def read() -> None:
        for _, output in llm.stream(ids(PROMPTS[0]), LONG):
            outputs.append(len(output.outputs[0].token_ids))
            begun.set()
            if output.finished:
                outputs.append(output.outputs[0].token_ids)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    llm.pause()
    with pytest.raises(EnginePausedError, match="resume"):
        llm.generate(ids(PROMPTS[1]), use_tqdm=False)
    num = llm.stats().num_step_tokens
    reader.join(0.3)
    assert llm.stats().num_step_tokens == num
    llm.resume()
    reader.join(60)
    assert outputs[-1] == before


def test_sleep_of_the_pool_alone(llm):
    executor = llm.engine.runner.executor
    before, leaves = said(llm, PROMPTS[0]).token_ids, executor.leaves
    llm.sleep()
    assert executor.state is None and executor.leaves is leaves
    llm.wake()
    assert said(llm, PROMPTS[0]).token_ids == before
    llm.sleep(kv=False, params=True)
    assert executor.state is not None and not executor.leaves
    llm.wake()
    assert said(llm, PROMPTS[0]).token_ids == before
    with pytest.raises(ValueError, match="gives nothing away"):
        llm.sleep(kv=False)
    with pytest.raises(ValueError, match="for kv=False leave level out"):
        llm.sleep(1, kv=False)
    llm.sleep()
    for ask in (
        lambda: said(llm, PROMPTS[0]),
        lambda: llm.rollout([PROMPTS[0]]),
        lambda: llm.loglikelihood([(PROMPTS[0], [[1]])]),
    ):
        with pytest.raises(EngineAsleepError, match="sleeps without its kv_cache"):
            ask()
    llm.wake()


def test_the_pools_size_in_bytes(tiny):
    with make_llm(tiny.model, num_blocks=None, kv_cache_bytes=1_000_000, max_num_seqs=2) as llm:
        said(llm, PROMPTS[0])
        held = sum(array.nbytes for array in llm.engine.runner.executor.state.kv_pools)
        stats = llm.stats()
        assert 0.9e6 < held <= 1e6 and stats.num_blocks * stats.block_size > 100
    with pytest.raises(ValueError, match="kv_cache_bytes=10"):
        make_llm(tiny.model, num_blocks=None, kv_cache_bytes=10)
    with pytest.raises(ValueError, match="exclude each other"):
        make_llm(tiny.model, num_blocks=4, kv_cache_bytes=1_000_000)


def test_async_updates_while_others_wait(tiny):
    async def read(outputs):
        return [output async for output in outputs][-1]

    async def run(llm: AsyncLLM):
        steps = llm.generate({"prompt_token_ids": PROMPTS[0]}, greedy(100))  # of which many are left after a pause
        await anext(steps)
        await llm.pause()
        other = asyncio.create_task(read(llm.generate({"prompt_token_ids": PROMPTS[1]}, greedy(2))))
        _, waiting = await asyncio.wait([other], timeout=0.2)
        assert waiting
        await llm.update_params(scaled(tiny), version=5)
        await llm.resume()
        first = await other
        last = await read(steps)
        await llm.sleep()
        await llm.wake()
        await llm.update_params(scaled(tiny, 1.0), in_flight="abort")
        assert llm.params_version == 6
        return first.outputs[0].versions, last.outputs[0].versions

    llm = AsyncLLM(tiny.model, max_num_seqs=4, max_num_batched_tokens=24, block_size=4, num_blocks=32)
    try:
        first, last = asyncio.run(run(llm))
    finally:
        llm.close()
    assert first == [(0, 5)] and [version for _, version in last] == [0, 5]


def test_samples_of_one_prompt_have_versions(llm):
    (output,) = llm.generate(ids(PROMPTS[0]), SamplingParams(n=3, max_tokens=4, temperature=1.0), use_tqdm=False)
    assert [each.versions for each in output.outputs] == [[(0, 0)]] * 3
    assert tokens([output])
