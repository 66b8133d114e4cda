"""Layers. Weights carry logical axis names; activations are `[*t, ...]`, flat over tokens in the engine."""

import math
from collections.abc import Callable, Mapping
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
from jaxllm.pallas_kernels.dispatch import UNPLACED
from jaxllm.pallas_kernels.gated import ACTIVATIONS as ACTIVATIONS
from jaxllm.pallas_kernels.rms_norm import rms_norm
from jaxllm.pallas_kernels.rotary import rotate, rotate_qkv
from jaxllm.pallas_kernels.rounding import rounded
from jaxllm.pallas_kernels.row_sums import row_sums


class Norm(nnx.Module):
    """A normalisation, called with features and, where it is known, the step's context. With `fixed_order` its sums
    depend on no other token, to the bit."""

    fixed_order: bool = False

    def add(
        self, x: Float[Array, "*t d"], h: Float[Array, "*t d"], ctx: StepContext | None = None
    ) -> tuple[Float[Array, "*t d"], Float[Array, "*t d"]]:
        """`x + h`, and that normalised."""
        x = x + h if ctx is None else ctx.add(x, h)
        return x, self(x, ctx)

    def __call__(self, x: Float[Array, "*t d"], ctx: StepContext | None = None) -> Float[Array, "*t d"]:
        raise NotImplementedError

    def mean(self, x: Float[Array, "*t d"], ctx: StepContext | None) -> Float[Array, "*t 1"]:
        if not self.fixed_order:
            return jnp.mean(x, axis=-1, keepdims=True)
        return row_sums(x, placement=UNPLACED if ctx is None else ctx.placement) / x.shape[-1]


class RMSNorm(Norm):
    """Root mean square normalisation in float32 (arXiv 1910.07467).

    With `scales_first` the weight is applied before the result is rounded; with `unit_offset` too, and it is stored as
    its difference from one.
    """

    def __init__(self, dim: int, eps: float, *, dtype: Any, unit_offset: bool = False, scales_first: bool = False):
        self.scale = nnx.Param(jnp.zeros(dim, dtype) if unit_offset else jnp.ones(dim, dtype), axes=(None,))
        self.eps, self.unit_offset, self.scales_first = eps, unit_offset, scales_first or unit_offset

    def __call__(self, x: Float[Array, "*t d"], ctx: StepContext | None = None) -> Float[Array, "*t d"]:
        return self._normalised(x, None, ctx)[1]

    def add(
        self, x: Float[Array, "*t d"], h: Float[Array, "*t d"], ctx: StepContext | None = None
    ) -> tuple[Float[Array, "*t d"], Float[Array, "*t d"]]:
        if type(self).__call__ is not RMSNorm.__call__:  # of a subclass, which normalises in another way
            return super().add(x, h, ctx)
        return self._normalised(x, h, ctx)

    def _normalised(self, x: Array, h: Array | None, ctx: StepContext | None) -> tuple[Array, Array]:
        known = {} if ctx is None else {"num_tokens": ctx.num_tokens, "placement": ctx.placement}
        options = {"eps": self.eps, "unit_offset": self.unit_offset, "scales_first": self.scales_first}
        return rms_norm(x, h, self.scale[...], fixed_order=self.fixed_order, **options, **known)


class LayerNorm(Norm):
    """Layer normalisation in float32 (arXiv 1607.06450); without `affine` it has no parameters."""

    def __init__(self, dim: int, eps: float, *, dtype: Any, affine: bool = True, bias: bool = True):
        self.scale = nnx.Param(jnp.ones(dim, dtype), axes=(None,)) if affine else None
        self.bias = nnx.Param(jnp.zeros(dim, dtype), axes=(None,)) if affine and bias else None
        self.eps = eps

    def __call__(self, x: Float[Array, "*t d"], ctx: StepContext | None = None) -> Float[Array, "*t d"]:
        x32 = x.astype(jnp.float32)
        y = x32 - self.mean(x32, ctx)
        y = y * jax.lax.rsqrt(self.mean(jnp.square(y), ctx) + self.eps)
        if self.scale is not None:
            y = y * jnp.broadcast_to(self.scale[...].astype(jnp.float32), y.shape)
        if self.bias is not None:
            y = y + jnp.broadcast_to(self.bias[...].astype(jnp.float32), y.shape)
        return rounded(y, x.dtype) if self.fixed_order else y.astype(x.dtype)


class HeadsNorm(nnx.Module):
    """RMSNorm over all heads together, of queries `{"kv_heads": k, "group": g, "head_dim": h}` or of keys.

    A mesh may hold a key several times, and queries of zeros (see `jaxllm.sharding.expand`): the mean is that of what
    the model has.
    """

    def __init__(self, axes: Mapping[str, int], eps: float, *, dtype: Any):
        self.scale = nnx.Param(jnp.ones(tuple(axes.values()), dtype), axes=tuple(axes))
        self.eps, self.num_queries = eps, math.prod(axes.values()) if "group" in axes else None

    def __call__(self, x: Float[Array, "..."], ctx: StepContext | None = None) -> Float[Array, "..."]:
        scale, x32 = self.scale[...], x.astype(jnp.float32)
        dims = tuple(range(x.ndim - scale.ndim, x.ndim))
        var = jnp.sum(jnp.square(x32), axis=dims, keepdims=True) / (self.num_queries or scale.size)
        y = (x32 * jax.lax.rsqrt(var + self.eps)).astype(x.dtype)
        return y * jnp.broadcast_to(scale.astype(x.dtype), y.shape)


