"""Products with a quantised weight on TPUs: XLA's; of many rows on the matrix units for eight bits that a chip has."""

import math
from typing import Any

from jaxtyping import Array, Float

from jaxllm.pallas_kernels.dispatch import device_kind
from jaxllm.pallas_kernels.quantized_matmul import eight_bits, reference
from jaxllm.pallas_kernels.quantized_matmul.weight import QuantizedWeight

# What a chip multiplies faster than bfloat16, and from how many rows on memory is no longer what bounds the product: by
# the makers' figures, for codes of 8 bits.
EIGHT_BITS = {
    "TPU v5 lite": ("int8", 128),
    "TPU v5": ("int8", 128),
    "TPU v6 lite": ("int8", 256),
    "TPU7x": ("float8_e4m3fn", 256),
}


def product(
    x: Float[Array, "..."],
    weight: QuantizedWeight,
    *,
    num_inputs: int,
    out_dtype: Any = None,
    activations: str | None = None,
    num_tokens: Any = None,
) -> Float[Array, "..."]:
    """See `reference.product`."""
    del num_tokens  # padding is multiplied, too
    dtype, least = EIGHT_BITS.get(device_kind() or "", (None, 0))
    rows = math.prod(x.shape[: x.ndim - num_inputs])
    if rows >= least and activations == dtype and eight_bits.supports(weight, activations):
        return eight_bits.product(x, weight, num_inputs=num_inputs, out_dtype=out_dtype)
    return reference.product(x, weight, num_inputs=num_inputs, out_dtype=out_dtype)
