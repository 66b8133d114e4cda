"""The pre-norm decoder that most families are: configuration, layer and model, for their files to compose."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.layers import MLP, Attention, RMSNorm, Rope, einsum, param

Params = Any  # an `nnx.State` of arrays, or of their shapes (its own annotation trips run-time type checkers)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes in elements; `max_len` in tokens."""

    REFUSED: ClassVar[tuple[str, ...]] = ()  # flags of `config.json` that the family's layers don't have

    vocab: int
    embed: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    rope: Rope
    max_len: int
    eps: float = 1e-6
    qk_norm: bool = False
    tie_embeddings: bool = False
    dtype: Any = field(default=jnp.float32, metadata={"help": "of parameters and activations"})

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        """From the keys of a `config.json` that all these families share. KeyError for a missing one, ValueError for
        a value that is not supported."""
        for key in cls.REFUSED:
            if hf.get(key):
                raise ValueError(f"{key}=true is not supported for this family")
        if hf.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act={hf['hidden_act']!r} is not supported, only 'silu'")
        return cls(
            vocab=hf["vocab_size"], embed=hf["hidden_size"], num_layers=hf["num_hidden_layers"],
            heads=hf["num_attention_heads"],
            kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            mlp=hf["intermediate_size"], rope=Rope.from_hf(hf), max_len=hf["max_position_embeddings"],
            eps=hf.get("rms_norm_eps", 1e-6), tie_embeddings=hf.get("tie_word_embeddings", False), **fields,
        )  # fmt: skip


class DecoderLayer(nnx.Module):
    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(cfg.embed, cfg.eps, dtype=cfg.dtype)
        self.attn = Attention(cfg, rngs=rngs)
        self.mlp_norm = RMSNorm(cfg.embed, cfg.eps, dtype=cfg.dtype)
        self.mlp = MLP(cfg, rngs=rngs)

    def __call__(self, x: Float[Array, "*t embed"], sin_cos, cache):
        h, cache = self.attn(self.attn_norm(x), sin_cos, cache)
        x = x + h
        return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(nnx.Module):
    """A causal language model. Families subclass it to give their `Config`, `Layer` and `WEIGHTS`."""

    Layer: ClassVar[type[nnx.Module]] = DecoderLayer

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = param(rngs, cfg.dtype, fan_in=cfg.embed, vocab=cfg.vocab, embed=cfg.embed)
        self.layers = nnx.List([self.Layer(cfg, rngs=rngs) for _ in range(cfg.num_layers)])
        self.norm = RMSNorm(cfg.embed, cfg.eps, dtype=cfg.dtype)
        if not cfg.tie_embeddings:
            self.lm_head = param(rngs, cfg.dtype, fan_in=cfg.embed, embed=cfg.embed, vocab=cfg.vocab)

    def __call__(
        self, tokens: Int[Array, "*t"], positions: Int[Array, "*t"], caches: list
    ) -> tuple[Float[Array, "*t embed"], list]:
        """Final hidden states, and the caches after these tokens (one a layer, `Paged` or `Dense`)."""
        x = self.embed[...][tokens]
        sin_cos = self.cfg.rope.sin_cos(positions, self.cfg.head_dim)
        caches = list(caches)
        for i, layer in enumerate(self.layers):
            x, caches[i] = layer(x, sin_cos, caches[i])
        return self.norm(x), caches

    def logits(self, hidden: Float[Array, "*t embed"]) -> Float[Array, "*t vocab"]:
        """Unnormalised log-probabilities in float32."""
        if self.cfg.tie_embeddings:
            return einsum("...d,vd->...v", hidden, self.embed).astype(jnp.float32)
        return einsum("...d,dv->...v", hidden, self.lm_head).astype(jnp.float32)


def abstract(model_cls: type[Decoder], cfg: Config) -> Decoder:
    """A model of `ShapeDtypeStruct`s, which costs no memory."""
    return nnx.eval_shape(lambda: model_cls(cfg, rngs=nnx.Rngs(params=jax.random.key(0))))
