"""How an architecture file says where a checkpoint's tensors go."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Weight:
    """One checkpoint tensor's place in our parameters.

    `path` is the parameter ("layers.{i}.attn.qkv"), `axes` the einops pattern from the tensor's axes to those of the
    parameter ("(k g h) d -> d k g h"), and `part` the (dimension, start, stop) that the tensor fills where several
    share a parameter (None: all of it).
    """

    path: str
    axes: str
    part: tuple[int, int | None, int | None] | None = None


Table = Mapping[str, Weight]  # checkpoint name, "{i}" standing for the layer -> Weight

LLAMA_LAYOUT: Table = {
    "model.embed_tokens.weight": Weight("embed", "v d -> v d"),
    "model.layers.{i}.self_attn.q_proj.weight": Weight(
        "layers.{i}.attn.qkv", "(k g h) d -> d k g h", (2, None, -2)
    ),
    "model.layers.{i}.self_attn.k_proj.weight": Weight("layers.{i}.attn.qkv", "(k g h) d -> d k g h", (2, -2, -1)),
    "model.layers.{i}.self_attn.v_proj.weight": Weight(
        "layers.{i}.attn.qkv", "(k g h) d -> d k g h", (2, -1, None)
    ),
    "model.layers.{i}.self_attn.o_proj.weight": Weight("layers.{i}.attn.o", "d (k g h) -> k g h d"),
    "model.layers.{i}.input_layernorm.weight": Weight("layers.{i}.attn_norm.scale", "d -> d"),
    "model.layers.{i}.post_attention_layernorm.weight": Weight("layers.{i}.mlp_norm.scale", "d -> d"),
    "model.layers.{i}.mlp.gate_proj.weight": Weight("layers.{i}.mlp.gate_up", "(u f) d -> d u f", (1, 0, 1)),
    "model.layers.{i}.mlp.up_proj.weight": Weight("layers.{i}.mlp.gate_up", "(u f) d -> d u f", (1, 1, 2)),
    "model.layers.{i}.mlp.down_proj.weight": Weight("layers.{i}.mlp.down", "d f -> f d"),
    "model.norm.weight": Weight("norm.scale", "d -> d"),
    "lm_head.weight": Weight("lm_head", "v d -> d v"),  # absent where the embeddings are tied
}
