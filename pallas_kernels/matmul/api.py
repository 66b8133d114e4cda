"""Products of activations with a weight."""

from typing import Any

from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.dispatch import UNPLACED, Op, Placement

OP = Op(
    package=__package__ or "",
    name="einsum",
    implementations=("reference", "native", "gpu", "tpu"),
    preferred={"cpu": ("native",)},  # XLA multiplies best on others
)
IN_ORDER = {"cpu": "native", "gpu": "gpu", "tpu": "tpu"}  # where a row's sums depend on no other row


def einsum(
    equation: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    *,
    out_dtype: Any = None,
    num_tokens: Int[Array, ""] | None = None,
    implementation: str = "auto",
    placement: Placement = UNPLACED,
) -> Float[Array, "..."]:
    """See `reference.einsum`. Of flat tokens those from `num_tokens` on are padding, whose results may be anything."""
    if placement.batch_invariant:
        chosen = OP.choose(IN_ORDER[placement.platform or ""], placement)
        return chosen(equation, x, weight, out_dtype, num_tokens=num_tokens, batch_invariant=True)
    chosen = OP.choose(implementation, placement, equation, x, weight)
    return chosen(equation, x, weight, out_dtype, num_tokens=num_tokens)
