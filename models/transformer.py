"""The pre-norm decoder that most families are: configuration, layer and model, for their files to compose."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.layers import ACTIVATIONS, MLP, NORMS, Attention, einsum, make_norm, param
from jaxllm.models.rope import Rope, rope_from_hf

Params = Any  # an `nnx.State` of arrays, or of their shapes (its own annotation trips run-time type checkers)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes in elements; `max_len` in tokens. Raises `ValueError` for values that don't go together."""

    REFUSED: ClassVar[tuple[str, ...]] = ()  # keys of `config.json` that the family's layers do not support
    PARTIAL_ROPE: ClassVar[bool] = False  # whether a rope may rotate only some features of a head

    vocab: int
    embed: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    rope: Rope | None
    max_len: int
    eps: float = 1e-6
    norm: str = field(default="rms", metadata={"help": f"one of {sorted(NORMS)}"})
    activation: str = field(default="silu", metadata={"help": f"one of {sorted(ACTIVATIONS)}"})
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    query_scale: float | None = field(default=None, metadata={"help": "None: head_dim ** -0.5"})
    attn_soft_cap: float | None = None
    windows: tuple[int | None, ...] = field(default=(), metadata={"help": "of each layer, in tokens; (): none"})
    local_rope: Rope | None = field(default=None, metadata={"help": "for layers with a window; None: `rope`"})
    tie_embeddings: bool = False
    dtype: Any = field(default=jnp.float32, metadata={"help": "of parameters and activations"})

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} layer types or windows are given for {self.num_layers} layers")
        for name, known in (("activation", ACTIVATIONS), ("norm", NORMS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r:.100} is not supported; supported: {sorted(known)}")
        for rope in filter(None, self.layer_ropes):
            rope.check(self.head_dim)

    @property
    def table_width(self) -> int:
        """Of the embedding table."""
        return self.embed

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        return self.windows or (None,) * self.num_layers

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        local = self.local_rope or self.rope
        return tuple(self.rope if window is None else local for window in self.layer_windows)

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        """From the keys of a checked `config.json` that most families share; `fields` go before them. KeyError for a
        missing one, ValueError for a value that is not supported."""
        for key in cls.REFUSED:
            if hf.get(key):
                raise ValueError(f"{key}={hf[key]!r:.100} is not supported for this family")
        rope = fields["rope"] if "rope" in fields else rope_from_hf(hf)
        if rope.fraction != 1 and not cls.PARTIAL_ROPE:
            raise ValueError(f"partial_rotary_factor={rope.fraction} is not supported for this family, only 1")
        shared = dict(
            vocab=hf["vocab_size"],
            embed=hf["hidden_size"],
            num_layers=hf["num_hidden_layers"],
            heads=hf["num_attention_heads"],
            kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            mlp=hf["intermediate_size"],
            rope=rope,
            max_len=rope.reach(hf["max_position_embeddings"]),
            eps=hf.get("rms_norm_eps", cls.eps),
            activation=hf.get("hidden_act") or cls.activation,
            tie_embeddings=flag(hf, "tie_word_embeddings", cls.tie_embeddings),
        )
        return cls(**(shared | fields))


def flag(hf: dict, key: str, default: bool = False) -> bool:
    """`hf[key]`, where absent and null mean `default`."""
    return default if hf.get(key) is None else hf[key]


def attention_biases(hf: dict) -> dict[str, bool]:
    """The bias fields of families with one `attention_bias` for all projections."""
    return dict.fromkeys(("qkv_bias", "o_bias"), flag(hf, "attention_bias"))


def windows_of(layer_types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer. ValueError for a type that is not supported, or that has no window."""
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer_types has {kind!r:.100}; only full_attention and sliding_attention are supported")
    if window is None and "sliding_attention" in layer_types:
        raise ValueError("layer_types has 'sliding_attention', but sliding_window is not set or not used")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


class DecoderLayer(nnx.Module):
    FeedForward: ClassVar[type[nnx.Module]] = MLP

    def __init__(self, cfg: Config, window: int | None, *, rngs: nnx.Rngs):
        self.attn_norm = make_norm(cfg, cfg.embed)
        self.attn = Attention(cfg, window, rngs=rngs)
        self.mlp_norm = make_norm(cfg, cfg.embed)
        self.mlp = self.FeedForward(cfg, rngs=rngs)

    def __call__(self, x: Float[Array, "*t embed"], sin_cos, cache):
        h, cache = self.attn(self.attn_norm(x), sin_cos, cache)
        x = x + h
        return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(nnx.Module):
    """A causal language model. Families subclass it to give their `Config` and `Layer`."""

    Layer: ClassVar[type[nnx.Module]] = DecoderLayer

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        width = cfg.table_width
        self.embed = param(rngs, cfg.dtype, fan_in=width, vocab=cfg.vocab, embed=width)
        self.layers = nnx.List([self.Layer(cfg, window, rngs=rngs) for window in cfg.layer_windows])
        self.norm = make_norm(cfg, cfg.embed)
        if not cfg.tie_embeddings:
            self.lm_head = param(rngs, cfg.dtype, fan_in=width, embed=width, vocab=cfg.vocab)

    def embed_tokens(self, tokens: Int[Array, "*t"], positions: Int[Array, "*t"]) -> Float[Array, "*t embed"]:
        """The first layer's input."""
        return self.embed[...][tokens]

    def __call__(
        self, tokens: Int[Array, "*t"], positions: Int[Array, "*t"], caches: list
    ) -> tuple[Float[Array, "*t embed"], list]:
        """Final hidden states, and the caches after these tokens (one a layer, `Paged` or `Dense`)."""
        x = self.embed_tokens(tokens, positions)
        ropes = self.cfg.layer_ropes
        sin_cos = {
            rope: None if rope is None else rope.sin_cos(positions, self.cfg.head_dim, self.cfg.max_len)
            for rope in dict.fromkeys(ropes)
        }
        caches = list(caches)
        for i, layer in enumerate(self.layers):
            x, caches[i] = layer(x, sin_cos[ropes[i]], caches[i])
        return x if self.norm is None else self.norm(x), caches

    def logits(self, hidden: Float[Array, "*t embed"]) -> Float[Array, "*t vocab"]:
        """Unnormalised log-probabilities in float32, never rounded to the parameters' dtype: in bfloat16 many tokens
        would share the best one."""
        if self.cfg.tie_embeddings:
            return einsum("...d,vd->...v", hidden, self.embed, out_dtype=jnp.float32)
        return einsum("...d,dv->...v", hidden, self.lm_head, out_dtype=jnp.float32)


def abstract(model_cls: type[Decoder], cfg: Config) -> Decoder:
    """A model of `ShapeDtypeStruct`s, which take no memory."""
    return nnx.eval_shape(lambda: model_cls(cfg, rngs=nnx.Rngs(params=jax.random.key(0))))
