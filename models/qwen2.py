"""Qwen2 (arXiv 2407.10671): Llama's decoder with biases on queries, keys and values, and windows on some layers."""

from dataclasses import dataclass
from typing import Any

from jaxllm.models import transformer
from jaxllm.models.weights import LAYER, LLAMA_LAYOUT, qkv_biases


def windows(hf: dict) -> tuple[int | None, ...]:
    """Of Qwen2 and Qwen3: by layer type or, in older files, from layer `max_window_layers` on."""
    if not hf.get("use_sliding_window"):
        return transformer.windows_of(hf.get("layer_types") or (), None)
    types = hf.get("layer_types")
    if types is None:
        num_layers = hf["num_hidden_layers"]
        num_full = min(hf["max_window_layers"], num_layers)
        types = ("full_attention",) * num_full + ("sliding_attention",) * (num_layers - num_full)
    return transformer.windows_of(types, hf["sliding_window"])


@dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    qkv_bias: bool = True

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        return super().from_hf(hf, **({"windows": windows(hf)} | fields))


class Model(transformer.Decoder):
    Config = Config


WEIGHTS = LLAMA_LAYOUT | qkv_biases(LAYER + "self_attn.")
