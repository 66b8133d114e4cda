"""Gated activations (arXiv 2002.05202)."""

from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.dispatch import UNPLACED, Op, Placement
from jaxllm.pallas_kernels.matmul import einsum

GATED, PRODUCT = (
    Op(package=__package__ or "", name=name, implementations=("reference", "native"), preferred={"cpu": ("native",)})
    for name in ("gated", "gated_product")
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
    chosen = GATED.choose(implementation, placement, both, activation)
    return chosen(both, activation, rounds_once=placement.batch_invariant, num_tokens=num_tokens)


def gated_product(
    x: Float[Array, "*t d"],
    weight: Float[Array, "d 2 width"],
    activation: str,
    *,
    num_tokens: Int[Array, ""] | None = None,
    implementation: str = "auto",
    placement: Placement = UNPLACED,
) -> Float[Array, "*t width"]:
    """`gated` of the product: where one kernel makes both, its sums are not rounded before the activation."""
    if implementation == "auto":
        implementation = PRODUCT.preferred_at(placement, x, activation, weight)
    if implementation == "reference":  # the platform's own product, and its own gate
        options = {"num_tokens": num_tokens, "placement": placement}
        return gated(einsum("...a,abc->...bc", x, weight, **options), activation, **options)
    kernel = PRODUCT.choose(implementation, placement)
    return kernel(x, weight, activation, num_tokens=num_tokens, batch_invariant=placement.batch_invariant)
