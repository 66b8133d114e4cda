"""Products of groups of rows with a weight each, in C++: all cores share one list of the experts that have rows, and
read the weight of each once, in place."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.matmul.native import DTYPES as OF_DENSE
from jaxllm.pallas_kernels.quantized_matmul import QuantizedWeight, stored_bytes
from jaxllm.pallas_kernels.quantized_matmul.native import DTYPES, operands


def supports(
    x: Array, weight: Array | QuantizedWeight, offsets: Array, *, num_inputs: int = 1, out_dtype: Any = None
) -> bool:
    """Whether the kernel is built and supports these operands: of dtypes that it has, no expert's codes of 4 bits that
    begin within a byte."""
    del offsets, num_inputs
    has_dtypes = all(dtype.name in DTYPES for dtype in (x.dtype, jnp.dtype(out_dtype or x.dtype)))
    begins_within = False
    if isinstance(weight, QuantizedWeight):
        size, codes = math.prod(weight.codes.shape[1:]), weight.codes.dtype
        begins_within = stored_bytes((2, size), codes) != 2 * stored_bytes((size,), codes)
    else:
        has_dtypes = has_dtypes and (x.dtype.name, weight.dtype.name) in OF_DENSE
    return has_dtypes and not begins_within and native.is_built()


def product(
    x: Float[Array, "rows ..."],
    weight: Float[Array, "experts ..."] | QuantizedWeight,
    offsets: Int[Array, " experts_plus_1"],
    *,
    num_inputs: int = 1,
    out_dtype: Any = None,
) -> Float[Array, "rows ..."]:
    """See `reference.product`."""
    if isinstance(weight, QuantizedWeight):
        arrays, columns = operands(weight, num_inputs, lead=1)
        by_output = not weight.is_grouped
    else:  # one without scales
        by_output, columns, nothing = False, weight.shape[1 + num_inputs :], jnp.zeros(0)
        arrays = [weight.reshape(len(weight), -1, math.prod(columns)), nothing, nothing, nothing]
    result = jax.ShapeDtypeStruct((len(x), math.prod(columns)), out_dtype or x.dtype)
    call = native.ffi_call("jaxllm_grouped_matmul", result)
    rows = x.reshape(len(x), math.prod(x.shape[1:]))  # of which there may be none
    return call(rows, offsets, *arrays, by_output=by_output).reshape(len(x), *columns)
