"""Layers. Weights carry logical axis names; activations are `[*t, ...]`, flat over tokens in the engine."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int


def param(rngs: nnx.Rngs, dtype: Any, *, fan_in: int, **dims: int) -> nnx.Param:
    """A weight whose keyword names are its logical axes: `param(rngs, dtype, fan_in=D, embed=D, mlp=F)`."""
    shape = tuple(dims.values())
    value = jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(fan_in)
    return nnx.Param(value.astype(dtype), axes=tuple(dims))


def einsum(equation: str, x: Array, weight: nnx.Param) -> Array:
    """Every product with a weight goes through here, so that quantised or adapted weights can be leaf types."""
    return jnp.einsum(equation, x, weight[...])


class RMSNorm(nnx.Module):
    """Root mean square normalisation in float32 (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float, *, dtype: Any):
        self.scale = nnx.Param(jnp.ones(dim, dtype), axes=(None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*t d"]) -> Float[Array, "*t d"]:
        x32 = x.astype(jnp.float32)
        var = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        y = (x32 * jax.lax.rsqrt(var + self.eps)).astype(x.dtype)
        return y * jnp.broadcast_to(self.scale[...].astype(x.dtype), y.shape)


_LLAMA3_FIELDS = {
    "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_max_len": "original_max_position_embeddings",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embeddings (arXiv 2104.09864), halves rotated, with the frequency scalings of `kind`."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: float = 8192.0

    @classmethod
    def from_hf(cls, hf: dict) -> "Rope":
        """From a `config.json`, in the form of transformers 5 (`rope_parameters`) or before. KeyError for a missing
        key, ValueError for a kind that is not supported."""
        p = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        kind = p.get("rope_type", p.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise ValueError(f"rope type {kind!r} is not supported; supported: default, linear, llama3")
        needed = {"default": {}, "linear": {"factor": "factor"}, "llama3": _LLAMA3_FIELDS}[kind]
        scaling = {ours: p[theirs] for ours, theirs in needed.items()}
        theta = float(p.get("rope_theta", hf.get("rope_theta", 10000.0)))
        return cls(theta=theta, kind=kind, **{name: float(value) for name, value in scaling.items()})

    def inv_freq(self, head_dim: int) -> np.ndarray:
        """Radians a position for each pair of features, float32 `[head_dim // 2]`."""
        exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        freq = np.float32(1.0) / np.float32(self.theta) ** exponent
        if self.kind == "linear":
            return freq / np.float32(self.factor)
        if self.kind == "llama3":  # slow waves are stretched, fast ones kept, those between blended
            turns = self.original_max_len * freq / np.float32(2 * np.pi)
            keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            keep = np.clip(keep, 0.0, 1.0)
            freq = freq * keep + freq / self.factor * (1 - keep)
        return freq.astype(np.float32)

    def sin_cos(self, positions: Int[Array, "*t"], head_dim: int) -> tuple[Array, Array]:
        """Sine and cosine `[*t, 1, head_dim // 2]`, to be broadcast over heads."""
        freq = jnp.asarray(self.inv_freq(head_dim))
        angle = jnp.expand_dims(positions.astype(jnp.float32), (-1, -2))
        angle = angle * jnp.expand_dims(freq, tuple(range(angle.ndim - 1)))
        return jnp.sin(angle), jnp.cos(angle)


def rotate(x: Float[Array, "*t heads head_dim"], sin: Array, cos: Array) -> Float[Array, "*t heads head_dim"]:
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245) over whatever cache it is handed.

    `qkv[embed, kv_heads, group + 2, head_dim]` holds, for each KV head, its group of query heads, then the key and
    the value: one matrix product, and one axis to shard.
    """

    def __init__(self, cfg: Any, *, rngs: nnx.Rngs):
        d, k, g, h = cfg.embed, cfg.kv_heads, cfg.heads // cfg.kv_heads, cfg.head_dim
        self.qkv = param(rngs, cfg.dtype, fan_in=d, embed=d, kv_heads=k, qkv=g + 2, head_dim=h)
        self.o = param(rngs, cfg.dtype, fan_in=k * g * h, kv_heads=k, group=g, head_dim=h, embed=d)
        self.q_norm = RMSNorm(h, cfg.eps, dtype=cfg.dtype) if cfg.qk_norm else None
        self.k_norm = RMSNorm(h, cfg.eps, dtype=cfg.dtype) if cfg.qk_norm else None
        self.scale = h**-0.5

    def __call__(self, x: Float[Array, "*t embed"], sin_cos, cache):
        qkv = einsum("...d,dkgh->...kgh", x, self.qkv)
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        group_shape = q.shape
        q = q.reshape(*q.shape[:-3], -1, q.shape[-1])  # [*t, heads, head_dim]
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out, cache = cache.attend(rotate(q, *sin_cos), rotate(k, *sin_cos), v, scale=self.scale)
        return einsum("...kgh,kghd->...d", out.reshape(group_shape), self.o), cache


class MLP(nnx.Module):
    """Gated SiLU feed-forward (arXiv 2002.05202), gate and up fused."""

    def __init__(self, cfg: Any, *, rngs: nnx.Rngs):
        self.gate_up = param(rngs, cfg.dtype, fan_in=cfg.embed, embed=cfg.embed, gate_up=2, mlp=cfg.mlp)
        self.down = param(rngs, cfg.dtype, fan_in=cfg.mlp, mlp=cfg.mlp, embed=cfg.embed)

    def __call__(self, x: Float[Array, "*t embed"]) -> Float[Array, "*t embed"]:
        both = einsum("...d,dgf->...gf", x, self.gate_up)
        return einsum("...f,fd->...d", nnx.silu(both[..., 0, :]) * both[..., 1, :], self.down)
