"""Llama 4, text: norms after a rotation of neighbours, layers without positions, and mixtures of experts."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxllm.models import transformer
from jaxllm.models.context import StepContext
from jaxllm.models.layers import MLP, Attention, LayerSpec
from jaxllm.models.moe import Experts, Routing, top_k_of
from jaxllm.models.rope import rope_from_hf
from jaxllm.models.weights import ATTENTION_BIASES, LAYER, LLAMA_LAYOUT, experts, mlp, router, stacked_experts


@dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    LIMIT = "attention_chunk_size of its config.json: attention in several chunks is not supported"

    eps: float = 1e-5
    unit_heads: bool = True  # queries and keys that are rotated become as long as sqrt(head_dim)
    temperature_growth: float | None = 0.1  # of scores in layers without rope, for each e-fold of `temperature_step`s
    temperature_step: int = 8192  # positions

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        tuned = transformer.flag(hf, "attn_temperature_tuning", True)
        options = transformer.attention_biases(hf) | {
            "mlp": hf["intermediate_size_mlp"],
            "rope": rope_from_hf(hf, theta=500000.0, interleaved=True),
            "feed_forwards": _feed_forwards(hf),
            "unit_heads": transformer.flag(hf, "use_qk_norm", True),
            "temperature_growth": hf.get("attn_scale", 0.1) if tuned else None,
            "temperature_step": hf.get("floor_scale") or 8192,
        }
        cfg = super().from_hf(hf, **(options | fields))
        has_rope = hf.get("no_rope_layers") or _default_ropes(hf)
        if len(has_rope) != cfg.num_layers:
            raise ValueError(f"no_rope_layers has {len(has_rope)} entries for {cfg.num_layers} layers")
        layers = tuple(
            replace(spec, rope=spec.rope if has else None, attention=PlacedAttention)
            for spec, has in zip(cfg.layers, has_rope, strict=True)
        )
        chunk = hf.get("attention_chunk_size", 8192)
        is_chunked = "chunked_attention" in (hf.get("layer_types") or ["chunked_attention"])
        max_len = min(cfg.max_len, chunk) if chunk and is_chunked else cfg.max_len
        return replace(cfg, layers=layers, max_len=max_len)


def _default_ropes(hf: dict) -> list[bool]:
    every = hf.get("no_rope_layer_interval") or 4
    return [(i + 1) % every != 0 for i in range(hf["num_hidden_layers"])]


def _feed_forwards(hf: dict) -> tuple[Any, ...]:
    # The weight of the one expert, or of each, does not depend on the others, and multiplies what it is given.
    routing = Routing(**top_k_of(hf), score="sigmoid", renormalise=False)
    width, step = hf["intermediate_size"], hf.get("interleave_moe_layer_step") or 1
    layer = Experts(routing=routing, mlp=width, weighs_input=True, shared_mlp=width)
    sparse, num_layers = hf.get("moe_layers"), hf["num_hidden_layers"]
    sparse = range(step - 1, num_layers, step) if sparse is None else sparse
    return tuple(layer if i in sparse else MLP for i in range(num_layers))


class PlacedAttention(Attention):
    """Where queries and keys are rotated, they get a norm then; elsewhere later queries are larger."""

    def __init__(self, cfg: Config, spec: LayerSpec, *, rngs: nnx.Rngs):
        super().__init__(cfg, spec, rngs=rngs)
        self.eps = cfg.eps if cfg.unit_heads else None
        self.growth, self.step = cfg.temperature_growth, cfg.temperature_step

    def heads(self, qkv: Array, ctx: StepContext, sin_cos: tuple[Array, Array] | None) -> tuple[Array, Array, Array]:
        q, k, v = super().heads(qkv, ctx, sin_cos)
        if sin_cos is not None:
            return (q, k, v) if self.eps is None else (_unit(q, self.eps), _unit(k, self.eps), v)
        if self.growth is None:
            return q, k, v
        steps = jnp.floor((ctx.positions.astype(jnp.float32) + 1) / self.step)
        scale = jnp.expand_dims(jnp.log1p(steps) * self.growth + 1, (-2, -1))
        return (q.astype(jnp.float32) * jnp.broadcast_to(scale, q.shape)).astype(q.dtype), k, v


def _unit(x: Array, eps: float) -> Array:
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)).astype(x.dtype)


class Model(transformer.Decoder):
    Config = Config


_FF = LAYER + "feed_forward."
_COMMON = router(_FF + "router") | mlp(_FF + "shared_expert.", "layers.{i}.mlp.shared")
WEIGHTS = {name.replace(".mlp.", ".feed_forward."): weight for name, weight in LLAMA_LAYOUT.items()}
OPTIONAL_WEIGHTS = ATTENTION_BIASES
EXPERTS = (
    _COMMON | stacked_experts(_FF + "experts.gate_up_proj", _FF + "experts.down_proj", outputs_first=False),
    _COMMON | experts(_FF + "experts.{e}"),
)