NORMS = {
    "rms": RMSNorm,
    "rms_scales_first": partial(RMSNorm, scales_first=True),
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
        if cfg.qk_norm == "all heads":
            self.q_norm = HeadsNorm(heads, cfg.eps, dtype=cfg.dtype)
            self.k_norm = HeadsNorm({"kv_heads": k, "head_dim": h}, cfg.eps, dtype=cfg.dtype)
        sinks = nnx.Param(jnp.zeros((k, g), cfg.dtype), axes=("kv_heads", "group")) if cfg.has_sinks else None
        self.sinks = nnx.data(sinks)
        self.clip = cfg.clip_qkv
        self.interleaved = spec.rope is not None and spec.rope.interleaved
        self.scale = h**-0.5 if cfg.query_scale is None else cfg.query_scale
        self.window, self.soft_cap = spec.window, cfg.attn_soft_cap
        self.causal = cfg.causal
        self.cached = k, h  # KV heads and their width

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Keys and values, of the window that the layer has by now. Where tokens see later ones, a text is in one step,
        and nothing of it is left behind a window."""
        return (CacheSpec.keys_and_values(*self.cached, window=self.window if self.causal else None),)

    def __call__(self, x: Float[Array, "*t embed"], ctx: StepContext, sin_cos: tuple[Array, Array] | None, cache):
        qkv = self.qkv(x, ctx)
        q, k, v = self.heads(qkv, ctx, sin_cos)
        more: dict[str, Any] = {} if self.causal else {"causal": False}  # caches need not know what they aren't asked
        if self.sinks is not None:
            more["sinks"] = self.sinks[...].reshape(-1)
        out, cache = cache.attend(q, k, v, scale=self.scale, sliding_window=self.window, soft_cap=self.soft_cap, **more)
        return self.o(out.reshape(*qkv.shape[:-2], -1, qkv.shape[-1]), ctx), cache

    def heads(
        self, qkv: Float[Array, "*t kv_heads members head_dim"], ctx: StepContext, sin_cos: tuple[Array, Array] | None
    ) -> tuple[Array, Array, Array]:
        """Queries and keys that tell their positions, and values: `[*t, heads, head_dim]`, each its own heads."""
        options = {"interleaved": self.interleaved, "num_tokens": ctx.num_tokens, "placement": ctx.placement}
        if sin_cos is not None and self.q_norm is None and self.clip is None:
            return rotate_qkv(qkv, *sin_cos, **options)
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        if self.q_norm is not None:
            q, k = self.q_norm(q, ctx), self.k_norm(k, ctx)
        if self.clip is not None:
            q, k, v = (jnp.clip(each, -self.clip, self.clip) for each in (q, k, v))
        q = q.reshape(*q.shape[:-3], -1, q.shape[-1])
        return (q, k, v) if sin_cos is None else (rotate(q, *sin_cos, **options), rotate(k, *sin_cos, **options), v)


class MLP(nnx.Module):
    """Gated feed-forward (arXiv 2002.05202), gate and up fused, of hidden width `width`; None: `cfg.mlp`."""

    def __init__(self, cfg: Any, *, width: int | None = None, rngs: nnx.Rngs):
        options = {"bias": cfg.mlp_bias, "dtype": cfg.dtype, "rngs": rngs}
        outputs = {"gate_up": {"gate": 1, "up": 1}, "mlp": width or cfg.mlp}
        self.gate_up = Linear.random({"embed": cfg.embed}, outputs, **options)
        self.down = Linear.random({"mlp": width or cfg.mlp}, {"embed": cfg.embed}, **options)
        self.activation = cfg.activation

    def __call__(self, x: Float[Array, "*t embed"], ctx: StepContext) -> Float[Array, "*t embed"]:
        return self.down(self.gate_up.gated(x, self.activation, ctx), ctx)


class PlainMLP(nnx.Module):
    """Feed-forward without a gate."""

    def __init__(self, cfg: Any, *, rngs: nnx.Rngs):
        options = {"bias": cfg.mlp_bias, "dtype": cfg.dtype, "rngs": rngs}
        self.up = Linear.random({"embed": cfg.embed}, {"mlp": cfg.mlp}, **options)
        self.down = Linear.random({"mlp": cfg.mlp}, {"embed": cfg.embed}, **options)
        self.activation = cfg.activation

    def __call__(self, x: Float[Array, "*t embed"], ctx: StepContext) -> Float[Array, "*t embed"]:
        return self.down(ctx.rounded_once(ACTIVATIONS[self.activation], self.up(x, ctx)), ctx)


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
