"""Rotary position embeddings of heads (arXiv 2104.09864)."""

from jaxtyping import Array, Float, Float32

from jaxllm.pallas_kernels.dispatch import UNPLACED, Op, Placement

OP = Op(
    package=__package__ or "", name="rotate", implementations=("reference", "native"), preferred={"cpu": ("native",)}
)


def rotate(
    x: Float[Array, "*t heads head_dim"],
    sin: Float32[Array, "*t 1 pairs"],
    cos: Float32[Array, "*t 1 pairs"],
    *,
    interleaved: bool = False,
    implementation: str = "auto",
    placement: Placement = UNPLACED,
) -> Float[Array, "*t heads head_dim"]:
    """See `reference.rotate`."""
    return OP.choose(implementation, placement, x, sin, cos)(x, sin, cos, interleaved=interleaved)
