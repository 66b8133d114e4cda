"""Arrays of zeros, of which on a CPU no byte takes memory before it is written: a pool of blocks begins as one."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Shaped

from jaxllm.pallas_kernels.dispatch import UNPLACED, Op, Placement

OP = Op(
    package=__package__ or "", name="zeros", implementations=("reference", "native"), preferred={"cpu": ("native",)}
)


def zeros(
    shape: Sequence[int], dtype: Any, *, implementation: str = "auto", placement: Placement = UNPLACED
) -> Shaped[Array, "..."]:
    """See `reference.zeros`."""
    return OP.choose(implementation, placement, shape, dtype)(shape, dtype)
