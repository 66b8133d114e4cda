"""ERNIE 4.5 MoE, text: Llama's decoder with rotated neighbours, and mixtures of experts with a correction bias."""

from dataclasses import dataclass
from typing import Any

from jaxllm.models import transformer
from jaxllm.models.layers import MLP
from jaxllm.models.moe import Experts, Routing, top_k_of
from jaxllm.models.rope import rope_from_hf
from jaxllm.models.weights import LAYER, LLAMA_LAYOUT, Weight, expert_forms, mlp, router


@dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    REFUSED = ("use_bias",)
    FIXED = {"moe_gate": "topk", "moe_gate_act": "softmax", "moe_use_aux_free": True}

    eps: float = 1e-5
    tie_embeddings: bool = True

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        options = {"has_correction": True, "is_float32": True}
        routing = Routing(**top_k_of(hf), eps=hf.get("moe_norm_min") or 1e-12, **options)
        width = hf["moe_intermediate_size"]
        experts = Experts(routing=routing, mlp=width, shared_mlp=width * hf.get("moe_num_shared_experts", 2))
        options = {
            "rope": rope_from_hf(hf, theta=500000.0, interleaved=True),
            "feed_forwards": tuple(experts if has_experts(hf, i) else MLP for i in range(hf["num_hidden_layers"])),
        }
        return super().from_hf(hf, **(options | fields))


def has_experts(hf: dict, layer: int) -> bool:
    last = hf.get("moe_layer_end_index", -1)
    last = hf["num_hidden_layers"] - 1 if last == -1 else last
    is_in = hf.get("moe_layer_start_index", 1) <= layer <= last
    return is_in and (layer + 1) % (hf.get("moe_layer_interval") or 1) == 0


class Model(transformer.Decoder):
    Config = Config


_MLP = LAYER + "mlp."
WEIGHTS = LLAMA_LAYOUT
EXPERTS = expert_forms(
    _MLP + "experts.",
    router(_MLP + "gate")
    | {_MLP + "moe_statics.e_score_correction_bias": Weight("layers.{i}.mlp.router.correction", "1 e -> e")}
    | mlp(_MLP + "shared_experts.", "layers.{i}.mlp.shared"),
)
IGNORED = r"model\.mtp_.*"  # predicts tokens further ahead
