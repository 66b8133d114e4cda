"""BERT (arXiv 1810.04805): an encoder with learned positions and token types, and norms after each residual."""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from jaxllm.models import transformer
from jaxllm.models.context import StepContext
from jaxllm.models.layers import LayerSpec, PlainMLP, make_norm
from jaxllm.models.linear import Embedding, Linear
from jaxllm.models.weights import Table, Weight, affine_norm, attention_out, qkv_bias_piece, qkv_piece


@dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    """`token_types` are the rows of their table. Where the model classifies, the tokens after the first `sep_token_id`
    of a prompt, if there is one, are of type 1: those of a pair's second text. All others are of type 0."""

    REFUSED = ("is_decoder", "add_cross_attention")

    token_types: int = 2
    sep_token_id: int | None = field(default=None, metadata={"help": "None: both texts of a pair are of type 0"})
    position_offset: int = 0  # the row of the first position
    norm: str = "layer"
    eps: float = 1e-12
    qkv_bias: bool = True
    o_bias: bool = True
    mlp_bias: bool = True
    activation: str = "gelu"
    causal: bool = False
    task: str = "embed"

    @property
    def pooling(self) -> str:
        return "cls" if self.task == "classify" else "mean"

    @property
    def has_pairs(self) -> bool:
        """Whether the texts of a pair may be of different types."""
        return self.task == "classify" and self.token_types > 1

    @classmethod
    def from_hf(cls, hf: dict, *, position_offset: int = 0, **fields: Any) -> "Config":
        for key in cls.REFUSED:
            if hf.get(key):
                raise ValueError(f"{key}={hf[key]!r:.100} is not supported for this family")
        if hf.get("position_embedding_type", "absolute") != "absolute":
            raise ValueError(f"position_embedding_type={hf['position_embedding_type']!r:.100} is not supported")
        embed, heads = hf["hidden_size"], hf["num_attention_heads"]
        own = dict(
            vocab=hf["vocab_size"],
            embed=embed,
            layers=(LayerSpec(feed_forward=PlainMLP),) * hf["num_hidden_layers"],
            heads=heads,
            kv_heads=heads,
            head_dim=embed // heads,
            mlp=hf["intermediate_size"],
            max_len=hf["max_position_embeddings"] - position_offset,
            position_offset=position_offset,
            token_types=hf.get("type_vocab_size", cls.token_types),
            sep_token_id=hf.get("sep_token_id"),
            eps=hf.get("layer_norm_eps", cls.eps),
            activation=hf.get("hidden_act") or cls.activation,
        )
        return cls(**(own | fields))


class Model(transformer.Backbone):
    Config = Config
    Layer = transformer.PostNormLayer

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        embed, pooled, options = {"embed": cfg.embed}, {"pooled": cfg.embed}, {"dtype": cfg.dtype, "rngs": rngs}
        self.norm = None
        self.positions = Embedding.random({"positions": cfg.max_len + cfg.position_offset}, embed, **options)
        self.token_types = Embedding.random({"token_types": cfg.token_types}, embed, **options)
        self.embed_norm = make_norm(cfg, cfg.embed)
        if cfg.task == "classify":
            self.pooler = Linear.random(embed, pooled, bias=True, **options)
            self.classifier = Linear.random(pooled, {"labels": len(cfg.labels)}, bias=True, **options)

    def embed_tokens(self, tokens: Int[Array, "*t"], ctx: StepContext) -> Float[Array, "*t embed"]:
        x = super().embed_tokens(tokens, ctx) + self.positions(ctx.positions + self.cfg.position_offset)
        if self.cfg.has_pairs and self.cfg.sep_token_id is not None:
            types = token_types(tokens, ctx.positions, self.cfg.sep_token_id)
        else:
            types = jnp.zeros_like(tokens)
        return self.embed_norm(x + self.token_types(types))

    def head(self, pooled: Float[Array, "rows embed"], ctx: StepContext) -> Float32[Array, "rows labels"]:
        """Scores of the labels, of the first tokens' hidden states, where the task is "classify"."""
        x = jnp.tanh(self.pooler(pooled.astype(self.cfg.dtype), ctx))
        return self.classifier(x, ctx, out_dtype=jnp.float32)


def token_types(tokens: Int[Array, "*t"], positions: Int[Array, "*t"], sep: int) -> Int[Array, "*t"]:
    """0 up to the first `sep` of each text, 1 after it. All of a text is among the tokens, which follow each other."""
    is_sep = (tokens == sep).astype(jnp.int32)
    before = jnp.cumsum(is_sep, axis=-1) - is_sep  # separators before each token, those of other texts too
    index = jnp.broadcast_to(jnp.arange(tokens.shape[-1], dtype=jnp.int32), tokens.shape)
    before_text = jnp.take_along_axis(before, index - positions, axis=-1)
    return (before > before_text).astype(jnp.int32)


def layout(prefix: str, pooler: str, classifier: str) -> Table:
    """The tensors of a model whose own begin with `prefix`, and its head's."""
    layer, own = prefix + "encoder.layer.{i}.", prefix + "embeddings."
    projections = {"query": "q", "key": "k", "value": "v"}
    return {
        own + "word_embeddings.weight": Weight("embed.weight", "v d -> v d"),
        own + "position_embeddings.weight": Weight("positions.weight", "p d -> p d"),
        own + "token_type_embeddings.weight": Weight("token_types.weight", "n d -> n d"),
        **affine_norm(own + "LayerNorm", "embed_norm"),
        **{f"{layer}attention.self.{name}.weight": qkv_piece(to) for name, to in projections.items()},
        **{f"{layer}attention.self.{name}.bias": qkv_bias_piece(to) for name, to in projections.items()},
        **attention_out(layer + "attention.output.dense"),
        layer + "attention.output.dense.bias": Weight("layers.{i}.attn.o.bias", "d -> d"),
        **affine_norm(layer + "attention.output.LayerNorm", "layers.{i}.attn_norm"),
        layer + "intermediate.dense.weight": Weight("layers.{i}.mlp.up.weight", "f d -> d f"),
        layer + "intermediate.dense.bias": Weight("layers.{i}.mlp.up.bias", "f -> f"),
        layer + "output.dense.weight": Weight("layers.{i}.mlp.down.weight", "d f -> f d"),
        layer + "output.dense.bias": Weight("layers.{i}.mlp.down.bias", "d -> d"),
        **affine_norm(layer + "output.LayerNorm", "layers.{i}.mlp_norm"),
        pooler + ".weight": Weight("pooler.weight", "p d -> d p"),
        pooler + ".bias": Weight("pooler.bias", "p -> p"),
        classifier + ".weight": Weight("classifier.weight", "c p -> p c"),
        classifier + ".bias": Weight("classifier.bias", "c -> c"),
    }


PREFIX = "bert."
WEIGHTS = layout(PREFIX, PREFIX + "pooler.dense", "classifier")
IGNORED = r"(bert\.)?embeddings\.position_ids|cls\..*"  # what is computed, and heads of pre-training
