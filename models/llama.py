"""Llama (arXiv 2302.13971, 2407.21783): pre-norm decoder, grouped-query attention, gated SiLU MLP."""

from typing import Any

from jaxllm.models import transformer
from jaxllm.models.weights import LLAMA_LAYOUT


class Config(transformer.Config):
    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        for key in ("attention_bias", "mlp_bias"):
            if hf.get(key):
                raise ValueError(f"{key}=true is not supported for Llama")
        if hf.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act={hf['hidden_act']!r} is not supported for Llama, only 'silu'")
        return super().from_hf(hf, **fields)


class Model(transformer.Decoder):
    Config = Config


WEIGHTS = LLAMA_LAYOUT
