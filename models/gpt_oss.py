"""gpt-oss (arXiv 2508.10925): attention with sinks, local and global in turn, and mixtures of experts with biases."""

from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from jaxllm.models import transformer
from jaxllm.models.moe import Activation, Experts, Routing, top_k_of
from jaxllm.models.rope import rope_from_hf
from jaxllm.models.weights import ATTENTION_BIASES, LAYER, LLAMA_LAYOUT, Weight, experts, router, stacked_experts

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    eps: float = 1e-5
    norm: str = "rms_scales_first"
    has_sinks: bool = True

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        types = hf.get("layer_types")
        if types is None:
            types = tuple(islice(cycle(("sliding_attention", "full_attention")), hf["num_hidden_layers"]))
        activation = Activation(limit=hf.get("swiglu_limit") or 7.0, alpha=hf.get("swiglu_alpha") or 1.702)
        layer = Experts(
            routing=Routing(**top_k_of(hf), has_bias=True),
            mlp=hf["intermediate_size"],
            activation=activation,
            has_bias=True,
        )
        has_bias = transformer.flag(hf, "attention_bias", True)
        options = {
            "qkv_bias": has_bias,
            "o_bias": has_bias,
            "rope": rope_from_hf(hf, hf.get("rope_scaling") or hf.get("rope_parameters") or _ROPE, theta=150000.0),
            "windows": transformer.windows_of(types, hf.get("sliding_window", 128)),
            "feed_forwards": (layer,) * hf["num_hidden_layers"],
        }
        return super().from_hf(hf, **(options | fields))


class Model(transformer.Decoder):
    Config = Config


_MLP, _EXPERTS = LAYER + "mlp.", LAYER + "mlp.experts."
_ROUTER = router(_MLP + "router") | {_MLP + "router.bias": Weight("layers.{i}.mlp.router.gate.bias", "e -> e")}
_BIASES = {
    _EXPERTS + "gate_up_proj_bias": Weight("layers.{i}.mlp.gate_up.bias", "e (f u) -> e u f"),
    _EXPERTS + "down_proj_bias": Weight("layers.{i}.mlp.down.bias", "e d -> e d"),
}
_BIAS = Weight("layers.{i}.mlp.gate_up.bias", "(e u f) -> e u f")
WEIGHTS = LLAMA_LAYOUT | {LAYER + "self_attn.sinks": Weight("layers.{i}.attn.sinks", "(k g) -> k g")}
OPTIONAL_WEIGHTS = ATTENTION_BIASES
EXPERTS = (
    _ROUTER
    | stacked_experts(_EXPERTS + "gate_up_proj", _EXPERTS + "down_proj", outputs_first=False, interleaved=True)
    | _BIASES,
    _ROUTER  # in MXFP4, as `jaxllm.checkpoint.quantized.mxfp4` names them
    | {
        _EXPERTS + "{e}.gate_up_proj.weight": Weight("layers.{i}.mlp.gate_up.weight", "(e f u) d -> e d u f"),
        _EXPERTS + "{e}.down_proj.weight": Weight("layers.{i}.mlp.down.weight", "(e d) f -> e f d"),
    }
    | _BIASES,
    _ROUTER
    | experts(_EXPERTS + "{e}")
    | {
        _EXPERTS + "{e}.gate_proj.bias": replace(_BIAS, part=(1, 0, 1)),
        _EXPERTS + "{e}.up_proj.bias": replace(_BIAS, part=(1, 1, 2)),
        _EXPERTS + "{e}.down_proj.bias": Weight("layers.{i}.mlp.down.bias", "(e d) -> e d"),
    },
)
