"""Products of rows with a quantised weight, in C++: all cores read the codes once, in place, and sum in float32."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.quantized_matmul.weight import QuantizedWeight

DTYPES = ("float32", "bfloat16")


def supports(x: Array, weight: QuantizedWeight, *, num_inputs: int, out_dtype: Any = None, **_: Any) -> bool:
    """Whether the kernel is built and supports these dtypes."""
    dtypes = (x.dtype, jnp.dtype(out_dtype or x.dtype))
    return all(dtype.name in DTYPES for dtype in dtypes) and native.is_built()


def product(
    x: Float[Array, "..."],
    weight: QuantizedWeight,
    *,
    num_inputs: int,
    out_dtype: Any = None,
    activations: str | None = None,
) -> Float[Array, "..."]:
    """See `reference.product`. Rows are not rounded."""
    del activations
    rows, depth = x.shape[: x.ndim - num_inputs], math.prod(x.shape[x.ndim - num_inputs :])
    by_output = not weight.is_grouped
    columns = weight.scales.shape if by_output else weight.scales.shape[num_inputs + 1 :]
    size = math.prod(columns)
    scales = weight.scales.reshape((size,) if by_output else (-1, size))
    offsets = jnp.zeros((0, 0)) if weight.offsets is None else weight.offsets.reshape(-1, size)
    outer = jnp.zeros(0) if weight.outer is None else weight.outer.reshape(-1)
    codes = weight.codes.reshape((size, depth) if by_output else (depth, size))
    result = jax.ShapeDtypeStruct((math.prod(rows), size), out_dtype or x.dtype)
    call = native.ffi_call("jaxllm_quantized_matmul", result)
    y = call(x.reshape(-1, depth), codes, scales, offsets, outer, by_output=by_output)
    return y.reshape(*rows, *columns)
