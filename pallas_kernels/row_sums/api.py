"""Sums of rows in an order that depends on no other row: XLA orders the additions of a reduction by the sizes of all
axes."""

from jaxtyping import Array, Float

from jaxllm.pallas_kernels.dispatch import UNPLACED, Op, Placement

OP = Op(
    package=__package__ or "",
    name="row_sums",
    implementations=("reference", "gpu", "tpu"),
    preferred={"gpu": ("gpu",), "tpu": ("tpu",)},
)


def row_sums(
    x: Float[Array, "*rows d"], *, implementation: str = "auto", placement: Placement = UNPLACED
) -> Float[Array, "*rows 1"]:
    """Over the last axis: each row's result is the same to the bit for any number of rows."""
    return OP.choose(implementation, placement, x)(x)
