"""The addition of features to those that a layer was given."""

from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.dispatch import UNPLACED, Op, Placement

OP = Op(package=__package__ or "", name="add", implementations=("reference", "native"), preferred={"cpu": ("native",)})


def add(
    x: Float[Array, "*t width"],
    h: Float[Array, "*t width"],
    *,
    num_tokens: Int[Array, ""] | None = None,
    placement: Placement = UNPLACED,
) -> Float[Array, "*t width"]:
    """See `reference.add`. Of flat tokens those from `num_tokens` on are padding, of which nothing is promised."""
    if OP.preferred_at(placement, x, h, num_tokens) == "native":
        return OP.choose("native", placement)(x, h, num_tokens=num_tokens)
    return OP.choose("reference", placement)(x, h, rounds_once=placement.batch_invariant)
