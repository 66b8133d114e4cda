"""The engine end to end: the same tokens however a request is served."""

import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from tests.tiny import clean, greedy, ids, make_llm, prompts_of, tokens

LENGTHS = [*range(1, 21, 2), 4, 8, 12, 16, 20, 24, 28, 40, 44, 48, 23, 25, 30, 33, 36, 41, 50, 1, 4, 8, 6, 10]
assert len(LENGTHS) == 32


def test_alone_and_in_a_batch_of_32(llm, tiny):
    prompts = prompts_of(LENGTHS)
    together = tokens(llm.generate(ids(*prompts), greedy(12)))
    for prompt, output in zip(prompts, together, strict=True):
        assert len(output) == 12
        tiny.assert_greedy(prompt, output)
    for prompt in prompts[::8]:
        (alone,) = tokens(llm.generate(ids(prompt), greedy(12)))
        tiny.assert_greedy(prompt, alone)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 11, 24])
def test_chunked_at_any_size(llm, tiny, monkeypatch, chunk):
    monkeypatch.setattr(llm.engine.runner, "max_tokens", lambda *needs: chunk)
    prompts = prompts_of([3, 17, 40], seed=chunk)
    for prompt, output in zip(prompts, tokens(llm.generate(ids(*prompts), greedy(8))), strict=True):
        tiny.assert_greedy(prompt, output)


def test_after_prefix_hits(llm, tiny):
    shared, tails = prompts_of([22])[0], prompts_of([1, 3, 9], seed=1)
    prompts = [shared + tail for tail in tails] + [shared, shared[:20]]
    llm.generate(ids(shared), greedy(4))
    outputs = llm.generate(ids(*prompts), greedy(10))
    assert [out.num_cached_tokens for out in outputs] == [20, 20, 20, 20, 16]  # the last token is always computed
    for prompt, output in zip(prompts, tokens(outputs), strict=True):
        tiny.assert_greedy(prompt, output)


def test_a_conversation_hits_its_own_output(llm, tiny):
    (prompt,) = prompts_of([10])
    (first,) = tokens(llm.generate(ids(prompt), greedy(11)))
    turn = prompt + first + [5]
    (out,) = llm.generate(ids(turn), greedy(6))
    assert out.num_cached_tokens == 20  # 21 tokens of prompt and output, the last one's keys are never computed
    tiny.assert_greedy(turn, out.outputs[0].token_ids)


def test_requests_with_one_prompt_compute_it_once(llm, tiny):
    (prompt,) = prompts_of([40])
    before = llm.stats()
    outputs = llm.generate(ids(*[prompt] * 4), greedy(4))
    assert [out.num_cached_tokens for out in outputs] == [0, 36, 36, 36]
    after = llm.stats()
    assert after.num_cached_tokens - before.num_cached_tokens == 3 * 36
    for output in tokens(outputs):
        tiny.assert_greedy(prompt, output)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_and_resumed(llm, tiny, monkeypatch, prefix_caching):
    monkeypatch.setattr(llm.engine.scheduler.prefix_cache, "enabled", prefix_caching)
    pool = llm.engine.scheduler.pool
    held = pool.allocate(pool.num_pages - 20)  # 20 blocks for 8 requests that grow to 8 blocks each
    before = llm.stats().num_preemptions
    prompts = prompts_of([9, 10, 11, 12, 13, 14, 15, 16])
    monkeypatch.setattr(llm.engine.scheduler, "check", lambda: None)
    outputs = tokens(llm.generate(ids(*prompts), greedy(16)))
    pool.release(held)
    monkeypatch.undo()
    assert llm.stats().num_preemptions > before
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == 16
        tiny.assert_greedy(prompt, output)


def test_priority_decides_who_runs(llm):
    prompts = prompts_of([4] * 16)
    order = []
    for index, out in llm.stream(ids(*prompts), greedy(3), priority=[1] * 8 + [0] * 8):
        if out.finished:
            order.append(index)
    assert sorted(order[:8]) == list(range(8, 16))


def test_seeded_samples_do_not_depend_on_neighbours(llm):
    prompts = prompts_of([5, 9, 14, 3, 8])
    params = [SamplingParams(temperature=1.0, seed=7 + i, max_tokens=10, ignore_eos=True) for i in range(5)]
    together = tokens(llm.generate(ids(*prompts), params))
    reverse = tokens(llm.generate(ids(*prompts[::-1]), params[::-1]))
    assert together == reverse[::-1]
    assert together == [tokens(llm.generate(ids(p), s))[0] for p, s in zip(prompts, params, strict=True)]


def test_n_samples_differ_and_share_the_prompt(llm):
    (prompt,) = prompts_of([30])
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    (out,) = llm.generate(ids(prompt), params)
    assert [c.index for c in out.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in out.outputs}) == 4
    assert llm.generate(ids(prompt), params)[0].outputs == out.outputs
    (greedy_out,) = llm.generate(ids(prompt), greedy(6, n=2))
    assert greedy_out.outputs[0].token_ids == greedy_out.outputs[1].token_ids


def test_poisoned_pool(tiny):
    """Every cell of the pool is NaN before its token is written, guard blocks and padding included."""
    with make_llm(tiny.model) as llm:
        llm.generate(ids([1]), greedy(1))
        state = llm.engine.runner.executor.state
        llm.engine.scheduler.pool.forget_keys()
        for i, pool in enumerate(state.kv_pools):
            state.kv_pools[i] = jax.device_put(np.full(pool.shape, np.nan, np.float32), pool.sharding)
        prompts = prompts_of([1, 6, 30, 17, 41])
        for prompt, output in zip(prompts, tokens(llm.generate(ids(*prompts), greedy(12))), strict=True):
            tiny.assert_greedy(prompt, output)
        clean(llm)


def test_bfloat16(tiny):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), jax.tree.map(jnp.asarray, _pure(tiny.model)))
    with LLM((tiny.cfg, params), max_num_seqs=2, max_num_batched_tokens=8, block_size=4, num_blocks=32) as llm:
        assert llm.engine.runner.executor.leaves[0].dtype == jnp.bfloat16
        (prompt,) = prompts_of([9])
        (output,) = tokens(llm.generate(ids(prompt), greedy(4)))
        logits = tiny.logits(prompt)[-1]
        assert logits[output[0]] > logits.max() - 0.05 * np.abs(logits).max()


def test_a_mixed_load_many_times_over(llm, tiny):
    rng = random.Random(0)
    prompts = prompts_of([rng.randint(1, 60) for _ in range(40)], seed=9)
    params = [greedy(rng.randint(1, 30)) for _ in prompts]
    outputs = tokens(llm.generate(ids(*prompts), params))
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        assert len(output) == param.max_tokens
        tiny.assert_greedy(prompt, output)


def _pure(model):
    from flax import nnx

    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


WRONG_TYPES = """
from jaxllm import LLM
for wrong in (
    dict(max_num_seqs="8"), dict(max_model_len=8.0), dict(compilation_cache=5), dict(enable_prefix_caching="no")
):
    try:
        LLM(**wrong)
    except ValueError as error:
        print(error)
"""


def test_arguments_of_another_type():
    """As users give them, without the types that tests check."""
    done = subprocess.run([sys.executable, "-c", WRONG_TYPES], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [
        "max_num_seqs='8' must be an integer in [1, 2147483647]",
        "max_model_len=8.0 must be an integer in [1, 2147483647]",
        "compilation_cache is an int; give a folder, or whether there is one: True or False",
        "enable_prefix_caching='no' must be True or False",
    ], done.stderr
