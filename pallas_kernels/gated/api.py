"""Gated activations (arXiv 2002.05202)."""

from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.dispatch import UNPLACED, Op, Placement

OP = Op(
    package=__package__ or "", name="gated", implementations=("reference", "native"), preferred={"cpu": ("native",)}
)


def gated(
    both: Float[Array, "*t 2 width"],
    activation: str,
    *,
    num_tokens: Int[Array, ""] | None = None,
    implementation: str = "auto",
    placement: Placement = UNPLACED,
) -> Float[Array, "*t width"]:
    """See `reference.gated`; `activation` is a key of `ACTIVATIONS`. Of flat tokens those from `num_tokens` on are
    padding, whose results may be anything."""
    return OP.choose(implementation, placement, both, activation)(both, activation, num_tokens=num_tokens)
