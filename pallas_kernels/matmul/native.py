"""Products of few rows with a weight, in C++: the weight is read once, where it lies, by all cores."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.pallas_kernels import native

# Rows of x for which it is faster than XLA's product, from and to. One row of float32 is bound by memory either way.
ROWS = {"float32": (2, 64), "bfloat16": (1, 64)}


def supports(equation: str, x: Array, weight: Array) -> bool:
    """Whether it can multiply these, and faster than XLA."""
    contracted, _, _ = _split(equation)
    rows = math.prod(x.shape[: x.ndim - len(contracted)])
    first, last = ROWS.get(x.dtype.name, (1, 0))
    return first <= rows <= last and x.dtype == weight.dtype and native.is_built()


def einsum(equation: str, x: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """See `reference.einsum`. Products are summed up in float32."""
    contracted, outputs, transposed = _split(equation)
    rows, depth = x.shape[: x.ndim - len(contracted)], math.prod(x.shape[x.ndim - len(contracted) :])
    columns = weight.shape[: len(outputs)] if transposed else weight.shape[len(contracted) :]
    size = math.prod(columns)
    call = native.ffi_call("jaxllm_matmul", jax.ShapeDtypeStruct((math.prod(rows), size), x.dtype))
    matrix = jnp.reshape(weight, (size, depth) if transposed else (depth, size))
    return call(jnp.reshape(x, (-1, depth)), matrix, transposed=transposed).reshape(*rows, *columns)


def _split(equation: str) -> tuple[str, str, bool]:
    """Letters that are summed over, letters of the result, and whether these come first in the weight's."""
    operands, result = equation.split("->")
    x, weight = operands.split(",")
    contracted, outputs = x.removeprefix("..."), result.removeprefix("...")
    assert weight in (contracted + outputs, outputs + contracted), equation
    return contracted, outputs, weight != contracted + outputs
