"""GLM-4.5 and later (arXiv 2508.06471): partial rotation, and mixtures of experts by DeepSeek-V3's routing."""

from dataclasses import dataclass
from typing import Any

from jaxllm.models import transformer
from jaxllm.models.layers import MLP
from jaxllm.models.moe import Experts, Routing, top_k_of
from jaxllm.models.weights import LAYER, LLAMA_LAYOUT, QK_NORMS, Weight, expert_forms, mlp, qkv_biases, router


@dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    FIXED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    PARTIAL_ROPE = True

    eps: float = 1e-5

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        routing = Routing(
            **top_k_of(hf),
            score="sigmoid",
            renormalise=transformer.flag(hf, "norm_topk_prob", True),
            scale=hf.get("routed_scaling_factor") or 1.0,
            has_correction=True,
            groups=hf.get("n_group") or 1,
            top_groups=hf.get("topk_group") or 1,
        )
        width = hf["moe_intermediate_size"]
        experts = Experts(routing=routing, mlp=width, shared_mlp=width * hf.get("n_shared_experts", 1))
        num_layers, num_dense = hf["num_hidden_layers"], hf.get("first_k_dense_replace", 1)
        options = {
            "qk_norm": transformer.flag(hf, "use_qk_norm"),
            "qkv_bias": transformer.flag(hf, "attention_bias"),
            "feed_forwards": tuple(MLP if i < num_dense else experts for i in range(num_layers)),
        }
        return super().from_hf({"partial_rotary_factor": 0.5} | hf, **(options | fields))


class Model(transformer.Decoder):
    Config = Config


_MLP = LAYER + "mlp."
WEIGHTS = LLAMA_LAYOUT
OPTIONAL_WEIGHTS = QK_NORMS | qkv_biases(LAYER + "self_attn.")
EXPERTS = expert_forms(
    _MLP + "experts.",
    router(_MLP + "gate")
    | {_MLP + "gate.e_score_correction_bias": Weight("layers.{i}.mlp.router.correction", "e -> e")}
    | mlp(_MLP + "shared_experts.", "layers.{i}.mlp.shared"),
)
IGNORED = r"model\.layers\.{num_layers}\..*"  # predicts a token further ahead
