"""ModernBERT (arXiv 2412.13663): an encoder with rope, local and global layers in turn, and a gated MLP."""

from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from jaxllm.models import transformer
from jaxllm.models.context import StepContext
from jaxllm.models.layers import ACTIVATIONS, LayerSpec, make_norm
from jaxllm.models.linear import Linear
from jaxllm.models.rope import ropes_of
from jaxllm.models.transformer import flag
from jaxllm.models.weights import Table, Weight, attention_out, norm, qkv_bias_piece, qkv_piece


@dataclass(frozen=True, kw_only=True)
class EncoderSpec(LayerSpec):
    normalises_input: bool = field(default=True, metadata={"help": "no: it is the embeddings' norm that does"})


@dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    """`head_*` are those of the classifier's dense layer."""

    norm: str = "layer_no_bias"
    eps: float = 1e-5
    activation: str = "gelu"
    causal: bool = False
    task: str = "embed"
    head_pooling: str = "cls"
    head_bias: bool = False
    head_activation: str = "gelu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_pooling not in ("cls", "mean"):
            raise ValueError(f"classifier_pooling={self.head_pooling!r:.100} is not supported; supported: cls, mean")

    @property
    def pooling(self) -> str:
        return self.head_pooling if self.task == "classify" else "mean"

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        period = hf.get("global_attn_every_n_layers") or 3
        pattern = ("full_attention",) + ("sliding_attention",) * (period - 1)
        types = hf.get("layer_types") or tuple(islice(cycle(pattern), hf["num_hidden_layers"]))
        thetas = {"theta": hf.get("global_rope_theta", 1.6e5), "local_theta": hf.get("local_rope_theta", 1e4)}
        ropes = ropes_of(hf, **thetas)
        local = hf.get("local_attention", 128) // 2 + 1  # the file counts both sides of its window together
        options = dict(
            windows=transformer.windows_of(types, local),
            rope=ropes["full_attention"],
            local_rope=ropes["sliding_attention"],
            norm="layer" if flag(hf, "norm_bias") else cls.norm,
            eps=hf.get("norm_eps", cls.eps),
            activation=hf.get("hidden_activation") or cls.activation,
            mlp_bias=flag(hf, "mlp_bias"),
            causal=False,
            head_pooling=hf.get("classifier_pooling", cls.head_pooling),
            head_bias=flag(hf, "classifier_bias"),
            head_activation=hf.get("classifier_activation") or cls.head_activation,
        )
        cfg = super().from_hf(hf, **(transformer.attention_biases(hf) | options | fields))
        specs = [
            EncoderSpec(window=layer.window, rope=layer.rope, normalises_input=i > 0)
            for i, layer in enumerate(cfg.layers)
        ]
        return cls(**(vars(cfg) | {"layers": tuple(specs)}))


class EncoderLayer(transformer.DecoderLayer):
    def __init__(self, cfg: Config, spec: EncoderSpec, **kwargs: Any):
        super().__init__(cfg, spec, **kwargs)
        if not spec.normalises_input:
            self.attn_norm = None

    def __call__(self, x: Float[Array, "*t embed"], ctx: StepContext, sin_cos, cache):
        h, cache = self.attn(x if self.attn_norm is None else self.attn_norm(x, ctx), ctx, sin_cos, cache)
        x = x + h
        return x + self.mlp(self.mlp_norm(x, ctx), ctx), cache


class Model(transformer.Backbone):
    Config = Config
    Layer = EncoderLayer

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        self.embed_norm = make_norm(cfg, cfg.embed)
        if cfg.task == "classify":
            pooled, options = {"pooled": cfg.embed}, {"dtype": cfg.dtype, "rngs": rngs}
            self.pooler = Linear.random({"embed": cfg.embed}, pooled, bias=cfg.head_bias, **options)
            self.pooler_norm = make_norm(cfg, cfg.embed)
            self.classifier = Linear.random(pooled, {"labels": len(cfg.labels)}, bias=True, **options)

    def embed_tokens(self, tokens: Int[Array, "*t"], ctx: StepContext) -> Float[Array, "*t embed"]:
        return self.embed_norm(super().embed_tokens(tokens, ctx))

    def head(self, pooled: Float[Array, "rows embed"], ctx: StepContext) -> Float32[Array, "rows labels"]:
        """Scores of the labels, of texts' pooled hidden states, where the task is "classify"."""
        x = ACTIVATIONS[self.cfg.head_activation](self.pooler(pooled.astype(self.cfg.dtype), ctx))
        return self.classifier(self.pooler_norm(x), ctx, out_dtype=jnp.float32)


def _norm_bias(tensor: str, path: str) -> Table:
    return {f"{tensor}.bias": Weight(f"{path}.bias", "d -> d")}


PREFIX = "model."
_LAYER = PREFIX + "layers.{i}."
_NORMS = {
    PREFIX + "embeddings.norm": "embed_norm",
    _LAYER + "attn_norm": "layers.{i}.attn_norm",
    _LAYER + "mlp_norm": "layers.{i}.mlp_norm",
    PREFIX + "final_norm": "norm",
    "head.norm": "pooler_norm",
}
WEIGHTS = {
    PREFIX + "embeddings.tok_embeddings.weight": Weight("embed.weight", "v d -> v d"),
    **{name: weight for tensor, path in _NORMS.items() for name, weight in norm(tensor, path).items()},
    _LAYER + "attn.Wqkv.weight": (qkv_piece("q"), qkv_piece("k"), qkv_piece("v")),
    **attention_out(_LAYER + "attn.Wo"),
    _LAYER + "mlp.Wi.weight": Weight("layers.{i}.mlp.gate_up.weight", "(u f) d -> d u f"),
    _LAYER + "mlp.Wo.weight": Weight("layers.{i}.mlp.down.weight", "d f -> f d"),
    "head.dense.weight": Weight("pooler.weight", "p d -> d p"),
    "classifier.weight": Weight("classifier.weight", "c p -> p c"),
    "classifier.bias": Weight("classifier.bias", "c -> c"),
}
OPTIONAL_WEIGHTS = {
    **{name: weight for tensor, path in _NORMS.items() for name, weight in _norm_bias(tensor, path).items()},
    _LAYER + "attn.Wqkv.bias": (qkv_bias_piece("q"), qkv_bias_piece("k"), qkv_bias_piece("v")),
    _LAYER + "attn.Wo.bias": Weight("layers.{i}.attn.o.bias", "d -> d"),
    _LAYER + "mlp.Wi.bias": Weight("layers.{i}.mlp.gate_up.bias", "(u f) -> u f"),
    _LAYER + "mlp.Wo.bias": Weight("layers.{i}.mlp.down.bias", "d -> d"),
    "head.dense.bias": Weight("pooler.bias", "p -> p"),
}
IGNORED = r"decoder\..*|head\.dense\.bias|head\.norm\.bias"  # of the head that fills gaps
