"""OPT (arXiv 2205.01068): learned positions, LayerNorm, biases everywhere, an MLP without gate; opt-350m's variant."""

from dataclasses import dataclass
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models import transformer
from jaxllm.models.context import StepContext
from jaxllm.models.layers import LayerSpec, PlainMLP
from jaxllm.models.linear import Embedding, Linear
from jaxllm.models.transformer import flag
from jaxllm.models.weights import Weight, affine_norm, attention, attention_biases

OFFSET = 2  # row of position 0 in the table


@dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    """`word_embed` is the width of the embedding table, which is projected to `embed` and back if they differ.
    `post_norm` normalises after each block's residual, and not at the end."""

    word_embed: int
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
                    layers=(LayerSpec(feed_forward=PlainMLP),) * hf["num_hidden_layers"],
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


class DecoderLayer(transformer.PostNormLayer):
    def __init__(self, cfg: Config, spec: LayerSpec, **kwargs: Any):
        super().__init__(cfg, spec, **kwargs)
        self.post_norm = cfg.post_norm

    def __call__(self, x: Float[Array, "*t embed"], ctx: StepContext, sin_cos, cache):
        order = transformer.PostNormLayer if self.post_norm else transformer.DecoderLayer
        return order.__call__(self, x, ctx, sin_cos, cache)


class Model(transformer.Decoder):
    Config = Config
    Layer = DecoderLayer

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        embed, word, options = {"embed": cfg.embed}, {"word_embed": cfg.word_embed}, {"dtype": cfg.dtype, "rngs": rngs}
        self.positions = Embedding.random({"positions": cfg.max_len + OFFSET}, embed, **options)
        if not cfg.final_norm:
            self.norm = None
        narrow = cfg.word_embed != cfg.embed
        self.project_in = Linear.random(word, embed, **options) if narrow else None
        self.project_out = Linear.random(embed, word, **options) if narrow else None

    def embed_tokens(self, tokens: Int[Array, "*t"], ctx: StepContext) -> Float[Array, "*t embed"]:
        x = super().embed_tokens(tokens, ctx)
        if self.project_in is not None:
            x = self.project_in(x, ctx)
        return ctx.add(x, self.positions(ctx.positions + OFFSET))

    def logits(self, hidden: Float[Array, "*t embed"], ctx: StepContext) -> Float[Array, "*t vocab"]:
        if self.project_out is not None:
            hidden = self.project_out(hidden, ctx)
        return super().logits(hidden, ctx)


_LAYER = "model.decoder.layers.{i}."
WEIGHTS = {
    "model.decoder.embed_tokens.weight": Weight("embed.weight", "v d -> v d"),
    "model.decoder.embed_positions.weight": Weight("positions.weight", "p d -> p d"),
    **attention(_LAYER + "self_attn.", "out_proj"),
    _LAYER + "fc1.weight": Weight("layers.{i}.mlp.up.weight", "f d -> d f"),
    _LAYER + "fc2.weight": Weight("layers.{i}.mlp.down.weight", "d f -> f d"),
    "lm_head.weight": Weight("lm_head.weight", "v d -> d v"),
}
OPTIONAL_WEIGHTS = {
    **attention_biases(_LAYER + "self_attn.", "out_proj"),
    _LAYER + "fc1.bias": Weight("layers.{i}.mlp.up.bias", "f -> f"),
    _LAYER + "fc2.bias": Weight("layers.{i}.mlp.down.bias", "d -> d"),
    **affine_norm(_LAYER + "self_attn_layer_norm", "layers.{i}.attn_norm"),
    **affine_norm(_LAYER + "final_layer_norm", "layers.{i}.mlp_norm"),
    **affine_norm("model.decoder.final_layer_norm", "norm"),
    "model.decoder.project_in.weight": Weight("project_in.weight", "e d -> d e"),
    "model.decoder.project_out.weight": Weight("project_out.weight", "d e -> e d"),
}
