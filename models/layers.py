"""Layers. Weights carry logical axis names; activations are `[*t, ...]`, flat over tokens in the engine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.cache_spec import CacheSpec
from jaxllm.models.context import StepContext
from jaxllm.models.linear import Linear
from jaxllm.models.rope import Rope as Rope
from jaxllm.models.rope import rotate

ACTIVATIONS = {  # by their names in `config.json`
    "silu": nnx.silu,
    "swish": nnx.silu,
    "gelu": partial(nnx.gelu, approximate=False),
    "relu": nnx.relu,
    "gelu_pytorch_tanh": partial(nnx.gelu, approximate=True),
    "gelu_new": partial(nnx.gelu, approximate=True),
}


class RMSNorm(nnx.Module):
    """Root mean square normalisation in float32 (arXiv 1910.07467).

    With `unit_offset` the weight is stored as its difference from one, and applied before the result is rounded.
    """

    def __init__(self, dim: int, eps: float, *, dtype: Any, unit_offset: bool = False):
        self.scale = nnx.Param(jnp.zeros(dim, dtype) if unit_offset else jnp.ones(dim, dtype), axes=(None,))
        self.eps, self.unit_offset = eps, unit_offset

    def __call__(self, x: Float[Array, "*t d"]) -> Float[Array, "*t d"]:
        x32 = x.astype(jnp.float32)
        var = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        y = x32 * jax.lax.rsqrt(var + self.eps)
        if self.unit_offset:
            return (y * jnp.broadcast_to(1 + self.scale[...].astype(jnp.float32), y.shape)).astype(x.dtype)
        return y.astype(x.dtype) * jnp.broadcast_to(self.scale[...].astype(x.dtype), y.shape)


class LayerNorm(nnx.Module):
    """Layer normalisation in float32 (arXiv 1607.06450); without `affine` it has no parameters."""

    def __init__(self, dim: int, eps: float, *, dtype: Any, affine: bool = True, bias: bool = True):
        self.scale = nnx.Param(jnp.ones(dim, dtype), axes=(None,)) if affine else None
        self.bias = nnx.Param(jnp.zeros(dim, dtype), axes=(None,)) if affine and bias else None
        self.eps = eps

    def __call__(self, x: Float[Array, "*t d"]) -> Float[Array, "*t d"]:
        x32 = x.astype(jnp.float32)
        y = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        if self.scale is not None:
            y = y * jnp.broadcast_to(self.scale[...].astype(jnp.float32), y.shape)
        if self.bias is not None:
            y = y + jnp.broadcast_to(self.bias[...].astype(jnp.float32), y.shape)
        return y.astype(x.dtype)


NORMS = {
    "rms": RMSNorm,
    "rms_unit_offset": partial(RMSNorm, unit_offset=True),
    "layer": LayerNorm,
    "layer_no_bias": partial(LayerNorm, bias=False),
    "layer_plain": partial(LayerNorm, affine=False),
}


def make_norm(cfg: Any, dim: int) -> nnx.Module:
    """The normalisation over `dim` features that `cfg.norm` names."""
    return NORMS[cfg.norm](dim, cfg.eps, dtype=cfg.dtype)


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245) over a cache of any kind.

    `qkv[embed, kv_heads, group + 2, head_dim]` holds, for each KV head, its group of query heads, then the key and
    the value: one matrix product, and one axis to shard.
    """

    def __init__(self, cfg: Any, spec: "LayerSpec", *, rngs: nnx.Rngs):
        d, k, g, h = cfg.embed, cfg.kv_heads, cfg.heads // cfg.kv_heads, cfg.head_dim
        members, heads = {"q": g, "k": 1, "v": 1}, {"kv_heads": k, "group": g, "head_dim": h}
        options = {"dtype": cfg.dtype, "rngs": rngs}
        outputs = {"kv_heads": k, "qkv": members, "head_dim": h}
        self.qkv = Linear.random({"embed": d}, outputs, bias=cfg.qkv_bias, **options)
        self.o = Linear.random(heads, {"embed": d}, bias=cfg.o_bias, **options)
        self.q_norm = make_norm(cfg, h) if cfg.qk_norm else None
        self.k_norm = make_norm(cfg, h) if cfg.qk_norm else None
        self.scale = h**-0.5 if cfg.query_scale is None else cfg.query_scale
        self.window, self.soft_cap = spec.window, cfg.attn_soft_cap
        self.causal = cfg.causal
        # Where tokens see later ones, a text is in one step, and nothing of it is left behind a window.
        self.cache_specs = (CacheSpec.keys_and_values(k, h, window=spec.window if cfg.causal else None),)

    def __call__(self, x: Float[Array, "*t embed"], ctx: StepContext, sin_cos: tuple[Array, Array] | None, cache):
        qkv = self.qkv(x, ctx)
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        group_shape = q.shape
        q = q.reshape(*q.shape[:-3], -1, q.shape[-1])  # [*t, heads, head_dim]
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if sin_cos is not None:
            q, k = rotate(q, *sin_cos), rotate(k, *sin_cos)
        mask = {} if self.causal else {"causal": False}  # caches for causal models alone need not know of it
        out, cache = cache.attend(q, k, v, scale=self.scale, sliding_window=self.window, soft_cap=self.soft_cap, **mask)
        return self.o(out.reshape(group_shape), ctx), cache


class MLP(nnx.Module):
    """Gated feed-forward (arXiv 2002.05202), gate and up fused."""

    def __init__(self, cfg: Any, *, rngs: nnx.Rngs):
        options = {"bias": cfg.mlp_bias, "dtype": cfg.dtype, "rngs": rngs}
        outputs = {"gate_up": {"gate": 1, "up": 1}, "mlp": cfg.mlp}
        self.gate_up = Linear.random({"embed": cfg.embed}, outputs, **options)
        self.down = Linear.random({"mlp": cfg.mlp}, {"embed": cfg.embed}, **options)
        self.activation = cfg.activation

    def __call__(self, x: Float[Array, "*t embed"], ctx: StepContext) -> Float[Array, "*t embed"]:
        both = self.gate_up(x, ctx)
        return self.down(ACTIVATIONS[self.activation](both[..., 0, :]) * both[..., 1, :], ctx)


class PlainMLP(nnx.Module):
    """Feed-forward without a gate."""

    def __init__(self, cfg: Any, *, rngs: nnx.Rngs):
        options = {"bias": cfg.mlp_bias, "dtype": cfg.dtype, "rngs": rngs}
        self.up = Linear.random({"embed": cfg.embed}, {"mlp": cfg.mlp}, **options)
        self.down = Linear.random({"mlp": cfg.mlp}, {"embed": cfg.embed}, **options)
        self.activation = cfg.activation

    def __call__(self, x: Float[Array, "*t embed"], ctx: StepContext) -> Float[Array, "*t embed"]:
        return self.down(ACTIVATIONS[self.activation](self.up(x, ctx)), ctx)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What may differ from layer to layer. `attention` and `feed_forward` are called with the model's configuration
    (attention with this specification too) and `rngs`."""

    window: int | None = field(
        default=None,
        metadata={"help": "a token attends to those fewer positions away; None: all. Causal: of earlier ones"},
    )
    rope: Rope | None = None
    attention: Callable[..., nnx.Module] = Attention
    feed_forward: Callable[..., nnx.Module] = MLP
