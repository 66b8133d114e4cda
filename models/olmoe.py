"""OLMoE (arXiv 2409.02060): Llama's decoder with norms over all queries and all keys, and mixtures of experts."""

from dataclasses import dataclass
from typing import Any

from jaxllm.models import qwen3_moe, transformer
from jaxllm.models.moe import Experts
from jaxllm.models.weights import ATTENTION_BIASES, LAYER, LLAMA_LAYOUT, WHOLE_QK_NORMS, expert_forms, router


@dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    eps: float = 1e-5
    qk_norm: bool | str = "all heads"

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        experts = Experts(routing=qwen3_moe.routing(hf), mlp=hf["intermediate_size"])
        options = transformer.attention_biases(hf) | {
            "clip_qkv": hf.get("clip_qkv"),
            "feed_forwards": (experts,) * hf["num_hidden_layers"],
        }
        return super().from_hf(hf, **(options | fields))


class Model(transformer.Decoder):
    Config = Config


WEIGHTS, OPTIONAL_WEIGHTS = LLAMA_LAYOUT | WHOLE_QK_NORMS, ATTENTION_BIASES
EXPERTS = expert_forms(LAYER + "mlp.experts.", router(LAYER + "mlp.gate"))
