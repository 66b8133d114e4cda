"""Toy layers: a recurrence, and attention twice, over all tokens and over the last ones."""

from functools import partial

import jax.numpy as jnp
from flax import nnx

from jaxllm.models.cache_spec import CacheSpec
from jaxllm.models.layers import Attention, LayerSpec, Rope
from jaxllm.models.linear import Linear


class Recurrence(nnx.Module):
    """A gated sum of all tokens so far, for each of some features: `h = decay * h + (1 - decay) * x`."""

    def __init__(self, cfg, spec: LayerSpec, *, size: int = 24, rngs: nnx.Rngs):
        options = {"dtype": cfg.dtype, "rngs": rngs}
        self.into = Linear.random({"embed": cfg.embed}, {"inputs": {"x": 1, "gate": 1}, "mlp": size}, **options)
        self.out = Linear.random({"mlp": size}, {"embed": cfg.embed}, **options)
        self.cache_specs = (CacheSpec.state((size,), jnp.float32, ("mlp",)),)

    def __call__(self, x, ctx, sin_cos, cache):
        both = self.into(x, ctx).astype(jnp.float32)

        def step(h, given):
            value, gate = given
            decay = nnx.sigmoid(gate + 2)
            h = decay * h + (1 - decay) * value
            return h, h

        start = jnp.zeros(self.cache_specs[0].shape, jnp.float32)
        h, cache = cache.scan(step, start, (both[..., 0, :], both[..., 1, :]))
        return self.out(h.astype(x.dtype), ctx), cache


class TwoSights(nnx.Module):
    """Attends to all tokens and, with other weights, to the last six."""

    def __init__(self, cfg, spec: LayerSpec, *, rngs: nnx.Rngs):
        self.far = Attention(cfg, spec, rngs=rngs)
        self.near = Attention(cfg, LayerSpec(window=6, rope=spec.rope), rngs=rngs)
        self.cache_specs = self.far.cache_specs + self.near.cache_specs

    def __call__(self, x, ctx, sin_cos, caches):
        far, caches[0] = self.far(x, ctx, sin_cos, caches[0])
        near, caches[1] = self.near(x, ctx, sin_cos, caches[1])
        return far + near, caches


ROPE = Rope(theta=1e4)
LARGE = LayerSpec(attention=partial(Recurrence, size=600))  # of several pages
FULL, RECURRENT = LayerSpec(rope=ROPE), LayerSpec(attention=Recurrence)
TWICE = LayerSpec(rope=ROPE, attention=TwoSights)


def window(size: int) -> LayerSpec:
    return LayerSpec(window=size, rope=ROPE)
