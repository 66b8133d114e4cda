"""Products of activations with a quantised weight."""

from typing import Any

from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.dispatch import UNPLACED, Op, Placement
from jaxllm.pallas_kernels.quantized_matmul.weight import QuantizedWeight as QuantizedWeight

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
    x: Float[Array, "..."],
    weight: QuantizedWeight,
    *,
    num_inputs: int,
    out_dtype: Any = None,
    activations: str | None = None,
    num_tokens: Int[Array, ""] | None = None,
    implementation: str = "auto",
    placement: Placement = UNPLACED,
) -> Float[Array, "..."]:
    """See `reference.product`. Where the arrays lie on several devices, call it within `shard_map`, with each device's
    part: no implementation but the reference is code that XLA divides. Of flat tokens those from `num_tokens` on are
    padding, whose results may be anything."""
    options = {"num_inputs": num_inputs, "out_dtype": out_dtype, "activations": activations}
    chosen = OP.choose(implementation, placement, x, weight, **options)
    return chosen(x, weight, num_tokens=num_tokens, **options)
