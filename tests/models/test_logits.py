"""Logits are float32 sums: what the head's product makes of bfloat16 is never rounded to bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.engine.device.model_shape import model_shape
from jaxllm.models import gemma2, llama
from jaxllm.models.context import StepContext
from jaxllm.models.layers import LayerSpec, Rope
from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from jaxllm.pallas_kernels.matmul import einsum
from jaxllm.sharding.mesh import make_mesh

LAYERS = (LayerSpec(rope=Rope(theta=1e4)),)
SIZES = dict(vocab=1024, embed=64, heads=4, kv_heads=2, head_dim=16, mlp=96, max_len=64, layers=LAYERS)
BF16, CTX = jnp.bfloat16, StepContext.of(jnp.zeros(1, jnp.int32))
MODELS = {
    "untied": llama.Model(llama.Config(**SIZES, dtype=BF16), rngs=nnx.Rngs(params=0)),
    "tied": llama.Model(llama.Config(**SIZES, dtype=BF16, tie_embeddings=True), rngs=nnx.Rngs(params=0)),
    "capped": gemma2.Model(gemma2.Config(**SIZES, dtype=BF16, logit_soft_cap=30.0), rngs=nnx.Rngs(params=0)),
}


def exact_logits(model, hidden) -> np.ndarray:
    """In float64, of the same bfloat16 numbers."""
    head = model.embed.weight[...].T if model.cfg.tie_embeddings else model.lm_head.weight[...]
    logits = np.asarray(hidden).astype(np.float64) @ np.asarray(head).astype(np.float64)
    cap = getattr(model.cfg, "logit_soft_cap", None)
    return logits if cap is None else cap * np.tanh(logits / cap)


@pytest.mark.parametrize("rows", [4, 300])  # the native product's, if it is built, and XLA's
@pytest.mark.parametrize("kind", MODELS)
def test_logits_of_a_bfloat16_model_are_not_rounded(kind, rows):
    model = MODELS[kind]
    hidden = (jax.random.normal(jax.random.key(1), (rows, model.cfg.embed)) * 4).astype(BF16)
    shape = model_shape(model.cfg, *nnx.split(model), make_mesh(None))
    served = shape.model(jax.tree.leaves(nnx.state(model)))
    for each, placement in (model, UNPLACED), (served, Placement.default()):
        ctx = StepContext.of(jnp.zeros(rows, jnp.int32), placement=placement)
        logits = jax.jit(lambda h, each=each, ctx=ctx: each.logits(h, ctx))(hidden)
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(logits), exact_logits(model, hidden), rtol=1e-5, atol=1e-4)
        assert (np.asarray(logits) != np.asarray(logits.astype(BF16).astype(jnp.float32))).mean() > 0.9


def test_gradients_go_through_the_head_in_bfloat16():
    graph, params = nnx.split(MODELS["untied"])
    hidden = jnp.ones((3, 64), BF16)
    grads = jax.grad(lambda params: nnx.merge(graph, params).logits(hidden, CTX).sum())(params)
    assert grads["lm_head"]["weight"][...].dtype == BF16
    np.testing.assert_array_equal(np.asarray(grads["lm_head"]["weight"][...].astype(jnp.float32)), 3.0)


def test_a_float32_model_has_the_logits_it_had():
    model = MODELS["tied"]
    graph, params = nnx.split(model)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    hidden = jax.random.normal(jax.random.key(1), (40, 64))
    new = nnx.merge(graph, params).logits(hidden, CTX)
    old = jnp.einsum("...C,vC->...v", hidden, params["embed"]["weight"][...])
    assert (np.asarray(new) == np.asarray(old)).all()


@pytest.mark.skipif(not native.is_built(), reason="not built: python -m jaxllm.pallas_kernels.native.build")
@pytest.mark.parametrize("transposed", [False, True])
def test_the_native_product_returns_its_sums(transposed):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(5, 64)), BF16)
    weight = jnp.asarray(rng.normal(size=(96, 64) if transposed else (64, 96)), BF16)
    equation = "...d,vd->...v" if transposed else "...d,dv->...v"
    got = einsum(equation, x, weight, out_dtype=jnp.float32, implementation="native")
    want = np.asarray(x).astype(np.float64) @ np.asarray(weight.T if transposed else weight).astype(np.float64)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-4)
    rounded = einsum(equation, x, weight, implementation="native")
    assert rounded.dtype == BF16 and (np.asarray(rounded) == np.asarray(got.astype(BF16))).all()
