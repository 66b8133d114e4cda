"""Gemma 2 (arXiv 2408.00118): local and global layers in turn, norms around blocks, soft caps, scaled embeddings."""

from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.models import transformer
from jaxllm.models.context import StepContext
from jaxllm.models.layers import LayerSpec, make_norm
from jaxllm.models.weights import ATTENTION_BIASES, LAYER, LLAMA_LAYOUT, norm
from jaxllm.pallas_kernels.paged_attention import cap


@dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    REFUSED = ("use_bidirectional_attention",)

    norm: str = "rms_unit_offset"
    activation: str = "gelu_pytorch_tanh"
    tie_embeddings: bool = True
    logit_soft_cap: float | None = None

    @classmethod
    def from_hf(cls, hf: dict, *, pattern: tuple[str, ...] = ("sliding_attention", "full_attention"), **fields: Any):
        """`pattern` repeats where the file has no `layer_types`."""
        types = hf.get("layer_types") or tuple(islice(cycle(pattern), hf["num_hidden_layers"]))
        options = transformer.attention_biases(hf) | {
            "head_dim": hf.get("head_dim") or 256,
            "query_scale": hf["query_pre_attn_scalar"] ** -0.5,
            "activation": hf.get("hidden_activation") or cls.activation,
            "attn_soft_cap": hf["attn_logit_softcapping"],
            "logit_soft_cap": hf["final_logit_softcapping"],
            "windows": transformer.windows_of(types, hf["sliding_window"]),
        }
        return super().from_hf(hf, **(options | fields))


class DecoderLayer(transformer.DecoderLayer):
    """Normalises the input and the output of each block."""

    def __init__(self, cfg: Config, spec: LayerSpec, **kwargs: Any):
        super().__init__(cfg, spec, **kwargs)
        self.attn_out_norm = make_norm(cfg, cfg.embed)
        self.mlp_out_norm = make_norm(cfg, cfg.embed)

    def __call__(self, x: Float[Array, "*t embed"], ctx: StepContext, sin_cos, cache):
        h, cache = self.attn(self.attn_norm(x, ctx), ctx, sin_cos, cache)

        def rest(x: Array, h: Array, ctx: StepContext) -> Array:
            x, h = self.mlp_norm.add(x, self.attn_out_norm(h, ctx), ctx)
            return ctx.add(x, self.mlp_out_norm(self.mlp(h, ctx), ctx))

        return ctx.finish(rest, x, h), cache


class Model(transformer.Decoder):
    Config = Config
    Layer = DecoderLayer

    def embed_tokens(self, tokens: Int[Array, "*t"], ctx: StepContext) -> Float[Array, "*t embed"]:
        x = super().embed_tokens(tokens, ctx)
        scale = jnp.asarray(self.cfg.embed**0.5, x.dtype)  # rounded, as when it was trained
        return ctx.rounded_once(jnp.multiply, x, scale)

    def logits(self, hidden: Float[Array, "*t embed"], ctx: StepContext) -> Float[Array, "*t vocab"]:
        return cap(super().logits(hidden, ctx), self.cfg.logit_soft_cap)


WEIGHTS = {
    **LLAMA_LAYOUT,
    **norm(LAYER + "post_attention_layernorm", "layers.{i}.attn_out_norm"),
    **norm(LAYER + "pre_feedforward_layernorm", "layers.{i}.mlp_norm"),
    **norm(LAYER + "post_feedforward_layernorm", "layers.{i}.mlp_out_norm"),
}
OPTIONAL_WEIGHTS = ATTENTION_BIASES
