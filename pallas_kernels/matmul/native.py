"""Products of few rows with a weight, in C++: all cores read the weight once, in place."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.matmul.reference import split

# Range of rows of x for which it is faster than XLA's product, with a weight in its layout and with a transposed one.
# Since JAX 0.11, XLA has its own bfloat16 product, which does not help few rows.
ROWS = {
    "float32": ((1, 256), (1, 32)),
    "bfloat16": ((1, 8), (1, 8)) if jax.__version_info__ >= (0, 11) else ((1, 64), (1, 64)),
}


def supports(equation: str, x: Array, weight: Array) -> bool:
    """Whether the kernel supports these operands and is faster than XLA."""
    contracted, _, transposed = split(equation)
    if x.dtype.name not in ROWS or x.dtype != weight.dtype:
        return False
    first, last = ROWS[x.dtype.name][transposed]
    return first <= math.prod(x.shape[: x.ndim - len(contracted)]) <= last and native.is_built()


def einsum(
    equation: str, x: Float[Array, "..."], weight: Float[Array, "..."], out_dtype: Any = None
) -> Float[Array, "..."]:
    """See `reference.einsum`. Accumulates in float32."""
    contracted, outputs, transposed = split(equation)
    rows, depth = x.shape[: x.ndim - len(contracted)], math.prod(x.shape[x.ndim - len(contracted) :])
    columns = weight.shape[: len(outputs)] if transposed else weight.shape[len(contracted) :]
    size = math.prod(columns)
    call = native.ffi_call("jaxllm_matmul", jax.ShapeDtypeStruct((math.prod(rows), size), out_dtype or x.dtype))
    matrix = jnp.reshape(weight, (size, depth) if transposed else (depth, size))
    return call(jnp.reshape(x, (-1, depth)), matrix, transposed=transposed).reshape(*rows, *columns)
