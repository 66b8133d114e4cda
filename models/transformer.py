"""What most families are, decoders and encoders: configuration, layers and models, for their files to compose."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from jaxllm.models.cache import check_segments
from jaxllm.models.cache_spec import CacheSpec
from jaxllm.models.context import StepContext
from jaxllm.models.layers import ACTIVATIONS, NORMS, LayerSpec, make_norm
from jaxllm.models.linear import Embedding, Linear
from jaxllm.models.rope import Rope, rope_from_hf
from jaxllm.models.tasks import TASKS, is_causal
from jaxllm.models.traced_once import TracedOnce, plain_call

Params = Any  # an `nnx.State` of arrays, or of their shapes (its own annotation trips run-time type checkers)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes in elements; `max_len` in tokens. Raises `ValueError` for values that don't go together."""

    REFUSED: ClassVar[tuple[str, ...]] = ()  # keys of `config.json` that the family's layers do not support
    FIXED: ClassVar[Mapping[str, Any]] = {}  # other keys, and the one value of each that is
    PARTIAL_ROPE: ClassVar[bool] = False  # whether a rope may rotate only some features of a head
    LIMIT: ClassVar[str] = "max_position_embeddings and rope scaling of its config.json"  # what `max_len` comes from

    vocab: int
    embed: int
    layers: tuple[LayerSpec, ...]
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    max_len: int
    eps: float = 1e-6
    norm: str = field(default="rms", metadata={"help": f"one of {sorted(NORMS)}"})
    activation: str = field(default="silu", metadata={"help": f"one of {sorted(ACTIVATIONS)}"})
    qk_norm: bool | str = field(default=False, metadata={"help": 'True: of each head; "all heads": of all together'})
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    query_scale: float | None = field(default=None, metadata={"help": "None: head_dim ** -0.5"})
    attn_soft_cap: float | None = None
    has_sinks: bool = field(default=False, metadata={"help": "a score of each head that no token has"})
    clip_qkv: float | None = field(default=None, metadata={"help": "the most that queries, keys and values can be"})
    tie_embeddings: bool = False
    causal: bool = field(default=True, metadata={"help": "whether a token sees no later ones"})
    task: str = field(default="generate", metadata={"help": f"one of {TASKS}; see jaxllm.models.tasks"})
    labels: tuple[str, ...] = field(default=(), metadata={"help": "what the task classify tells apart"})
    label_tokens: tuple[int, int] | None = field(
        default=None,
        metadata={"help": "a decoder's one label is how much likelier the second of these is than the first"},
    )
    problem_type: str | None = field(default=None, metadata={"help": "what labels mean, as in config.json"})
    dtype: Any = field(default=jnp.float32, metadata={"help": "of parameters and activations"})

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if not self.layers:
            raise ValueError("layers is empty; give a LayerSpec for each layer")
        for name, known in (("activation", ACTIVATIONS), ("norm", NORMS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r:.100} is not supported; supported: {sorted(known)}")
        for rope in filter(None, dict.fromkeys(layer.rope for layer in self.layers)):
            rope.check(self.head_dim)
        if self.task not in TASKS:
            raise ValueError(f"task={self.task!r:.100} is unknown; choose one of {TASKS}")
        if (self.task == "classify") != bool(self.labels):
            raise ValueError(f"task={self.task!r} and {len(self.labels)} labels: classify needs some, others take none")
        if self.label_tokens is not None and len(self.labels) != 1:
            raise ValueError(f"label_tokens={self.label_tokens} make one label, not {len(self.labels)}")
        if self.task == "generate" and not self.causal:
            raise ValueError("a model whose tokens see later ones (causal=False) can't generate; give task='embed'")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_tied_head(self) -> bool:
        """Whether the embedding table is the head that chooses tokens."""
        return self.tie_embeddings and self.task == "generate"

    @property
    def table_width(self) -> int:
        """Of the embedding table."""
        return self.embed

    @property
    def pooling(self) -> str:
        """How hidden states of a text become one vector: "last", "mean" or "cls". For embedding, files of
        sentence-transformers go before it."""
        return "last"

    @classmethod
    def from_hf(
        cls,
        hf: dict,
        *,
        windows: Sequence[int | None] = (),
        rope: Rope | None = None,
        local_rope: Rope | None = None,
        feed_forwards: Sequence[Callable[..., nnx.Module]] = (),
        **fields: Any,
    ) -> "Config":
        """From the keys of a checked `config.json` that most families share; `fields` go before them.

        `windows` are those of the layers, in tokens (none given: no layer has one), `rope` stands for what the file
        says, and `local_rope` for `rope` in layers with a window. `feed_forwards` are those of the layers, where they
        are not `MLP`. KeyError for a missing key, ValueError for a value
        that is not supported.
        """
        for key in cls.REFUSED:
            if hf.get(key):
                raise ValueError(f"{key}={hf[key]!r:.100} is not supported for this family")
        for key, value in cls.FIXED.items():
            if hf.get(key) not in (None, value):
                raise ValueError(f"{key}={hf[key]!r:.100} is not supported for this family, only {value!r}")
        rope = rope or rope_from_hf(hf)
        if rope.fraction != 1 and not cls.PARTIAL_ROPE:
            raise ValueError(f"partial_rotary_factor={rope.fraction} is not supported for this family, only 1")
        num_layers = hf["num_hidden_layers"]
        if windows and len(windows) != num_layers:
            raise ValueError(f"{len(windows)} layer types or windows are given for {num_layers} layers")
        layers = layers_of(windows or (None,) * num_layers, rope, local_rope)
        if feed_forwards:
            layers = tuple(replace(spec, feed_forward=one) for spec, one in zip(layers, feed_forwards, strict=True))
        shared = dict(
            vocab=hf["vocab_size"],
            embed=hf["hidden_size"],
            layers=layers,
            heads=hf["num_attention_heads"],
            kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            mlp=hf["intermediate_size"],
            max_len=rope.reach(hf["max_position_embeddings"]),
            eps=hf.get("rms_norm_eps", cls.eps),
            activation=hf.get("hidden_act") or cls.activation,
            tie_embeddings=flag(hf, "tie_word_embeddings", cls.tie_embeddings),
            causal=is_causal(hf),
        )
        return cls(**(shared | fields))


def layers_of(
    windows: Sequence[int | None], rope: Rope | None, local_rope: Rope | None = None
) -> tuple[LayerSpec, ...]:
    """Layers with these windows, in tokens; those that have one take `local_rope`, if it is given, for `rope`."""
    local = local_rope or rope
    return tuple(LayerSpec(window=window, rope=rope if window is None else local) for window in windows)


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
    def __init__(self, cfg: Config, spec: LayerSpec, *, rngs: nnx.Rngs):
        self.attn_norm = make_norm(cfg, cfg.embed)
        self.attn = spec.attention(cfg, spec, rngs=rngs)
        self.mlp_norm = make_norm(cfg, cfg.embed)
        self.mlp = spec.feed_forward(cfg, rngs=rngs)

    def __call__(self, x: Float[Array, "*t embed"], ctx: StepContext, sin_cos, cache):
        h, cache = self.attn(self.attn_norm(x, ctx), ctx, sin_cos, cache)

        def rest(x: Array, h: Array, ctx: StepContext) -> Array:
            x, h = self.mlp_norm.add(x, h, ctx)
            return ctx.add(x, self.mlp(h, ctx))

        return ctx.finish(rest, x, h), cache


class PostNormLayer(DecoderLayer):
    """Normalises after each block's residual."""

    def __call__(self, x: Float[Array, "*t embed"], ctx: StepContext, sin_cos, cache):
        h, cache = self.attn(x, ctx, sin_cos, cache)
        _, x = self.attn_norm.add(x, h, ctx)
        return self.mlp_norm.add(x, self.mlp(x, ctx), ctx)[1], cache


class Backbone(nnx.Module):
    """From tokens to hidden states. Families subclass it, or `Decoder`, to give their `Config` and `Layer`."""

    Layer: ClassVar[type[nnx.Module]] = DecoderLayer

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        vocab, width = {"vocab": cfg.vocab}, {"embed": cfg.table_width}
        self.embed = Embedding.random(vocab, width, dtype=cfg.dtype, rngs=rngs)
        self.layers = nnx.List([self.Layer(cfg, spec, rngs=rngs) for spec in cfg.layers])
        self.norm = make_norm(cfg, cfg.embed)

    def embed_tokens(self, tokens: Int[Array, "*t"], ctx: StepContext) -> Float[Array, "*t embed"]:
        """The first layer's input."""
        return self.embed(tokens)

    def cache_specs(self) -> list[tuple[CacheSpec, ...]]:
        """What each layer caches: that of its `attn`, unless the family says otherwise."""
        return [layer.attn.cache_specs for layer in self.layers]

    def __call__(self, tokens: Int[Array, "*t"], ctx: StepContext, caches: Any) -> tuple[Float[Array, "*t embed"], Any]:
        """Final hidden states, and the caches after these tokens. `caches` is a list, or like one, with an entry a
        layer: its cache (`Paged` or `Dense`, say), or a list of them. Caches may lie in the same arrays: each is taken
        after the one before was put back."""
        if ctx.is_packed:
            check_segments(caches)
        x = self.embed_tokens(tokens, ctx)
        ropes = [spec.rope for spec in self.cfg.layers]
        sin_cos = {
            rope: None if rope is None else rope.sin_cos(ctx.positions, self.cfg.head_dim, self.cfg.max_len)
            for rope in dict.fromkeys(ropes)
        }
        caches = caches.copy()
        call = plain_call if ctx.placement.mesh is None else TracedOnce()  # in a step of the engine
        inner, last = replace(ctx, read=None), len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            x, caches[i] = call(layer, x, ctx if i == last else inner, sin_cos[ropes[i]], caches[i])
        return x if self.norm is None else self.norm(x, ctx), caches


class Decoder(Backbone):
    """A language model, or one with its layers that embeds or classifies texts."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        options = {"dtype": cfg.dtype, "rngs": rngs}
        if cfg.task == "classify" and cfg.label_tokens is None:
            self.score = Linear.random({"embed": cfg.embed}, {"labels": len(cfg.labels)}, **options)
        elif cfg.task != "embed" and not cfg.tie_embeddings:
            self.lm_head = Linear.random({"embed": cfg.table_width}, {"vocab": cfg.vocab}, **options)

    def head(self, pooled: Float[Array, "rows embed"], ctx: StepContext) -> Float32[Array, "rows labels"]:
        """Scores of the labels, of texts' pooled hidden states, where the task is "classify"."""
        if self.cfg.label_tokens is None:
            return self.score(pooled.astype(self.cfg.dtype), ctx, out_dtype=jnp.float32)
        tokens = jnp.asarray(self.cfg.label_tokens, jnp.int32)
        less, more = self.embed.rows(tokens) if self.cfg.tie_embeddings else self.lm_head.columns(tokens).T
        return jnp.einsum("rd,d->r", pooled.astype(jnp.float32), more - less)[:, None]

    def logits(self, hidden: Float[Array, "*t embed"], ctx: StepContext) -> Float[Array, "*t vocab"]:
        """Unnormalised log-probabilities in float32, never rounded to the parameters' dtype: in bfloat16 many tokens
        would share the best one. `ctx` is that of the tokens whose hidden states these are. ValueError for a model with
        another task."""
        if self.cfg.task != "generate":
            raise ValueError(f"this model's task is {self.cfg.task!r}: it has no head that chooses tokens")
        if self.cfg.tie_embeddings:
            return self.embed.logits(hidden, ctx)
        return self.lm_head(hidden, ctx, out_dtype=jnp.float32)


class _OneKey(nnx.Rngs):
    """Draws the same key each time: where only shapes are asked for, drawing others would take longer than the rest."""

    def params(self) -> Array:
        return jax.random.key(0)


def abstract(model_cls: type[Backbone], cfg: Config) -> Backbone:
    """A model of `ShapeDtypeStruct`s, which take no memory."""
    return nnx.eval_shape(lambda: model_cls(cfg, rngs=_OneKey()))
