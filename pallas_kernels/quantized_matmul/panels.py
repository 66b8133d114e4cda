"""Products with a weight of few bits that lies in the order in which a CPU reads it: in panels of 16 outputs, with rows
that are rounded to int8 by groups. In C++ for CPUs alone."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.quantized_matmul.native import DTYPES, operands
from jaxllm.pallas_kernels.quantized_matmul.weight import QuantizedWeight

PANEL = 16  # outputs
CODES = {"int8": (8, 128), "int4": (4, 8), "uint4": (4, 0)}  # bits, and what is added to make them unsigned
SCALES = ("float16", "float32")


def fits(codes: Any, group: int | None, scales: Any) -> bool:
    """Whether a weight with such codes and scales can lie in panels."""
    return jnp.dtype(codes).name in CODES and jnp.dtype(scales).name in SCALES and group is not None and group % 8 == 0


def panels_shape(
    inputs: int, outputs: int, *, codes: Any, group: int, scales: Any, has_offsets: bool
) -> tuple[int, ...]:
    """Of the panels, uint8 `[panels, groups, bytes of a group]`."""
    bits, _ = CODES[jnp.dtype(codes).name]
    numbers = (2 if has_offsets else 1) * PANEL * jnp.dtype(scales).itemsize
    return -(-outputs // PANEL), inputs // group, numbers + group * PANEL * bits // 8


def to_panels(weight: QuantizedWeight, num_inputs: int) -> UInt8[Array, "panels groups bytes"]:
    """A weight by group in panels. Its offsets take the dtype of its scales."""
    (codes, scales, offsets, _), _ = operands(weight, num_inputs)
    codes, offsets = codes.reshape(-1, codes.shape[-1]), offsets.astype(scales.dtype)
    inputs, outputs = codes.shape
    kind = {"codes": codes.dtype, "scales": scales.dtype, "has_offsets": offsets.size > 0}
    shape = panels_shape(inputs, outputs, group=inputs // len(scales), **kind)
    return native.ffi_call("jaxllm_make_panels", jax.ShapeDtypeStruct(shape, jnp.uint8))(codes, scales, offsets)


def panel_product(
    x: Float[Array, "..."],
    panels: UInt8[Array, "panels groups bytes"],
    *,
    num_inputs: int,
    outputs: tuple[int, ...],
    codes: Any,
    scales: Any,
    has_offsets: bool,
    out_dtype: Any = None,
    num_tokens: Int[Array, ""] | None = None,
) -> Float[Array, "..."]:
    """`x[..., *inputs]`, summed over its last `num_inputs` axes with a weight in panels: `[..., *outputs]`.

    In the dtype of x or, not rounded to it, in `out_dtype`. Each group of a row's inputs counts as int8 times a scale.
    Of flat tokens those from `num_tokens` on are padding, whose results may be anything.
    """
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    assert x.dtype.name in DTYPES and out_dtype.name in DTYPES
    rows, depth = x.shape[: x.ndim - num_inputs], math.prod(x.shape[x.ndim - num_inputs :])
    bits, zero = CODES[jnp.dtype(codes).name]
    result = jax.ShapeDtypeStruct((math.prod(rows), math.prod(outputs)), out_dtype)
    options = {"bits": bits, "zero": zero, "is_half": jnp.dtype(scales) == jnp.float16, "has_offsets": has_offsets}
    used = native.num_rows(num_tokens, rows)
    y = native.ffi_call("jaxllm_panel_matmul", result)(x.reshape(-1, depth), panels, used, **options)
    return y.reshape(*rows, *outputs)
