"""OPT (arXiv 2205.01068): learned positions, LayerNorm, biases everywhere, an MLP without gate; opt-350m's variant."""

from dataclasses import dataclass
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models import transformer
from jaxllm.models.layers import PlainMLP, einsum, param
from jaxllm.models.rope import Rope
from jaxllm.models.transformer import flag
from jaxllm.models.weights import Table, Weight, attention, attention_biases, norm

OFFSET = 2  # row of position 0 in the table


@dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    """`word_embed` is the width of the embedding table, which is projected to `embed` and back if they differ.
    `post_norm` normalises after each block's residual, and not at the end."""

    word_embed: int
    rope: Rope | None = None
    post_norm: bool = False
    final_norm: bool = True
    norm: str = "layer"
    eps: float = 1e-5
    qkv_bias: bool = True
    o_bias: bool = True
    mlp_bias: bool = True
    activation: str = "relu"
    tie_embeddings: bool = True

    @property
    def table_width(self) -> int:
        return self.word_embed

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        embed, heads = hf["hidden_size"], hf["num_attention_heads"]
        bias, pre_norm = flag(hf, "enable_bias", True), flag(hf, "do_layer_norm_before", True)
        affine = flag(hf, "layer_norm_elementwise_affine", True)
        return cls(
            **(
                dict(
                    vocab=hf["vocab_size"],
                    embed=embed,
                    word_embed=hf.get("word_embed_proj_dim") or embed,
                    num_layers=hf["num_hidden_layers"],
                    heads=heads,
                    kv_heads=heads,
                    head_dim=embed // heads,
                    mlp=hf["ffn_dim"],
                    max_len=hf["max_position_embeddings"],
                    post_norm=not pre_norm,
                    final_norm=pre_norm and not flag(hf, "_remove_final_layer_norm"),
                    norm="layer" if affine else "layer_plain",
                    qkv_bias=bias,
                    o_bias=bias,
                    mlp_bias=bias,
                    activation=hf.get("activation_function") or cls.activation,
                    tie_embeddings=flag(hf, "tie_word_embeddings", cls.tie_embeddings),
                )
                | fields
            )
        )


class DecoderLayer(transformer.DecoderLayer):
    FeedForward = PlainMLP

    def __init__(self, cfg: Config, window: int | None, **kwargs: Any):
        super().__init__(cfg, window, **kwargs)
        self.post_norm = cfg.post_norm

    def __call__(self, x: Float[Array, "*t embed"], sin_cos, cache):
        if not self.post_norm:
            return super().__call__(x, sin_cos, cache)
        h, cache = self.attn(x, sin_cos, cache)
        x = self.attn_norm(x + h)
        return self.mlp_norm(x + self.mlp(x)), cache


class Model(transformer.Decoder):
    Config = Config
    Layer = DecoderLayer

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        embed, word = cfg.embed, cfg.word_embed
        self.positions = param(rngs, cfg.dtype, fan_in=embed, positions=cfg.max_len + OFFSET, embed=embed)
        if not cfg.final_norm:
            self.norm = None
        narrow = word != embed
        self.project_in = param(rngs, cfg.dtype, fan_in=word, word_embed=word, embed=embed) if narrow else None
        self.project_out = param(rngs, cfg.dtype, fan_in=embed, embed=embed, word_embed=word) if narrow else None

    def embed_tokens(self, tokens: Int[Array, "*t"], positions: Int[Array, "*t"]) -> Float[Array, "*t embed"]:
        x = super().embed_tokens(tokens, positions)
        if self.project_in is not None:
            x = einsum("...d,de->...e", x, self.project_in)
        return x + self.positions[...][positions + OFFSET]

    def logits(self, hidden: Float[Array, "*t embed"]) -> Float[Array, "*t vocab"]:
        if self.project_out is not None:
            hidden = einsum("...d,de->...e", hidden, self.project_out)
        return super().logits(hidden)


def _norm(tensor: str, path: str) -> Table:
    return norm(tensor, path) | {f"{tensor}.bias": Weight(f"{path}.bias", "d -> d")}


_LAYER = "model.decoder.layers.{i}."
WEIGHTS = {
    "model.decoder.embed_tokens.weight": Weight("embed", "v d -> v d"),
    "model.decoder.embed_positions.weight": Weight("positions", "p d -> p d"),
    **attention(_LAYER + "self_attn.", "out_proj"),
    _LAYER + "fc1.weight": Weight("layers.{i}.mlp.up", "f d -> d f"),
    _LAYER + "fc2.weight": Weight("layers.{i}.mlp.down", "d f -> f d"),
    "lm_head.weight": Weight("lm_head", "v d -> d v"),
}
OPTIONAL_WEIGHTS = {
    **attention_biases(_LAYER + "self_attn.", "out_proj"),
    _LAYER + "fc1.bias": Weight("layers.{i}.mlp.up_bias", "f -> f"),
    _LAYER + "fc2.bias": Weight("layers.{i}.mlp.down_bias", "d -> d"),
    **_norm(_LAYER + "self_attn_layer_norm", "layers.{i}.attn_norm"),
    **_norm(_LAYER + "final_layer_norm", "layers.{i}.mlp_norm"),
    **_norm("model.decoder.final_layer_norm", "norm"),
    "model.decoder.project_in.weight": Weight("project_in", "e d -> d e"),
    "model.decoder.project_out.weight": Weight("project_out", "d e -> e d"),
}
