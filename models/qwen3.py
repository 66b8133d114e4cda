"""Qwen3 (arXiv 2505.09388): Llama's decoder with RMSNorm on the heads of queries and keys, and Qwen2's windows."""

from dataclasses import dataclass
from typing import Any

from jaxllm.models import qwen2, transformer
from jaxllm.models.weights import ATTENTION_BIASES, LLAMA_LAYOUT, QK_NORMS


@dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    qk_norm: bool = True

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        options = transformer.attention_biases(hf) | {"windows": qwen2.windows(hf)}
        return super().from_hf(hf, **(options | fields))


class Model(transformer.Decoder):
    Config = Config


WEIGHTS = LLAMA_LAYOUT | QK_NORMS
OPTIONAL_WEIGHTS = ATTENTION_BIASES
