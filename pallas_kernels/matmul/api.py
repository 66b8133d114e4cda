"""Products of activations with a weight."""

from typing import Any

from jaxtyping import Array, Float

from jaxllm.pallas_kernels.dispatch import UNPLACED, Op, Placement

OP = Op(
    package=__package__ or "", name="einsum", implementations=("reference", "native"), preferred={"cpu": ("native",)}
)


def einsum(
    equation: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    *,
    out_dtype: Any = None,
    implementation: str = "auto",
    placement: Placement = UNPLACED,
) -> Float[Array, "..."]:
    """See `reference.einsum`."""
    if placement.batch_invariant:
        return OP.choose("native", placement)(equation, x, weight, out_dtype, batch_invariant=True)
    return OP.choose(implementation, placement, equation, x, weight)(equation, x, weight, out_dtype)
