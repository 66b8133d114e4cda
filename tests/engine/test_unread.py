"""The last layer leaves out hidden states that nobody reads, where padding is free."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import SamplingParams
from jaxllm.engine import sizing
from jaxllm.models import gemma2, llama
from jaxllm.models.context import LastTokens, StepContext
from jaxllm.models.layers import LayerSpec
from jaxllm.pallas_kernels import native
from tests.tiny import ids, make_llm, prompts_of

SIZES = {"vocab": 96, "embed": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 32, "max_len": 64}
ROWS = jnp.asarray([0, 0, 0, 1, 2, 2, 2], jnp.int32)  # of tokens; the last is padding


def context(**fields):
    read = LastTokens(index=jnp.asarray([2, 3, 5], jnp.int32), num_rows=jnp.int32(3), **fields)
    return StepContext(ROWS, ROWS, None, ROWS < 9, jnp.int32(6), read)


@pytest.mark.parametrize("every", [True, False])
def test_a_context_finishes_what_is_read(every):
    x = jnp.arange(14, dtype=jnp.float32).reshape(7, 2)
    rows = []

    def rest(x, ctx):
        assert ctx.read is None and len(x) == len(ctx.rows) == len(ctx.positions) == len(ctx.is_token)
        rows.append(len(x))
        return x + jnp.broadcast_to(ctx.rows[:, None].astype(x.dtype), x.shape)

    got = np.asarray(context(all=jnp.asarray(every)).finish(rest, x))
    want = np.asarray(x) + np.asarray(ROWS)[:, None]
    assert sorted(rows) == [3, 7]  # both are compiled, and one runs
    np.testing.assert_array_equal(got if every else got[[2, 3, 5]], want if every else want[[2, 3, 5]])
    assert every or np.array_equal(got[:3], want[[2, 2, 2]])


def answers(llm):
    """Of prompts of which some want to know all hidden states, in chunks and beside others' decodes."""
    every = [None, 1, None, None, 0]
    params = [
        SamplingParams(max_tokens=6, temperature=0.0, logprobs=1, prompt_logprobs=every[i % 5], ignore_eos=True)
        for i in range(10)
    ]
    outputs = llm.generate(ids(*prompts_of([40, 3, 25, 30, 9, 1, 24, 50, 2, 33])), params)
    scores = llm.score([([5, 6, 7], [[8, 9], [3] * 20])])
    logprobs = [
        [of[token].logprob for of, token in zip(o.logprobs, o.token_ids, strict=True)]
        for out in outputs
        for o in out.outputs
    ]
    prompts = [
        [of[token].logprob for of, token in zip(out.prompt_logprobs[1:], out.prompt_token_ids[1:], strict=True)]
        for out in outputs
        if out.prompt_logprobs
    ]
    known = [choice.logprob for of in scores for choice in of]
    return [out.outputs[0].token_ids for out in outputs], np.concatenate([*logprobs, *prompts, known])


@pytest.mark.skipif(not native.is_built(), reason="not built: python -m jaxllm.pallas_kernels.native.build")
@pytest.mark.parametrize("module", [llama, gemma2], ids=lambda module: module.__name__.rpartition(".")[2])
def test_answers_are_those_of_whole_steps(module, monkeypatch):
    model = module.Model(module.Config(layers=(LayerSpec(), LayerSpec()), **SIZES), rngs=nnx.Rngs(0))
    with make_llm(model, max_num_seqs=4) as llm:
        assert "conditional" in llm.engine.runner.compile_plan["step", 24].as_text()
        chosen, logprobs = answers(llm)
    monkeypatch.setattr(sizing, "has_free_padding", lambda shape, mesh: False)
    with make_llm(model, max_num_seqs=4) as whole:
        assert "conditional" not in whole.engine.runner.compile_plan["step", 24].as_text()
        expected, close = answers(whole)
    assert chosen == expected
    np.testing.assert_allclose(logprobs, close, atol=2e-5)
