"""Qwen2-MoE (arXiv 2407.10671): Qwen2's decoder with mixtures of experts, and one that all tokens share."""

from dataclasses import dataclass
from typing import Any

from jaxllm.models import qwen2, qwen3_moe, transformer
from jaxllm.models.moe import Experts
from jaxllm.models.weights import LAYER, LLAMA_LAYOUT, Weight, expert_forms, mlp, qkv_biases, router


def windows(hf: dict) -> tuple[int | None, ...]:
    """By layer type or, where the file gives none, on every other one of the first `max_window_layers`."""
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    types = hf.get("layer_types")
    if types is None:
        num_layers = hf["num_hidden_layers"]
        if window is None:
            return (None,) * num_layers
        last = hf["max_window_layers"]
        types = ["full_attention" if i % 2 or i >= last else "sliding_attention" for i in range(num_layers)]
    return transformer.windows_of(types, window)


@dataclass(frozen=True, kw_only=True)
class Config(qwen2.Config):
    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        experts = Experts(
            routing=qwen3_moe.routing(hf),
            mlp=hf["moe_intermediate_size"],
            shared_mlp=hf["shared_expert_intermediate_size"],
            has_shared_gate=True,
        )
        options = {
            "qkv_bias": transformer.flag(hf, "qkv_bias", True),
            "windows": windows(hf),
            "feed_forwards": qwen3_moe.feed_forwards(hf, experts),
        }
        return super().from_hf(hf, **(options | fields))


class Model(transformer.Decoder):
    Config = Config


_MLP = LAYER + "mlp."
WEIGHTS, OPTIONAL_WEIGHTS = LLAMA_LAYOUT, qkv_biases(LAYER + "self_attn.")
EXPERTS = expert_forms(
    _MLP + "experts.",
    router(_MLP + "gate")
    | mlp(_MLP + "shared_expert.", "layers.{i}.mlp.shared")
    | {_MLP + "shared_expert_gate.weight": Weight("layers.{i}.mlp.shared_gate.weight", "e d -> d e")},
)
