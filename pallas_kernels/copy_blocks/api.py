"""Copies of whole blocks within a pool, whose axis 0 is the block (copy-on-write)."""

from jaxtyping import Array, Int, Shaped

from jaxllm.pallas_kernels.dispatch import UNPLACED, Op, Placement

OP = Op(
    package=__package__ or "",
    name="copy_blocks",
    implementations=("reference", "native"),
    preferred={"cpu": ("native",)},
)


def copy_blocks(
    pool: Shaped[Array, "blocks ..."],
    moves: Int[Array, "2 n"],
    *,
    implementation: str = "auto",
    placement: Placement = UNPLACED,
) -> Shaped[Array, "blocks ..."]:
    """See `reference.copy_blocks`."""
    return OP.choose(implementation, placement, pool, moves)(pool, moves)
