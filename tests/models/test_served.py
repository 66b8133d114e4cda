"""A trainer's log-probabilities by the engine's kernels: the same bits, and XLA's gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import LLM, SamplingParams
from jaxllm.models import gpt_oss, token_logprobs
from jaxllm.models.cache import Dense
from jaxllm.pallas_kernels import native
from tests.models.test_packed import HF as SMALL
from tests.test_batch_invariant import MODELS, PROMPTS, SIZES

pytestmark = pytest.mark.skipif(not native.is_built(), reason="the C++ kernels are not built")
DRAWN = SamplingParams(n=2, max_tokens=10, ignore_eos=True, logprobs=0, seed=5)


def rows_of(made):
    """Prompts and samples, each behind the other, and where the samples are: [rows, len - 1]."""
    rows = np.zeros((made.lengths.size, made.prompts.shape[1] + made.tokens.shape[2]), np.int32)
    is_sample = np.zeros(rows.shape, bool)
    n = made.tokens.shape[1]
    for i, row in enumerate(rows):
        prompt, tokens = made.prompts[i // n, : made.prompt_lengths[i // n]], made.tokens[i // n, i % n]
        row[: len(prompt) + len(tokens)] = [*prompt, *tokens]
        is_sample[i, len(prompt) : len(prompt) + len(tokens)] = True
    return rows, is_sample[:, 1:]


@nnx.jit(static_argnames="arithmetic")
def _loss_and_gradient(model, rows, is_sample, arithmetic):
    def loss(model):
        found = token_logprobs(model, rows, arithmetic=arithmetic)
        return jnp.where(is_sample, found, 0.0).mean(), found

    return nnx.value_and_grad(loss, has_aux=True)(model)


def loss_and_gradient(*arguments):
    with jax.numpy_dtype_promotion("standard"):  # which JAX's own attention needs in bfloat16
        return _loss_and_gradient(*arguments)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name not in ("float32", "bfloat16") else []) for name in MODELS],
)
def test_they_are_the_engines_own_to_the_bit(name):
    model = MODELS[name]()
    with LLM(model, **SIZES) as llm:
        made = llm.rollout(PROMPTS, DRAWN)
        rows, is_sample = rows_of(made)
        (_, found), gradient = loss_and_gradient(model, rows, is_sample, llm.arithmetic)
        np.testing.assert_array_equal(np.asarray(found)[is_sample], made.logprobs.ravel())
    (_, by_xla), wanted = loss_and_gradient(model, rows, is_sample, None)
    tolerance = 6e-2 if name == "bfloat16" else 2e-5
    np.testing.assert_allclose(found, by_xla, atol=tolerance)
    for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        np.testing.assert_allclose(got, want, atol=tolerance * np.abs(want).max())


def test_the_trainers_module_stays_as_it_is():
    model = MODELS["float32"]()
    with LLM(model, **SIZES) as llm:
        before = nnx.graphdef(model)
        token_logprobs(model, jnp.zeros((1, 4), jnp.int32), arithmetic=llm.arithmetic)
        assert nnx.graphdef(model) == before


def test_of_sinks_and_experts_by_xla():
    """Without an engine's arithmetic it takes any model."""
    model = gpt_oss.Model(
        gpt_oss.Config.from_hf(SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}), rngs=nnx.Rngs(1)
    )
    found = nnx.jit(token_logprobs)(model, jnp.arange(12, dtype=jnp.int32).reshape(2, 6))
    assert found.shape == (2, 5) and np.isfinite(found).all()


def test_what_is_refused(llm, tiny):
    with pytest.raises(ValueError, match="batch_invariant=True"):
        _ = llm.arithmetic
    with pytest.raises(ValueError, match=r"shape \(4,\); rows of texts are"):
        token_logprobs(tiny.model, jnp.zeros(4, jnp.int32))
    with pytest.raises(ValueError, match="arithmetic is of LLM; give an LLM's `arithmetic`"):
        token_logprobs(tiny.model, jnp.zeros((1, 4), jnp.int32), arithmetic=llm)


def test_rows_in_blocks_are_whole_texts():
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="segment_ids.*leave one or the other out"):
        Dense(block_size=4, segment_ids=jnp.ones((1, 4), jnp.int32)).attend(x, x, x, scale=1.0)


@pytest.mark.parametrize("window, soft_cap, sinks", [(None, None, False), (5, 20.0, False), (None, None, True)])
def test_attention_in_blocks(window, soft_cap, sinks):
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (3, 19, 4, 8))
    k, v = (jax.random.normal(key, (3, 19, 2, 8)) for key in keys[1:3])
    options = dict(scale=0.3, sliding_window=window, soft_cap=soft_cap)
    if sinks:
        options["sinks"] = jax.random.normal(keys[3], (4,))

    def total(dense, *qkv):
        out = dense.attend(*qkv, **options)[0]
        return (out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)).sum(), out

    found, wanted = (
        jax.jit(jax.value_and_grad(partial(total, dense), argnums=(0, 1, 2), has_aux=True))(q, k, v)
        for dense in (Dense(block_size=8), Dense())
    )
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, atol=3e-5)
