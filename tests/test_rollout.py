"""Samples as arrays: they are those of `generate`."""

import asyncio
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import AsyncLLM, Finish, SamplingParams
from jaxllm.errors import EngineAsleepError, EngineError
from tests.tiny import clean, drain, ids, make_llm, prompts_of

PROMPTS = prompts_of((5, 9, 3), seed=51)
DRAWN = SamplingParams(n=4, temperature=1.0, max_tokens=8, logprobs=0, seed=11, logprobs_mode="sampled")


@pytest.fixture(scope="module")
def served(tiny):
    with make_llm((tiny.cfg, jax.tree.map(np.asarray, nnx.state(tiny.model, nnx.Param)))) as llm:
        yield llm


@pytest.fixture
def llm(served):
    yield served
    drain(served)
    clean(served)


def stops_of(llm) -> list[int]:
    """Tokens of the samples of `DRAWN`, so that some end early."""
    (output, *_) = llm.generate(ids(*PROMPTS), DRAWN, use_tqdm=False)
    return output.outputs[1].token_ids[2:3]


@pytest.mark.parametrize("stops", [False, True])
def test_arrays_are_those_of_generate(llm, stops):
    params = DRAWN.clone()
    if stops:
        params.stop_token_ids = stops_of(llm)
    outputs = llm.generate(ids(*PROMPTS), params, use_tqdm=False)
    made = llm.rollout(PROMPTS, params)
    assert made.tokens.shape == made.logprobs.shape == made.version.shape == (3, 4, 8)
    assert made.tokens.dtype == np.int32 and made.logprobs.dtype == np.float32 and made.finish.dtype == np.int8
    for b, output in enumerate(outputs):
        assert made.prompts[b, : made.prompt_lengths[b]].tolist() == PROMPTS[b]
        for i, one in enumerate(output.outputs):
            length = made.lengths[b, i]
            assert made.tokens[b, i, :length].tolist() == one.token_ids
            own = [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
            np.testing.assert_allclose(made.logprobs[b, i, :length], own, atol=3e-6)
            assert Finish(made.finish[b, i]).name.lower() == one.finish_reason
            assert not made.tokens[b, i, length:].any() and not made.logprobs[b, i, length:].any()
    assert (made.version == np.where(made.mask, llm.params_version, -1)).all()
    assert {Finish.STOP, Finish.LENGTH} >= set(made.finish.ravel().tolist()) >= ({Finish.STOP} if stops else set())
    assert made.mask.sum() == made.lengths.sum() and not made.errors


def test_log_probabilities_where_some_want_none(llm):
    """Of the rows of one step, some are kept and others are not."""
    without = DRAWN.clone()
    without.logprobs = None
    want = llm.rollout(PROMPTS, DRAWN)
    made = llm.rollout(PROMPTS, [DRAWN, without, DRAWN])
    np.testing.assert_array_equal(made.tokens, want.tokens)
    np.testing.assert_allclose(made.logprobs[[0, 2]], want.logprobs[[0, 2]], atol=3e-6)
    assert not made.logprobs[1].any()


def test_prompts_as_arrays(llm):
    padded = np.full((3, 9), 7, np.int64)
    for row, prompt in zip(padded, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    want = llm.rollout(PROMPTS, DRAWN)
    made = llm.rollout(jnp.asarray(padded), DRAWN, lengths=jnp.array([5, 9, 3]), pad_id=95)
    np.testing.assert_array_equal(np.where(made.mask, made.tokens, 0), want.tokens)
    assert (made.tokens[~made.mask] == 95).all() and made.prompts[2].tolist() == PROMPTS[2] + [95] * 6
    whole = llm.rollout(padded[1:2], DRAWN)
    np.testing.assert_array_equal(whole.tokens, want.tokens[1:2])
    assert llm.rollout([], DRAWN).tokens.shape[0] == 0


def test_lengths_without_a_limit(llm):
    stop = stops_of(llm)
    unbounded = DRAWN.clone()
    unbounded.max_tokens, unbounded.stop_token_ids, unbounded.logprobs = None, stop, None
    made = llm.rollout(PROMPTS[:1], unbounded)
    assert made.tokens.shape[2] == made.lengths.max() and made.logprobs is None


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"logprobs": 2}, "logprobs"),
        ({"stop": "x"}, "stop_token_ids"),
        ({"best_of": 9}, "best_of"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"logprobs": None, "logprob_token_ids": [3]}, "logprob_token_ids"),
        ({"n": 1, "seed": None, "beam_width": 2, "temperature": 0.0}, "beam_width"),
    ],
)
def test_what_has_no_place(llm, changes, says):
    changes = {"logprobs_mode": None} | changes
    params = SamplingParams(**({"n": 4, "max_tokens": 8, "logprobs": 0} | changes))
    with pytest.raises(ValueError, match=says):
        llm.rollout(PROMPTS, params)
    with pytest.raises(ValueError, match=says):
        llm.rollout_iter(PROMPTS, params)


def test_arguments(llm):
    with pytest.raises(ValueError, match="one n"):
        llm.rollout(PROMPTS[:2], [SamplingParams(n=2), SamplingParams(n=3)])
    with pytest.raises(ValueError, match="lengths"):
        llm.rollout(np.zeros((2, 4), np.int32), DRAWN, lengths=[1, 5])
    with pytest.raises(ValueError, match="shape"):
        llm.rollout(np.zeros(4, np.int32), DRAWN, lengths=[1])
    with pytest.raises(ValueError, match="token id"):
        llm.rollout([[1, 999]], DRAWN)
    with pytest.raises(ValueError, match=r"shape \(2, 3, 4\); expected token ids"):
        llm.rollout(np.ones((2, 3, 4), np.int32), DRAWN)
    with pytest.raises(ValueError, match="an empty list; give it at least one"):
        llm.rollout([[1], []], DRAWN)
    with pytest.raises(ValueError, match="pad_id=1099511627776 must be an integer"):
        llm.rollout(PROMPTS, DRAWN, pad_id=2**40)
    with pytest.raises(ValueError, match="prompts is a str; rollout_iter takes an iterable"):
        llm.rollout_iter("def f(", DRAWN)


