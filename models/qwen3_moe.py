"""Qwen3-MoE (arXiv 2505.09388): Qwen3's decoder with a mixture of experts in some layers, or in all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxllm.models import qwen3, transformer
from jaxllm.models.layers import MLP
from jaxllm.models.moe import Experts, Routing, top_k_of
from jaxllm.models.weights import LAYER, expert_forms, router


def routing(hf: dict) -> Routing:
    """Of Qwen2-MoE, Qwen3-MoE and OLMoE."""
    return Routing(**top_k_of(hf), renormalise=transformer.flag(hf, "norm_topk_prob"))


def feed_forwards(hf: dict, experts: Experts) -> tuple[Callable[..., nnx.Module], ...]:
    """Of Qwen2-MoE and Qwen3-MoE: `experts` in each layer that no key makes dense."""
    step, dense = hf.get("decoder_sparse_step") or 1, hf.get("mlp_only_layers") or ()
    layers = range(hf["num_hidden_layers"])
    return tuple(MLP if i in dense or (i + 1) % step else experts for i in layers)


@dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    REFUSED = ("layer_types",)

    qk_norm: bool | str = True

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        experts = Experts(routing=routing(hf), mlp=hf["moe_intermediate_size"])
        window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
        options = transformer.attention_biases(hf) | {
            "windows": (window,) * hf["num_hidden_layers"],
            "feed_forwards": feed_forwards(hf, experts),
        }
        return super().from_hf(hf, **(options | fields))


class Model(transformer.Decoder):
    Config = Config


WEIGHTS, OPTIONAL_WEIGHTS = qwen3.WEIGHTS, qwen3.OPTIONAL_WEIGHTS
EXPERTS = expert_forms(LAYER + "mlp.experts.", router(LAYER + "mlp.gate"))
