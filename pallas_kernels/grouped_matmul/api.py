"""Products of groups of rows with a weight each, as the experts of a mixture have one."""

from typing import Any

from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.dispatch import UNPLACED, Op, Placement
from jaxllm.pallas_kernels.quantized_matmul import QuantizedWeight

_PREFERRED = {"cpu": ("native",), "gpu": ("gpu",), "tpu": ("tpu",)}
OP = Op(
    package=__package__ or "",
    name="product",
    implementations=("reference", "native", "gpu", "tpu"),
    preferred=_PREFERRED,
    on_mesh=_PREFERRED,
    warns=True,
)


def product(
    x: Float[Array, "rows ..."],
    weight: Float[Array, "experts ..."] | QuantizedWeight,
    offsets: Int[Array, " experts_plus_1"],
    *,
    num_inputs: int = 1,
    out_dtype: Any = None,
    implementation: str = "auto",
    placement: Placement = UNPLACED,
) -> Float[Array, "rows ..."]:
    """See `reference.product`. Where the arrays lie on several devices, call it within `shard_map`, with each device's
    experts and their rows' offsets."""
    options = {"num_inputs": num_inputs, "out_dtype": out_dtype}
    return OP.choose(implementation, placement, x, weight, offsets, **options)(x, weight, offsets, **options)
