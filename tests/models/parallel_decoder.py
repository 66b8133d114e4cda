"""A decoder from outside of the package: attention and MLP side by side on one norm, which is its own."""

import sys
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxllm.models import registry, transformer
from jaxllm.models.layers import Attention, LayerSpec, PlainMLP
from jaxllm.models.weights import Weight, attention


class Config(transformer.Config):
    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        cfg = super().from_hf(hf, **fields)
        spec = LayerSpec(rope=cfg.layers[0].rope, feed_forward=PlainMLP)
        return cls(**(vars(cfg) | {"layers": (spec,) * cfg.num_layers}))


class MeanAbsNorm(nnx.Module):
    """Divides by the mean absolute value of the features."""

    def __init__(self, dim: int, dtype: Any):
        self.scale = nnx.Param(jnp.ones(dim, dtype), axes=(None,))

    def __call__(self, x):
        x32 = x.astype(jnp.float32)
        y = x32 / (jnp.mean(jnp.abs(x32), axis=-1, keepdims=True) + 1e-6)
        return (y * jnp.broadcast_to(self.scale[...].astype(jnp.float32), y.shape)).astype(x.dtype)


class Layer(nnx.Module):
    def __init__(self, cfg: Config, spec: LayerSpec, *, rngs: nnx.Rngs):
        self.norm = MeanAbsNorm(cfg.embed, cfg.dtype)
        self.attn = Attention(cfg, spec, rngs=rngs)
        self.mlp = spec.feed_forward(cfg, rngs=rngs)

    def __call__(self, x, ctx, sin_cos, cache):
        h = self.norm(x)
        attended, cache = self.attn(h, ctx, sin_cos, cache)
        return x + attended + self.mlp(h, ctx), cache


class Model(transformer.Decoder):
    Config, Layer = Config, Layer


WEIGHTS = {
    "wte.weight": Weight("embed.weight", "v d -> v d"),
    **attention("h.{i}.attn."),
    "h.{i}.norm.weight": Weight("layers.{i}.norm.scale", "d -> d"),
    "h.{i}.fc_in.weight": Weight("layers.{i}.mlp.up.weight", "f d -> d f"),
    "h.{i}.fc_out.weight": Weight("layers.{i}.mlp.down.weight", "d f -> f d"),
    "norm.weight": Weight("norm.scale", "d -> d"),
    "lm_head.weight": Weight("lm_head.weight", "v d -> d v"),
}
registry.register("ParallelForCausalLM", sys.modules[__name__])
