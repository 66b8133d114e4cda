"""Products with a weight of few bits that lies in the order in which a CPU reads it: in panels of 16 outputs, with rows
that are rounded to int8 in parts. In C++ for CPUs alone."""

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
SCALES = ("float32", "bfloat16", "float16")  # in the order of kernels.h
PART = 32  # inputs of a row, at most, that share a scale


def fits(codes: Any, group: int, scales: Any) -> bool:
    """Whether a weight with such codes and scales, each of `group` inputs, can lie in panels."""
    return jnp.dtype(codes).name in CODES and jnp.dtype(scales).name in SCALES and group % 8 == 0


def panels_shape(
    inputs: int, outputs: int, *, codes: Any, group: int, scales: Any, has_offsets: bool
) -> tuple[int, ...]:
    """Of the panels, uint8 `[panels, groups, bytes of a group]`."""
    bits, _ = CODES[jnp.dtype(codes).name]
    numbers = (2 if has_offsets else 1) * PANEL * jnp.dtype(scales).itemsize
    return -(-outputs // PANEL), inputs // group, numbers + group * PANEL * bits // 8


def to_panels(weight: QuantizedWeight, num_inputs: int, scales: Any) -> UInt8[Array, "panels groups bytes"]:
    """A weight in panels, with scales and offsets of the dtype `scales`. One by output has a single group."""
    (codes, own_scales, offsets, _), _ = operands(weight, num_inputs)
    own_scales, offsets = own_scales.astype(scales), offsets.astype(scales)
    if weight.is_grouped:
        codes = codes.reshape(-1, codes.shape[-1])
        (inputs, outputs), groups = codes.shape, len(own_scales)
    else:
        (outputs, inputs), groups = codes.shape, 1
    kind = {"codes": codes.dtype, "scales": scales, "has_offsets": offsets.size > 0}
    shape = panels_shape(inputs, outputs, group=inputs // groups, **kind)
    return native.ffi_call("jaxllm_make_panels", jax.ShapeDtypeStruct(shape, jnp.uint8))(codes, own_scales, offsets)


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

    In the dtype of x or, not rounded to it, in `out_dtype`. A row counts as int8 times a scale of each `PART` of its
    inputs, or of as many fewer as divide the weight's groups.
    Of flat tokens those from `num_tokens` on are padding, whose results may be anything.
    """
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    assert x.dtype.name in DTYPES and out_dtype.name in DTYPES
    rows, depth = x.shape[: x.ndim - num_inputs], math.prod(x.shape[x.ndim - num_inputs :])
    bits, zero = CODES[jnp.dtype(codes).name]
    result = jax.ShapeDtypeStruct((math.prod(rows), math.prod(outputs)), out_dtype)
    part = math.gcd(depth // panels.shape[1], PART)
    numbers = {"bits": bits, "zero": zero, "numbers": SCALES.index(jnp.dtype(scales).name), "part": part}
    used = native.num_rows(num_tokens, rows)
    call = native.ffi_call("jaxllm_panel_matmul", result)
    y = call(x.reshape(-1, depth), panels, used, **numbers, has_offsets=has_offsets)
    return y.reshape(*rows, *outputs)
