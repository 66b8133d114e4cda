"""Phi-3 (arXiv 2404.14219) and Phi-4 mini: Llama's decoder with fused tensors, partial rotation, and longrope."""

from typing import Any

from jaxllm.models import transformer
from jaxllm.models.rope import rope_from_hf
from jaxllm.models.weights import LAYER, LLAMA_SHARED, Weight, qkv_piece


class Config(transformer.Config):
    REFUSED = ("attention_bias", "layer_types")
    PARTIAL_ROPE = True

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        hf = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096} | hf
        params = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
        kind = params.get("rope_type") or params.get("type") or "default"
        if kind in ("su", "yarn"):  # longrope's names in early files
            kind = "longrope"
        if kind not in ("default", "longrope"):
            raise ValueError(f"rope type {kind!r} is not supported for this family; supported: default, longrope")
        options = {
            "rope": rope_from_hf(hf, params | {"rope_type": kind}),
            "windows": (hf.get("sliding_window"),) * hf["num_hidden_layers"],
        }
        return super().from_hf(hf, **(options | fields))


class Model(transformer.Decoder):
    Config = Config


WEIGHTS = LLAMA_SHARED | {
    LAYER + "self_attn.qkv_proj.weight": (qkv_piece("q"), qkv_piece("k"), qkv_piece("v")),
    LAYER + "mlp.gate_up_proj.weight": Weight("layers.{i}.mlp.gate_up.weight", "(u f) d -> d u f"),
}
