"""Modules are served with all of their arrays, whoever wrapped them: buffers, low-rank weights, Qwix's integers."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import FunctionShape
from jaxllm.models import qwen3
from jaxllm.models.cache import Dense
from jaxllm.models.context import StepContext
from jaxllm.models.transformer import DecoderLayer
from tests.seldom import all_but
from tests.tiny import Tiny, clean, logprobs_of, make_llm, prompts_of, served_logprobs

CFG = Tiny().cfg
SHAPE = FunctionShape(vocab=96, embed=32, num_layers=2, heads=4, kv_heads=2, head_dim=16, mlp=48, max_len=96)
(PROMPT,) = prompts_of([21])


def assert_served(llm, model) -> None:
    np.testing.assert_allclose(served_logprobs(llm, PROMPT), logprobs_of(model, PROMPT), rtol=0, atol=1e-5)
    clean(llm)


class Outer(nnx.Module):
    """Without a configuration."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, tokens, ctx, caches):
        return self.inner(tokens, ctx, caches)

    def logits(self, hidden, ctx):
        return self.inner.logits(hidden, ctx)


def given(model, kind):
    return (model, {}) if kind == "module" else (Outer(model), {"shape": SHAPE})


class WithBuffers(qwen3.Model):
    """A variable that is no parameter, an array in no variable, which `jax.lax` takes, and random numbers."""

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.full((cfg.embed,), 0.3))
        self.table = jax.random.normal(rngs.params(), (cfg.vocab,))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def embed_tokens(self, tokens, ctx):
        x = super().embed_tokens(tokens, ctx)
        return self.dropout(x + jnp.broadcast_to(self.mean[...], x.shape), deterministic=True)

    def logits(self, hidden, ctx):
        logits = super().logits(hidden, ctx)
        return logits + jnp.broadcast_to(jax.lax.mul(self.table, self.table), logits.shape)


@pytest.mark.parametrize("mesh", [None, "tensor=2"])
def test_arrays_that_are_no_parameters(mesh, caplog):
    model, other = (WithBuffers(CFG, rngs=nnx.Rngs(seed)) for seed in (1, 2))
    trained = nnx.clone(model)
    nnx.update(trained, nnx.state(other, nnx.Param))
    with make_llm(model, max_model_len=64, mesh=mesh) as llm:
        assert_served(llm, model)
        llm.update_params(nnx.state(other, nnx.Param))  # the buffers stay
        assert_served(llm, trained)
        llm.update_params(nnx.state(other))
        assert_served(llm, other)
        llm.update_params(llm.params)
        assert_served(llm, other)
    said = [text for text in caplog.messages if "without logical axes" in text]
    assert [re.findall(r"each of 2 devices .* 2 parameters .*: (.*);", text) for text in said] == (
        [["mean, table"]] if mesh else []
    )


class Residual(nnx.Module):
    def __init__(self, width):
        self.first = nnx.Variable(jnp.zeros((1, width)))


class WithResidual(DecoderLayer):
    """The first layer's input, which it writes for those after it."""

    def __call__(self, x, ctx, sin_cos, cache):
        if self.is_first:
            self.residual.first.set_value(x)
        else:
            x = x + 2 * self.residual.first.get_value()
        return super().__call__(x, ctx, sin_cos, cache)


class OfResidual(qwen3.Model):
    Layer = WithResidual

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        residual = Residual(cfg.embed)
        for i, layer in enumerate(self.layers):
            layer.residual, layer.is_first = residual, i == 0


@pytest.mark.parametrize("kind", ["module", "shape", "tensor=2"])
def test_what_a_layer_writes_is_there_for_those_after_it(kind):
    inner = OfResidual(Tiny(layers=CFG.layers * 2).cfg, rngs=nnx.Rngs(1))
    shape = dataclasses.replace(SHAPE, num_layers=4)
    model, options = (Outer(inner), {"shape": shape}) if kind == "shape" else (inner, {})
    with make_llm(model, mesh="tensor=2" if "=" in kind else None, **options) as llm:
        for _ in range(2):  # nothing of a step is left for another
            assert_served(llm, inner)
        llm.update_params(nnx.state(model, nnx.Param))
        assert_served(llm, inner)


class Misnamed(qwen3.Model):
    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.table = nnx.Param(jnp.zeros((cfg.vocab, cfg.embed)), axes=("vocabs", "embedding"))


