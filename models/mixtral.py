"""Mixtral (arXiv 2401.04088): Mistral's decoder with a mixture of experts in each layer."""

from typing import Any

from jaxllm.models import mistral, transformer
from jaxllm.models.moe import Experts, Routing, top_k_of
from jaxllm.models.weights import LAYER, LLAMA_LAYOUT, expert_forms, experts, router


class Config(mistral.Config):
    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        layer = Experts(routing=Routing(**top_k_of(hf)), mlp=hf["intermediate_size"])
        hf = {"sliding_window": None} | hf
        return super().from_hf(hf, **({"feed_forwards": (layer,) * hf["num_hidden_layers"]} | fields))


class Model(transformer.Decoder):
    Config = Config


_MOE = LAYER + "block_sparse_moe."
WEIGHTS = LLAMA_LAYOUT
EXPERTS = (
    router(_MOE + "gate") | experts(_MOE + "experts.{e}", gate="w1", up="w3", down="w2"),
    *expert_forms(LAYER + "mlp.experts.", router(LAYER + "mlp.gate")),  # as transformers 5 has them in memory
)
