"""Gemma 3, text (arXiv 2503.19786): Gemma 2 with norms on queries and keys, and a rope of its own on local layers.

EmbeddingGemma (arXiv 2509.20354) is its layers with attention to both sides.
"""

from dataclasses import dataclass
from typing import Any

from jaxllm.models import gemma2
from jaxllm.models.rope import ropes_of
from jaxllm.models.weights import QK_NORMS


@dataclass(frozen=True, kw_only=True)
class Config(gemma2.Config):
    REFUSED = ("attn_logit_softcapping",)  # implementations disagree on its meaning

    qk_norm: bool = True

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        num_local = (hf.get("sliding_window_pattern") or 6) - 1
        ropes = ropes_of(hf, theta=1e6, local_theta=hf.get("rope_local_base_freq", 1e4))
        options = {
            "pattern": ("sliding_attention",) * num_local + ("full_attention",),
            "rope": ropes["full_attention"],
            "local_rope": ropes["sliding_attention"],
        }
        defaults = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
        if hf.get("use_bidirectional_attention"):  # the file counts both sides of its window together
            hf = hf | {"sliding_window": hf["sliding_window"] // 2 + 1}
        return super().from_hf(defaults | hf, **(options | fields))


class Model(gemma2.Model):
    Config = Config


WEIGHTS = gemma2.WEIGHTS | QK_NORMS
OPTIONAL_WEIGHTS = gemma2.OPTIONAL_WEIGHTS
