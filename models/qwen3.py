"""Qwen3 (arXiv 2505.09388): Llama's decoder with RMSNorm on the heads of queries and keys."""

from typing import Any

from jaxllm.models import transformer
from jaxllm.models.weights import LLAMA_LAYOUT, Weight


class Config(transformer.Config):
    REFUSED = ("attention_bias", "use_sliding_window")

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        return super().from_hf(hf, **({"qk_norm": True} | fields))


class Model(transformer.Decoder):
    Config = Config


WEIGHTS = {
    **LLAMA_LAYOUT,
    "model.layers.{i}.self_attn.q_norm.weight": Weight("layers.{i}.attn.q_norm.scale", "h -> h"),
    "model.layers.{i}.self_attn.k_norm.weight": Weight("layers.{i}.attn.k_norm.scale", "h -> h"),
}
