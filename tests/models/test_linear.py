"""Other forms of a weight, each from outside of the package: no model file, loader or engine knows of them."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.placement import place_params
from jaxllm.engine.model_source import model_source
from jaxllm.models import qwen3
from jaxllm.models.cache import Dense
from jaxllm.models.context import StepContext
from jaxllm.models.layers import LayerSpec
from jaxllm.models.linear import Embedding, Linear, with_forms
from jaxllm.models.rope import Rope
from jaxllm.sharding.mesh import make_mesh
from tests.tiny import Tiny, clean, greedy, ids, make_llm, prompts_of, tokens

PROMPTS = prompts_of([1, 5, 16, 33])


# Integers of 4 bits, two in a byte, or 8: 32 lines.
def rounded(weight, axes, bits):
    """Symmetric integers, and a scale for each output: each number left after reducing `axes`."""
    scale = jnp.max(jnp.abs(weight), axis=axes, keepdims=True) / (2 ** (bits - 1) - 1)
    return jnp.round(weight / scale).astype(jnp.int8), scale


@dataclass(frozen=True)
class Int:
    bits: int

    def __call__(self, linear):
        return IntLinear(linear, self.bits)


class IntLinear(Linear):
    def __init__(self, linear, bits):
        num_inputs, names = len(linear.shape.inputs), tuple(linear.shape.weight_axes)
        values, scale = rounded(linear.weight[...], tuple(range(num_inputs)), bits)
        if bits == 4:
            values = (values[..., 0::2] & 15) | (values[..., 1::2] << 4)
        super().__init__(linear.shape, nnx.Param(values, axes=names))
        self.scale = nnx.Param(jnp.squeeze(scale, tuple(range(num_inputs))), axes=names[num_inputs:])
        self.bits = bits

    def product(self, x, ctx, out_dtype=None):
        values = self.weight[...]
        if self.bits == 4:
            values = jnp.stack([values << 4 >> 4, values >> 4], axis=-1).reshape(*values.shape[:-1], -1)
        y = self.shape.product(x, values.astype(x.dtype), ctx, out_dtype)
        return y * jnp.broadcast_to(self.scale[...].astype(y.dtype), y.shape)


# A table of integers that is also the head: 13 lines.
class IntEmbedding(Embedding):
    def __init__(self, table, bits):
        values, scale = rounded(table.weight[...], (1,), bits)
        super().__init__(nnx.Param(values, axes=("vocab", "embed")))
        self.scale = nnx.Param(scale[:, 0], axes=("vocab",))

    def __call__(self, ids):
        return self.weight[...][ids].astype(jnp.float32) * self.scale[...][ids][..., None]

    def logits(self, hidden, ctx):
        y = jnp.einsum("...d,vd->...v", hidden, self.weight[...].astype(hidden.dtype))
        return y * jnp.broadcast_to(self.scale[...], y.shape)


# Every token goes to the two experts that it likes best: 18 lines.
class Experts(nnx.Module):
    def __init__(self, cfg, *, rngs):
        options = {"dtype": cfg.dtype, "rngs": rngs}
        self.router = Linear.random({"embed": cfg.embed}, {"experts": 4}, **options)
        outputs = {"gate_up": {"gate": 1, "up": 1}, "mlp": cfg.mlp}
        self.gate_up = Linear.random({"embed": cfg.embed}, outputs, experts=4, **options)
        self.down = Linear.random({"mlp": cfg.mlp}, {"embed": cfg.embed}, experts=4, **options)

    def __call__(self, x, ctx):
        scores = self.router(x, ctx)
        best, _ = jax.lax.top_k(scores, 2)
        weights = jax.nn.softmax(jnp.where(scores >= best[..., -1:], scores, -jnp.inf), axis=-1)
        both = self.gate_up(x[..., None, :], ctx)  # [*t, experts, gate_up, mlp]
        each = self.down(nnx.silu(both[..., 0, :]) * both[..., 1, :], ctx)
        return jnp.einsum("...e,...ed->...d", weights, each)


# Low-rank adapters of the queries, one for each row: 15 lines.
class QueryAdapters(nnx.Module):
    def __init__(self, linear, count, rank, *, rngs):
        sizes = linear.shape.part(["q"]).bias_axes
        self.shape, self.outputs = linear.shape, tuple(sizes.values())
        embed, features = linear.weight.shape[0], int(np.prod(self.outputs))
        self.a = nnx.Param(jax.random.normal(rngs.params(), (count, embed, rank)) / embed**0.5, axes=(None,) * 3)
        self.b = nnx.Param(jax.random.normal(rngs.params(), (count, rank, features)), axes=(None,) * 3)

    def __call__(self, x, y, ctx):
        a, b = (factor[...][ctx.token_adapters] for factor in (self.a, self.b))
        delta = jnp.einsum("...d,...dr,...rf->...f", x, a, b).reshape(self.shape.take(y, "q").shape)
        return y.at[..., self.shape.slice_of("q"), :].add(delta)


class Changed(Tiny):
    """A tiny model after `change`, which says itself what it should say."""

    def __init__(self, change, **sizes):
        super().__init__(**sizes)
        change(self.model)


def mix_bits(model):
    for layer in model.layers:
        layer.attn.qkv = with_forms(layer.attn.qkv, {"q": Int(4), "k": Int(4), "v": Int(8)})


def quantise_table(model):
    model.embed = IntEmbedding(model.embed, 8)


def served(tiny, **options):
    with make_llm(tiny.model, max_num_seqs=4, max_num_batched_tokens=8, **options) as llm:
        for prompt, output in zip(PROMPTS, tokens(llm.generate(ids(*PROMPTS), greedy(8))), strict=True):
            tiny.assert_greedy(prompt, output)
        assert {pool.dtype for pool in llm.engine.runner.executor.state.kv_pools} == {jnp.dtype(jnp.float32)}
        clean(llm)


@pytest.mark.parametrize("change, sizes", [(mix_bits, {}), (quantise_table, {"tie_embeddings": True})])
def test_quantised_models_are_served(change, sizes):
    served(Changed(change, **sizes))


def test_their_heads_are_repeated_and_their_vocabulary_is_padded():
    def both(model):
        mix_bits(model)
        quantise_table(model)

    tiny = Changed(both, tie_embeddings=True, heads=8, vocab=99)
    served(tiny, mesh="tensor=4")


def test_experts_are_served_beside_a_dense_layer_and_shared_among_devices():
    rope = Rope(theta=1e4)
    tiny = Tiny(layers=(LayerSpec(rope=rope), LayerSpec(rope=rope, feed_forward=Experts)))
    assert not hasattr(tiny.model.layers[0].mlp, "router") and hasattr(tiny.model.layers[1].mlp, "router")
    served(tiny, mesh="expert=2")


def products(fn, *arguments):
    return str(jax.make_jaxpr(fn)(*arguments)).count("dot_general")


def test_members_of_one_form_are_one_product_and_results_stay_in_order():
    shape = {"kv_heads": 2, "qkv": {"q": 3, "k": 1, "v": 1}, "head_dim": 4}
    linear = Linear.random({"embed": 64}, shape, bias=True, dtype=jnp.float32, rngs=nnx.Rngs(params=0))
    linear.bias.set_value(jax.random.normal(jax.random.key(1), linear.bias.shape))
    x = jax.random.normal(jax.random.key(0), (5, 64))
    ctx = StepContext.of(jnp.zeros(5, jnp.int32))
    want = linear(x, ctx)
    assert products(lambda x: linear(x, ctx), x) == 1
    for forms, count in ((Int(4), Int(4), Int(8)), 2), ((Int(4), Int(8), Int(4)), 2), ((Int(8),) * 3, 1):
        mixed = with_forms(linear, dict(zip("qkv", forms, strict=True)))
        assert products(lambda x, mixed=mixed: mixed(x, ctx), x) == count
        got = mixed(x, ctx)
        for name, form in zip("qkv", forms, strict=True):
            error = jnp.abs(linear.shape.take(got, name) - linear.shape.take(want, name)).max()
            assert error < (0.05 if form.bits == 8 else 0.8) and (form.bits == 8 or error > 0.05)


def test_rows_of_one_batch_have_adapters_of_their_own():
    model, plain = Tiny().model, Tiny().model
    for layer in model.layers:
        layer.attn.qkv.adapter = QueryAdapters(layer.attn.qkv, 3, 2, rngs=nnx.Rngs(params=5))
    batch = jnp.asarray(prompts_of([12] * 4))

    @nnx.jit
    def hidden(model, batch, adapters=None):
        return model(batch, StepContext.of(batch, adapters=adapters), [Dense()] * 2)[0]

    adapters = [2, 0, 1, 2]
    together = hidden(model, batch, adapters=jnp.asarray(adapters))
    for row, adapter in enumerate(adapters):
        alone = nnx.clone(plain)
        for layer, adapted in zip(alone.layers, model.layers, strict=True):
            qkv, factors = layer.attn.qkv, adapted.attn.qkv.adapter
            delta = (factors.a[...][adapter] @ factors.b[...][adapter]).reshape(-1, *factors.outputs)
            qkv.weight.set_value(qkv.weight[...].at[:, :, qkv.shape.slice_of("q")].add(delta))
        np.testing.assert_allclose(together[row], hidden(alone, batch[row : row + 1])[0], atol=2e-4)
        assert np.abs(together[row] - hidden(plain, batch[row : row + 1])[0]).max() > 0.1


def test_adapters_go_with_their_product_onto_a_mesh():
    mesh, model = make_mesh("tensor=4"), Tiny(heads=8).model
    for layer in model.layers:
        layer.attn.qkv.adapter = QueryAdapters(layer.attn.qkv, 3, 2, rngs=nnx.Rngs(params=5))
    abstract = nnx.eval_shape(lambda: model)
    assert expand_model(abstract, mesh)
    graph, shapes = nnx.split(abstract)
    spread = nnx.merge(graph, place_params(nnx.state(model), shapes, mesh))
    batch = jnp.asarray(prompts_of([12] * 3))
    ctx = StepContext.of(batch, adapters=jnp.arange(3))
    run = nnx.jit(lambda model: model(batch, ctx, [Dense()] * 2)[0])
    want, got = (np.asarray(run(each)) for each in (model, spread))
    np.testing.assert_allclose(got, want, atol=2e-4)


def test_axes_of_one_name_are_refused():
    with pytest.raises(ValueError, match="must have different names"):
        Linear.random({"embed": 4}, {"embed": 4}, dtype=jnp.float32, rngs=nnx.Rngs(params=0))


def test_the_dtype_of_a_configuration_is_that_of_its_activations():
    cfg = dataclasses.replace(Tiny().cfg, dtype=jnp.bfloat16)
    model = qwen3.Model(cfg, rngs=nnx.Rngs(params=0))
    params = jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(model))
    source = model_source((cfg, params), "auto", "cpu", None)
    assert source.cfg.dtype == source.model.cfg.dtype == jnp.float32
    table = Changed(quantise_table, tie_embeddings=True).model
    leaves = [leaf.dtype for leaf in jax.tree.leaves(nnx.state(table))]
    assert jnp.int8 in leaves[:2]  # one of the first says nothing about it
    assert model_source(table, "auto", "cpu", None).cfg.dtype == jnp.float32
