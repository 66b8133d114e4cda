"""Mistral (arXiv 2310.06825): Llama's decoder with a sliding window on every layer, or on none."""

from typing import Any

from jaxllm.models import transformer
from jaxllm.models.weights import LLAMA_LAYOUT


class Config(transformer.Config):
    REFUSED = ("attention_bias", "layer_types")

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        window = hf.get("sliding_window", 4096)  # null: no window; absent: the first model's
        return super().from_hf(hf, **({"windows": (window,) * hf["num_hidden_layers"]} | fields))


class Model(transformer.Decoder):
    Config = Config


WEIGHTS = LLAMA_LAYOUT
