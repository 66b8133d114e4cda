"""Layers. Weights carry logical axis names; activations are `[*t, ...]`, flat over tokens in the engine."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.rope import Rope as Rope
from jaxllm.models.rope import rotate
from jaxllm.pallas_kernels import matmul
from jaxllm.pallas_kernels.dispatch import UNPLACED

ACTIVATIONS = {  # by their names in `config.json`
    "silu": nnx.silu,
    "swish": nnx.silu,
    "gelu": partial(nnx.gelu, approximate=False),
    "relu": nnx.relu,
    "gelu_pytorch_tanh": partial(nnx.gelu, approximate=True),
    "gelu_new": partial(nnx.gelu, approximate=True),
}


def param(rngs: nnx.Rngs, dtype: Any, *, fan_in: int, **dims: int) -> nnx.Param:
    """A weight whose keyword names are its logical axes: `param(rngs, dtype, fan_in=D, embed=D, mlp=F)`."""
    shape = tuple(dims.values())
    value = jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(fan_in)
    return nnx.Param(value.astype(dtype), axes=tuple(dims))


def bias(dtype: Any, **dims: int) -> nnx.Param:
    """A bias, initially zero, whose keyword names are its logical axes: the output axes of its product."""
    return nnx.Param(jnp.zeros(tuple(dims.values()), dtype), axes=tuple(dims))


def einsum(
    equation: str, x: Array, weight: nnx.Param, bias: nnx.Param | None = None, *, out_dtype: Any = None
) -> Array:
    """Every product with a weight goes through here, so that quantised or adapted weights can be leaf types.

    The result has the dtype of `x`; with `out_dtype` float32 it is not rounded from the float32 sums.
    """
    placement = weight.get_metadata("placement", UNPLACED)
    y = matmul.einsum(equation, x, weight[...], out_dtype=out_dtype, placement=placement)
    return y if bias is None else y + jnp.broadcast_to(bias[...].astype(y.dtype), y.shape)


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

    def __init__(self, dim: int, eps: float, *, dtype: Any, affine: bool = True):
        self.scale = nnx.Param(jnp.ones(dim, dtype), axes=(None,)) if affine else None
        self.bias = nnx.Param(jnp.zeros(dim, dtype), axes=(None,)) if affine else None
        self.eps = eps

    def __call__(self, x: Float[Array, "*t d"]) -> Float[Array, "*t d"]:
        x32 = x.astype(jnp.float32)
        y = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        if self.scale is not None:
            scale, bias = (jnp.broadcast_to(p[...].astype(jnp.float32), y.shape) for p in (self.scale, self.bias))
            y = y * scale + bias
        return y.astype(x.dtype)


NORMS = {
    "rms": RMSNorm,
    "rms_unit_offset": partial(RMSNorm, unit_offset=True),
    "layer": LayerNorm,
    "layer_plain": partial(LayerNorm, affine=False),
}


def make_norm(cfg: Any, dim: int) -> nnx.Module:
    """The normalisation over `dim` features that `cfg.norm` names."""
    return NORMS[cfg.norm](dim, cfg.eps, dtype=cfg.dtype)


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245) over a cache of any kind.

    `qkv[embed, kv_heads, group + 2, head_dim]` holds, for each KV head, its group of query heads, then the key and
    the value: one matrix product, and one axis to shard. A token attends to the last `window` tokens (None: all).
    """

    def __init__(self, cfg: Any, window: int | None = None, *, rngs: nnx.Rngs):
        d, k, g, h = cfg.embed, cfg.kv_heads, cfg.heads // cfg.kv_heads, cfg.head_dim
        self.qkv = param(rngs, cfg.dtype, fan_in=d, embed=d, kv_heads=k, qkv=g + 2, head_dim=h)
        self.o = param(rngs, cfg.dtype, fan_in=k * g * h, kv_heads=k, group=g, head_dim=h, embed=d)
        self.qkv_bias = bias(cfg.dtype, kv_heads=k, qkv=g + 2, head_dim=h) if cfg.qkv_bias else None
        self.o_bias = bias(cfg.dtype, embed=d) if cfg.o_bias else None
        self.q_norm = make_norm(cfg, h) if cfg.qk_norm else None
        self.k_norm = make_norm(cfg, h) if cfg.qk_norm else None
        self.scale = h**-0.5 if cfg.query_scale is None else cfg.query_scale
        self.window, self.soft_cap = window, cfg.attn_soft_cap

    def __call__(self, x: Float[Array, "*t embed"], sin_cos: tuple[Array, Array] | None, cache):
        qkv = einsum("...d,dkgh->...kgh", x, self.qkv, self.qkv_bias)
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        group_shape = q.shape
        q = q.reshape(*q.shape[:-3], -1, q.shape[-1])  # [*t, heads, head_dim]
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if sin_cos is not None:
            q, k = rotate(q, *sin_cos), rotate(k, *sin_cos)
        out, cache = cache.attend(q, k, v, scale=self.scale, sliding_window=self.window, soft_cap=self.soft_cap)
        return einsum("...kgh,kghd->...d", out.reshape(group_shape), self.o, self.o_bias), cache


class MLP(nnx.Module):
    """Gated feed-forward (arXiv 2002.05202), gate and up fused."""

    def __init__(self, cfg: Any, *, rngs: nnx.Rngs):
        self.gate_up = param(rngs, cfg.dtype, fan_in=cfg.embed, embed=cfg.embed, gate_up=2, mlp=cfg.mlp)
        self.down = param(rngs, cfg.dtype, fan_in=cfg.mlp, mlp=cfg.mlp, embed=cfg.embed)
        self.gate_up_bias = bias(cfg.dtype, gate_up=2, mlp=cfg.mlp) if cfg.mlp_bias else None
        self.down_bias = bias(cfg.dtype, embed=cfg.embed) if cfg.mlp_bias else None
        self.activation = cfg.activation

    def __call__(self, x: Float[Array, "*t embed"]) -> Float[Array, "*t embed"]:
        both = einsum("...d,dgf->...gf", x, self.gate_up, self.gate_up_bias)
        gated = ACTIVATIONS[self.activation](both[..., 0, :]) * both[..., 1, :]
        return einsum("...f,fd->...d", gated, self.down, self.down_bias)


class PlainMLP(nnx.Module):
    """Feed-forward without a gate."""

    def __init__(self, cfg: Any, *, rngs: nnx.Rngs):
        self.up = param(rngs, cfg.dtype, fan_in=cfg.embed, embed=cfg.embed, mlp=cfg.mlp)
        self.down = param(rngs, cfg.dtype, fan_in=cfg.mlp, mlp=cfg.mlp, embed=cfg.embed)
        self.up_bias = bias(cfg.dtype, mlp=cfg.mlp) if cfg.mlp_bias else None
        self.down_bias = bias(cfg.dtype, embed=cfg.embed) if cfg.mlp_bias else None
        self.activation = cfg.activation

    def __call__(self, x: Float[Array, "*t embed"]) -> Float[Array, "*t embed"]:
        h = ACTIVATIONS[self.activation](einsum("...d,df->...f", x, self.up, self.up_bias))
        return einsum("...f,fd->...d", h, self.down, self.down_bias)