def test_to_device_in_a_jitted_step(llm):
    made = llm.rollout(PROMPTS, DRAWN)

    @jax.jit
    def total(batch):
        return jnp.where(batch["mask"], batch["logprobs"], 0.0).sum()

    batch = made.to_device(jax.devices()[1])
    assert batch["tokens"].devices() == {jax.devices()[1]} and "errors" not in batch
    assert total(batch) == pytest.approx(made.logprobs.sum(), rel=1e-5)


def test_drawn_from_an_iterator(llm):
    want = llm.rollout(PROMPTS, DRAWN)
    found = dict(llm.rollout_iter(iter(np.array(prompt) for prompt in PROMPTS), DRAWN))
    assert sorted(found) == [0, 1, 2]
    for index, made in found.items():
        np.testing.assert_array_equal(made.tokens[0], want.tokens[index])
    endless = llm.rollout_iter(itertools.cycle(PROMPTS), DRAWN)
    assert len([next(endless) for _ in range(20)]) == 20
    endless.close()
    broken = llm.rollout_iter([PROMPTS[0], [999]], DRAWN)
    with pytest.raises(ValueError, match="prompt 1: .*999"):
        list(broken)


def test_versions_while_parameters_change(llm, tiny):
    drawn = llm.rollout_iter(itertools.cycle(PROMPTS), DRAWN)
    next(drawn)
    llm.update_params(nnx.state(tiny.model, nnx.Param), version=9)
    later = [next(drawn)[1] for _ in range(30)]
    drawn.close()
    assert later[-1].version[later[-1].mask].tolist() == [9] * int(later[-1].lengths.sum())
    llm.update_params(nnx.state(tiny.model, nnx.Param), version=0)


def test_not_finite(llm, tiny):
    params = nnx.state(tiny.model, nnx.Param)
    llm.update_params(jax.tree.map(lambda x: x * jnp.nan, params))
    with pytest.raises(EngineError, match="all 3 prompts failed, the first because .*not finite"):
        llm.rollout(PROMPTS, DRAWN)
    parts = dict(llm.rollout_iter(PROMPTS, DRAWN))
    llm.update_params(params, version=0)
    assert sorted(parts) == [0, 1, 2]
    for made in parts.values():
        assert (made.finish == Finish.ERROR).all() and not made.lengths.any() and "not finite" in made.errors[0]


def test_one_that_fails_is_told_beside_the_others(tiny):
    """Of a token that is not finite, which one prompt has."""
    model = nnx.clone(tiny.model)
    model.embed.weight[...] = model.embed.weight[...].at[95].set(jnp.nan)
    prompts = [[token % 95 for token in prompt] for prompt in PROMPTS]
    with make_llm(model) as llm:
        params = DRAWN.clone()
        params.logit_bias = {95: -100.0}
        made = llm.rollout([prompts[0], [95, 3], prompts[2]], params)
    assert list(made.errors) == [1] and "not finite" in made.errors[1]
    assert [(made.finish[b] == Finish.ERROR).all() for b in range(3)] == [False, True, False]


def test_no_prompts(llm):
    made, none = llm.rollout([], DRAWN), llm.rollout([], [])
    assert made.tokens.shape == made.version.shape == made.logprobs.shape == (0, 4, 8)
    assert made.logprobs.dtype == np.float32 and made.finish.shape == made.lengths.shape == (0, 4)
    assert none.tokens.shape == (0, 0, 0)
    with pytest.raises(ValueError, match="stop_token_ids"):
        llm.rollout([], SamplingParams(stop="x"))


def test_asleep(tiny):
    with make_llm((tiny.cfg, jax.tree.map(np.asarray, nnx.state(tiny.model, nnx.Param)))) as llm:
        llm.sleep()
        for draw in (lambda: llm.rollout(PROMPTS, DRAWN), lambda: list(llm.rollout_iter(PROMPTS, DRAWN))):
            with pytest.raises(EngineAsleepError):
                draw()


def test_deleted_parameters(tiny):
    params = jax.tree.map(lambda x: x + 0, nnx.state(tiny.model, nnx.Param))
    with make_llm((tiny.cfg, params)) as llm:
        jax.tree.map(lambda x: x.delete(), params)
        with pytest.raises(EngineError, match="update_params"):
            llm.rollout(PROMPTS, DRAWN)


def test_async(tiny, llm):
    want = llm.rollout(PROMPTS, DRAWN)

    async def main():
        both = await asyncio.gather(engine.rollout(PROMPTS, DRAWN), engine.rollout(PROMPTS[:1], DRAWN))
        for made in both:
            np.testing.assert_array_equal(made.tokens, want.tokens[: len(made.tokens)])
        assert (await engine.rollout([], DRAWN)).tokens.size == 0
        with pytest.raises(ValueError, match="999"):
            await engine.rollout([[999]], DRAWN)
        many = asyncio.create_task(engine.rollout(PROMPTS * 50, DRAWN))
        await asyncio.sleep(0)
        many.cancel()
        with pytest.raises(asyncio.CancelledError):
            await many
        np.testing.assert_array_equal((await engine.rollout(PROMPTS, DRAWN)).tokens, want.tokens)

    engine = AsyncLLM(tiny.model, max_num_seqs=8, max_num_batched_tokens=24, block_size=4, num_blocks=64)
    try:
        asyncio.run(main())
    finally:
        engine.close()
