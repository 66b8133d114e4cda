"""Products of few rows with a weight, in C++: the weight is read once, where it lies, by all cores."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.matmul.reference import split

# Rows of x, from and to, for which it is faster than XLA's product by a weight as it lies, and by a transposed one.
# XLA has its own product of bfloat16 since JAX 0.11, which few rows don't profit from.
ROWS = {
    "float32": ((2, 256), (2, 32)),  # a single row is bound by memory either way
    "bfloat16": ((1, 8), (1, 8)) if jax.__version_info__ >= (0, 11) else ((1, 64), (1, 64)),
}


def supports(equation: str, x: Array, weight: Array) -> bool:
    """Whether it can multiply these, and faster than XLA."""
    contracted, _, transposed = split(equation)
    if x.dtype.name not in ROWS or x.dtype != weight.dtype:
        return False
    first, last = ROWS[x.dtype.name][transposed]
    return first <= math.prod(x.shape[: x.ndim - len(contracted)]) <= last and native.is_built()


def einsum(
    equation: str, x: Float[Array, "..."], weight: Float[Array, "..."], out_dtype: Any = None
) -> Float[Array, "..."]:
    """See `reference.einsum`. Products are summed up in float32."""
    contracted, outputs, transposed = split(equation)
    rows, depth = x.shape[: x.ndim - len(contracted)], math.prod(x.shape[x.ndim - len(contracted) :])
    columns = weight.shape[: len(outputs)] if transposed else weight.shape[len(contracted) :]
    size = math.prod(columns)
    call = native.ffi_call("jaxllm_matmul", jax.ShapeDtypeStruct((math.prod(rows), size), out_dtype or x.dtype))
    matrix = jnp.reshape(weight, (size, depth) if transposed else (depth, size))
    return call(jnp.reshape(x, (-1, depth)), matrix, transposed=transposed).reshape(*rows, *columns)
