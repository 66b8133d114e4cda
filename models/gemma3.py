"""Gemma 3, text (arXiv 2503.19786): Gemma 2 with norms on queries and keys, and a rope of its own on local layers."""

from dataclasses import dataclass
from typing import Any

from jaxllm.models import gemma2
from jaxllm.models.rope import Rope, rope_from_hf
from jaxllm.models.weights import QK_NORMS


@dataclass(frozen=True, kw_only=True)
class Config(gemma2.Config):
    REFUSED = (*gemma2.Config.REFUSED, "attn_logit_softcapping")  # implementations disagree on its meaning

    qk_norm: bool = True

    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        num_local = (hf.get("sliding_window_pattern") or 6) - 1
        ropes = _ropes(hf)
        options = {
            "pattern": ("sliding_attention",) * num_local + ("full_attention",),
            "rope": ropes["full_attention"],
            "local_rope": ropes["sliding_attention"],
        }
        defaults = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
        return super().from_hf(defaults | hf, **(options | fields))


def _ropes(hf: dict) -> dict[str, Rope]:
    """Ropes by layer type; older files have flat keys, whose scaling applies to the global layers."""
    given = hf.get("rope_parameters") or {}
    unknown = sorted(given.keys() - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"rope_parameters has {unknown}, but this family's has an object for each layer type")
    full = (given.get("full_attention") or {}) | (hf.get("rope_scaling") or {})
    return {
        "full_attention": rope_from_hf(hf, full, theta=1e6),
        "sliding_attention": rope_from_hf(
            {"max_position_embeddings": hf["max_position_embeddings"]},
            given.get("sliding_attention") or {},
            theta=hf.get("rope_local_base_freq", 1e4),
        ),
    }


class Model(gemma2.Model):
    Config = Config


WEIGHTS = gemma2.WEIGHTS | QK_NORMS
OPTIONAL_WEIGHTS = gemma2.OPTIONAL_WEIGHTS
