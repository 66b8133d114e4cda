"""Granite 3 MoE: Llama's decoder with multipliers of embeddings, residuals, scores and logits, and mixtures of
experts."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.models import transformer
from jaxllm.models.context import StepContext
from jaxllm.models.moe import Experts, Routing, top_k_of
from jaxllm.models.weights import ATTENTION_BIASES, LAYER, LLAMA_LAYOUT, expert_forms, experts, router, stacked_experts


@dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        layer = Experts(routing=Routing(**top_k_of(hf)), mlp=hf["intermediate_size"])
        options = transformer.attention_biases(hf) | {
            "query_scale": _multiplier(hf, "attention_multiplier"),
            "embedding_multiplier": _multiplier(hf, "embedding_multiplier"),
            "residual_multiplier": _multiplier(hf, "residual_multiplier"),
            "logits_divisor": _multiplier(hf, "logits_scaling"),
            "feed_forwards": (layer,) * hf["num_hidden_layers"],
        }
        return super().from_hf(hf, **(options | fields))


def _multiplier(hf: dict, key: str) -> float:
    return 1.0 if hf.get(key) is None else hf[key]


class DecoderLayer(transformer.DecoderLayer):
    def __init__(self, cfg: Config, spec: Any, **kwargs: Any):
        super().__init__(cfg, spec, **kwargs)
        self.multiplier = cfg.residual_multiplier

    def __call__(self, x: Float[Array, "*t embed"], ctx: StepContext, sin_cos, cache):
        h, cache = self.attn(self.attn_norm(x, ctx), ctx, sin_cos, cache)
        x = x + h * self.multiplier
        return x + self.mlp(self.mlp_norm(x, ctx), ctx) * self.multiplier, cache


class Model(transformer.Decoder):
    Config, Layer = Config, DecoderLayer

    def embed_tokens(self, tokens: Int[Array, "*t"], ctx: StepContext) -> Float[Array, "*t embed"]:
        x = super().embed_tokens(tokens, ctx)
        return x * jnp.asarray(self.cfg.embedding_multiplier, x.dtype)

    def logits(self, hidden: Float[Array, "*t embed"], ctx: StepContext) -> Float[Array, "*t vocab"]:
        return super().logits(hidden, ctx) / self.cfg.logits_divisor


_MOE = LAYER + "block_sparse_moe."
WEIGHTS, OPTIONAL_WEIGHTS = LLAMA_LAYOUT, ATTENTION_BIASES
EXPERTS = (
    router(_MOE + "router.layer") | stacked_experts(_MOE + "input_linear.weight", _MOE + "output_linear.weight"),
    router(_MOE + "router.layer") | experts(_MOE + "experts.{e}"),
    *expert_forms(_MOE + "experts.", router(_MOE + "router")),
)
