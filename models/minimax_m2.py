"""MiniMax-M2: norms over all queries and all keys, partial rotation, and mixtures of experts by sigmoid scores."""

from dataclasses import dataclass
from typing import Any

from jaxllm.models import transformer
from jaxllm.models.moe import Experts, Routing, top_k_of
from jaxllm.models.weights import LAYER, LLAMA_LAYOUT, WHOLE_QK_NORMS, Table, Weight, expert_forms, experts, router


@dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    REFUSED = ("shared_intermediate_size",)
    FIXED = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}
    PARTIAL_ROPE = True

    qk_norm: bool | str = "all heads"

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        routing = Routing(**top_k_of(hf), score="sigmoid", has_correction=True)
        layer = Experts(routing=routing, mlp=hf["intermediate_size"])
        if 0 in (hf.get("attn_type_list") or ()):
            raise ValueError("attn_type_list has 0, for linear attention, which is not supported; only 1 is")
        if hf.get("rotary_dim"):
            hf = {"partial_rotary_factor": hf["rotary_dim"] / hf["head_dim"]} | hf
        return super().from_hf(hf, **({"feed_forwards": (layer,) * hf["num_hidden_layers"]} | fields))


class Model(transformer.Decoder):
    Config = Config


def _router(prefix: str) -> Table:
    correction = Weight("layers.{i}.mlp.router.correction", "e -> e")
    return router(prefix + "gate") | {prefix + "e_score_correction_bias": correction}


_MOE = LAYER + "block_sparse_moe."
WEIGHTS = LLAMA_LAYOUT | WHOLE_QK_NORMS
EXPERTS = (
    _router(_MOE) | experts(_MOE + "experts.{e}", gate="w1", up="w3", down="w2"),
    *expert_forms(LAYER + "mlp.experts.", _router(LAYER + "mlp.")),
)
