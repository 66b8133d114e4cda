"""A module updates an engine if it is the model that is served: of its classes and attributes, trained or not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.models import qwen3
from jaxllm.models.layers import LayerSpec, Rope
from jaxllm.models.transformer import DecoderLayer
from tests.engine.test_any_module import CFG, PROMPT, WithDropout, given
from tests.tiny import Tiny, logprobs_of, make_llm, served_logprobs


class Parallel(DecoderLayer):
    """Attention and feed-forward of the same input."""

    def __call__(self, x, ctx, sin_cos, cache):
        h = self.attn_norm(x, ctx)
        out, cache = self.attn(h, ctx, sin_cos, cache)
        return x + out + self.mlp(h, ctx), cache


class OfParallel(qwen3.Model):
    Layer = Parallel


def scaled(model):
    model.layers[1].attn.scale *= 3


def another_layer(model):
    model.layers[1] = Parallel(CFG, CFG.layers[1], rngs=nnx.Rngs(0))


def other_eps(model):
    model.cfg = dataclasses.replace(CFG, layers=(LayerSpec(rope=Rope(theta=1e5)),) * 2)


def another_function(model):
    model.layers[0].mlp.activation = lambda x: x


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (scaled, r"layers.1.attn.scale is 0.75 in the module given, and 0.25 in the one served"),
        (another_layer, r"layers.1 is tests.*\.Parallel in the module given, and jaxllm.*\.DecoderLayer"),
        (other_eps, r"cfg.layers.0.rope.theta is 100000.0 in"),
        (another_function, r"layers.0.mlp.activation is another_function.<locals>.<lambda> in .*, and 'silu' in"),
    ],
)
@pytest.mark.parametrize("kind", ["module", "shape"])
def test_another_model_is_no_update(change, says, kind):
    """Also where it is the same object that has changed."""
    inner = Tiny().model
    model, options = given(inner, kind)
    with make_llm(model, **options) as llm:
        change(inner)
        with pytest.raises(ValueError, match=rf"another model.*{says}.*nnx.state\(module\) where"):
            llm.update_params(model)
        llm.update_params(nnx.state(model))
        with pytest.raises(ValueError, match="(the module|inner) is tests.*OfParallel in the module given, and"):
            llm.update_params(given(OfParallel(CFG, rngs=nnx.Rngs(0)), kind)[0])


class Trained(WithDropout):
    """With functions that each instance makes anew."""

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.gain = nnx.Linear(cfg.embed, cfg.embed, kernel_init=nnx.initializers.normal(0.02 + cfg.eps), rngs=rngs)
        factor = 2.0
        self.act = jax.jit(lambda x: x * factor)

    def embed_tokens(self, tokens, ctx):
        return self.act(self.gain(super().embed_tokens(tokens, ctx)))


@pytest.mark.parametrize("kind", ["module", "shape"])
def test_a_module_in_another_state_is_an_update(kind):
    """In training, in another dtype, with another rate of dropout and other random numbers; and what is served."""
    model, options = given(Trained(CFG, rngs=nnx.Rngs(1)), kind)
    model.eval()
    with make_llm(model, **options) as llm:
        inner = Trained(CFG, rngs=nnx.Rngs(2, dropout=3))
        other, _ = given(inner, kind)
        inner.cfg, inner.dropout.rate = dataclasses.replace(CFG, dtype=jnp.bfloat16, max_len=48), 0.1
        llm.update_params(other)
        other.eval()
        np.testing.assert_allclose(served_logprobs(llm, PROMPT), logprobs_of(inner, PROMPT), rtol=0, atol=1e-5)
        llm.update_params(llm.module)
        np.testing.assert_allclose(served_logprobs(llm, PROMPT), logprobs_of(inner, PROMPT), rtol=0, atol=1e-5)
        llm.update_params(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def test_a_class_that_is_defined_again_is_the_same_where_its_lines_are(tiny):
    def make(power):
        class Mine(qwen3.Model):
            def embed_tokens(self, tokens, ctx):
                return super().embed_tokens(tokens, ctx) ** power

        return Mine(CFG, rngs=nnx.Rngs(0))

    with make_llm(make(2)) as llm:
        llm.update_params(make(2))
        with pytest.raises(ValueError, match="Mine in the one served, which is defined again"):
            llm.update_params(make(3))
