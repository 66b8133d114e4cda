"""Products of rows with a quantised weight, in C++: all cores read the codes once, in place, and sum in float32."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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
    num_tokens: Int[Array, ""] | None = None,
) -> Float[Array, "..."]:
    """See `reference.product`. Rows are not rounded."""
    del activations
    rows, depth = x.shape[: x.ndim - num_inputs], math.prod(x.shape[x.ndim - num_inputs :])
    arrays, columns = operands(weight, num_inputs)
    result = jax.ShapeDtypeStruct((math.prod(rows), math.prod(columns)), out_dtype or x.dtype)
    call = native.ffi_call("jaxllm_quantized_matmul", result)
    used = native.num_rows(num_tokens, rows)
    return call(x.reshape(-1, depth), *arrays, used, by_output=not weight.is_grouped).reshape(*rows, *columns)


def operands(weight: QuantizedWeight, num_inputs: int, lead: int = 0) -> tuple[list[Array], tuple[int, ...]]:
    """Codes, scales, offsets and outer scales as the custom calls take them, with one axis of inputs, groups or outputs
    for many; and the axes of the outputs. `lead` axes, of experts, stand before the others."""
    axes = weight.scales.shape
    columns = axes[lead + num_inputs + 1 :] if weight.is_grouped else axes[lead:]
    experts, size = axes[:lead], math.prod(columns)
    grouped = (*experts, -1, size)
    scales = weight.scales.reshape(grouped if weight.is_grouped else (*experts, size))
    offsets = jnp.zeros(0) if weight.offsets is None else weight.offsets.reshape(grouped)
    outer = jnp.zeros(0) if weight.outer is None else weight.outer.reshape(*experts, size)
    codes = weight.codes.reshape(grouped if weight.is_grouped else (*experts, size, -1))
    return [codes, scales, offsets, outer], columns
