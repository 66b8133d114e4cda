"""Products of few rows with a weight, in C++: all cores read the weight once, in place."""

import math
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.gradients import with_gradient_of
from jaxllm.pallas_kernels.matmul import reference
from jaxllm.pallas_kernels.matmul.reference import as_matrices

_WEIGHTS_OF_FLOAT32 = ("float32", "bfloat16", "float16")
DTYPES = (*(("float32", weight) for weight in _WEIGHTS_OF_FLOAT32), ("bfloat16", "bfloat16"))  # of rows, of a weight


def supports(equation: str, x: Array, weight: Array) -> bool:
    """Whether the kernel is built and supports these dtypes."""
    return (x.dtype.name, weight.dtype.name) in DTYPES and native.is_built()


def einsum(
    equation: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    out_dtype: Any = None,
    *,
    num_tokens: Int[Array, ""] | None = None,
    batch_invariant: bool = False,
) -> Float[Array, "..."]:
    """See `reference.einsum`. Accumulates in float32; with `batch_invariant` in one order for any number of rows."""
    options = {"out_dtype": out_dtype, "num_tokens": num_tokens}
    kernel = partial(_einsum, equation, batch_invariant=batch_invariant, **options)
    by_xla = partial(reference.einsum, equation, out_dtype=out_dtype)
    return with_gradient_of(by_xla, kernel, num_tokens)(x, weight)


def _einsum(
    equation: str, x: Array, weight: Array, *, out_dtype: Any, num_tokens: Array | None, batch_invariant: bool
) -> Array:
    of = as_matrices(equation, x, weight)
    shape = (len(of.x), math.prod(of.columns))
    call = native.ffi_call("jaxllm_matmul", jax.ShapeDtypeStruct(shape, out_dtype or x.dtype))
    options = {"transposed": of.transposed, "batch_invariant": batch_invariant}
    return call(of.x, of.weight, native.num_rows(num_tokens, of.rows), **options).reshape(*of.rows, *of.columns)