@pytest.mark.parametrize("mesh", [None, "tensor=2"])
def test_an_axis_that_is_nearly_called_as_one_that_is_split_is_told(mesh, caplog):
    make_llm(Misnamed(CFG, rngs=nnx.Rngs(1)), mesh=mesh).close()
    said = [text for text in caplog.messages if "nearly called" in text]
    assert [text.count("table ('vocabs' for 'vocab'?)") for text in said] == ([1] if mesh else [])
    assert not any("embedding" in text for text in said)


class WithDropout(qwen3.Model):
    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def embed_tokens(self, tokens, ctx):
        return self.dropout(super().embed_tokens(tokens, ctx))


@pytest.mark.parametrize("kind", ["module", "shape"])
def test_a_module_in_training_is_told(caplog, kind):
    inner = WithDropout(CFG, rngs=nnx.Rngs(1))
    model, options = given(inner, kind)
    make_llm(model, **options).close()
    (text,) = [text for text in caplog.messages if "model.eval()" in text]
    assert re.match(r"(WithDropout|Outer) is served as it trains, as (inner\.)?dropout say", text)
    caplog.clear()
    model.eval()
    with make_llm(model, **options) as llm:
        assert_served(llm, inner)
    assert not caplog.messages


QWIX_IS_BEHIND = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # it calls Flax by older names


@pytest.fixture
def qwix():
    """Its code takes JAX's defaults for granted."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield pytest.importorskip("qwix")


def wrapped(qwix, model, provider):
    tokens, rngs = jnp.ones((1, 8), jnp.int32), nnx.Rngs(3)
    caches = [Dense()] * model.cfg.num_layers
    return qwix.quantize_model(model, provider, tokens, StepContext.of(tokens), caches, rngs=rngs)


@QWIX_IS_BEHIND
@pytest.mark.parametrize("mesh", all_but(("tensor=4",), [None, "tensor=4"]))
def test_a_model_that_qwix_quantised(tiny, mesh, qwix):
    model = wrapped(qwix, tiny.model, qwix.PtqProvider([qwix.QuantizationRule(module_path=".*", weight_qtype="int8")]))
    dtypes = {name[-3]: leaf.dtype for name, leaf in nnx.to_flat_state(nnx.state(model)) if name[-1] == "qvalue"}
    assert dtypes.keys() == {"weight"}
    assert np.abs(logprobs_of(model, PROMPT) - logprobs_of(tiny.model, PROMPT)).max() > 1e-3
    with make_llm(model, mesh=mesh) as llm:
        assert_served(llm, model)
        llm.update_params(nnx.state(model, nnx.Param))
        assert_served(llm, model)


@QWIX_IS_BEHIND
@pytest.mark.parametrize("mesh", all_but(("tensor=4",), [None, "tensor=4"]))
def test_low_rank_weights_of_qwix(tiny, mesh, qwix):
    """In a loop that trains them: all parameters, and them alone."""
    model = wrapped(qwix, tiny.model, qwix.LoraProvider(module_path=".*(attn|mlp).*", rank=3, alpha=8.0))
    with make_llm(model, mesh=mesh) as llm:
        for step in range(2):
            low_rank = nnx.state(model, nnx.LoRAParam)
            nnx.update(model, jax.tree.map(lambda x: x + 0.2 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), low_rank))
            llm.update_params(nnx.state(model, [nnx.Param, nnx.LoRAParam][step]))
            assert_served(llm, model)
    assert np.abs(logprobs_of(model, PROMPT) - logprobs_of(tiny.model, PROMPT)).max() > 0.1


class LowRank(nnx.Module):
    """An adapter of a product with one input axis and one output axis."""

    def __init__(self, linear, rank, *, rngs):
        (inputs,), (outputs,) = linear.shape.inputs, linear.shape.outputs
        self.lora = nnx.LoRA(inputs[1], rank, outputs[1], rngs=rngs, b_initializer=nnx.initializers.normal(0.3))

    def __call__(self, x, y, ctx):
        return y + self.lora(x)


def test_flax_low_rank_weights(tiny):
    model = nnx.clone(tiny.model)
    for layer in model.layers:
        layer.mlp.down.adapter = LowRank(layer.mlp.down, 4, rngs=nnx.Rngs(5))
    with make_llm(model) as llm:
        assert_served(llm, model)
        nnx.update(model, jax.tree.map(lambda x: x * 1.5, nnx.state(model, nnx.Param)))
        llm.update_params(nnx.state(model, nnx.Param))
        assert_served(llm, model)
        nnx.update(model, jax.tree.map(lambda x: x * 0.5, nnx.state(model, nnx.LoRAParam)))
        llm.update_params(nnx.state(model, nnx.LoRAParam))
        assert_served(llm, model)
