"""Llama (arXiv 2302.13971, 2407.21783): pre-norm decoder, grouped-query attention, gated SiLU MLP."""

from typing import Any

from jaxllm.models import transformer
from jaxllm.models.weights import ATTENTION_BIASES, LLAMA_LAYOUT, MLP_BIASES


class Config(transformer.Config):
    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        biases = transformer.attention_biases(hf) | {"mlp_bias": transformer.flag(hf, "mlp_bias")}
        return super().from_hf(hf, **(biases | fields))


class Model(transformer.Decoder):
    Config = Config


WEIGHTS = LLAMA_LAYOUT
OPTIONAL_WEIGHTS = ATTENTION_BIASES | MLP_BIASES
