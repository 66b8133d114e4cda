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
CODES = {"int8": (0, 8), "int4": (2, 4), "uint4": (3, 4), "float4_e2m1fn": (4, 4)}  # kernels.h's number, and bits
SCALES = {"float32": (0, 4), "bfloat16": (1, 2), "float16": (2, 2), "float8_e4m3fn": (3, 1), "float8_e8m0fnu": (4, 1)}
PART = 32  # inputs of a row, at most, that share a scale


def fits(codes: Any, group: int, scales: Any) -> bool:
    """Whether a weight with such codes and scales, each of `group` inputs, can lie in panels."""
    return jnp.dtype(codes).name in CODES and jnp.dtype(scales).name in SCALES and group % 8 == 0


def panels_shape(
    inputs: int, outputs: int, *, codes: Any, group: int, scales: Any, has_offsets: bool
) -> tuple[int, ...]:
    """Of the panels of a matrix, uint8 `[panels, groups, bytes of a group]`."""
    (_, bits), (_, size) = CODES[jnp.dtype(codes).name], SCALES[jnp.dtype(scales).name]
    numbers = (2 if has_offsets else 1) * PANEL * size
    return -(-outputs // PANEL), inputs // group, numbers + group * PANEL * bits // 8


def to_panels(
    weight: QuantizedWeight, num_inputs: int, scales: Any, *, has_experts: bool = False
) -> UInt8[Array, "*experts panels groups bytes"]:
    """A weight in panels, with scales and offsets of the dtype `scales`, without its outer scales. One by output has a
    single group."""
    lead = int(has_experts)
    (codes, own_scales, offsets, _), _ = operands(weight, num_inputs, lead)
    own_scales, offsets = own_scales.astype(scales), offsets.astype(scales)
    experts = codes.shape[:lead]
    if weight.is_grouped:
        codes = codes.reshape(*experts, -1, codes.shape[-1])
        (inputs, outputs), groups = codes.shape[lead:], own_scales.shape[lead]
    else:
        (outputs, inputs), groups = codes.shape[lead:], 1
    kind = {"codes": codes.dtype, "scales": scales, "has_offsets": offsets.size > 0}
    shape = (*experts, *panels_shape(inputs, outputs, group=inputs // groups, **kind))
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
    outer: Float[Array, "*outputs"] | None = None,
    out_dtype: Any = None,
    num_tokens: Int[Array, ""] | None = None,
) -> Float[Array, "..."]:
    """`x[..., *inputs]`, summed over its last `num_inputs` axes with a weight in panels: `[..., *outputs]`.

    In the dtype of x or, not rounded to it, in `out_dtype`. A row counts as int8 times a scale of each `PART` of its
    inputs, or of as many fewer as divide the weight's groups. `outer` is one more scale of each output. Of flat tokens
    those from `num_tokens` on are padding, whose results may be anything.
    """
    rows = x.shape[: x.ndim - num_inputs]
    used = native.num_rows(num_tokens, rows)
    about = {"codes": codes, "scales": scales, "has_offsets": has_offsets}
    y = _call("jaxllm_panel_matmul", x.reshape(math.prod(rows), -1), panels, outer, used, outputs, out_dtype, **about)
    return y.reshape(*rows, *outputs)


def grouped_panel_product(
    x: Float[Array, "rows ..."],
    panels: UInt8[Array, "experts panels groups bytes"],
    offsets: Int[Array, " experts_plus_1"],
    *,
    outputs: tuple[int, ...],
    codes: Any,
    scales: Any,
    has_offsets: bool,
    outer: Float[Array, "experts ..."] | None = None,
    out_dtype: Any = None,
) -> Float[Array, "rows ..."]:
    """Likewise rows `offsets[e]:offsets[e + 1]` of `x[rows, *inputs]` with the weight of expert e, `[rows, *outputs]`;
    rows of none come out as zeros."""
    about = {"codes": codes, "scales": scales, "has_offsets": has_offsets}
    rows = x.reshape(len(x), math.prod(x.shape[1:]))  # of which there may be none
    y = _call("jaxllm_grouped_panel_matmul", rows, panels, outer, offsets, outputs, out_dtype, **about)
    return y.reshape(len(x), *outputs)


def columns(
    panels: UInt8[Array, "panels groups bytes"],
    ids: Int[Array, " n"],
    *,
    codes: Any,
    scales: Any,
    has_offsets: bool,
    outer: Float[Array, " outputs"] | None = None,
) -> Float[Array, "inputs n"]:
    """What the weight of these outputs stands for, in float32."""
    records, column = panels[ids // PANEL], (ids % PANEL)[:, None, None, None]
    (_, bits), (_, size) = CODES[jnp.dtype(codes).name], SCALES[jnp.dtype(scales).name]
    head = (2 if has_offsets else 1) * PANEL * size
    numbers = records[..., :head].reshape(*records.shape[:2], -1, PANEL, size)
    numbers = jnp.take_along_axis(numbers, column[..., None], axis=3)[:, :, :, 0]
    numbers = jax.lax.bitcast_convert_type(numbers if size > 1 else numbers[..., 0], scales).astype(jnp.float32)
    held = records[..., head:].reshape(*records.shape[:2], -1, PANEL, 4)
    held = jnp.take_along_axis(held, column[..., None], axis=3)[:, :, :, 0]  # n, groups, runs, 4
    if bits == 4:
        held = jnp.stack([held & 15, held >> 4], axis=3)
    values = _numbers_of(held.reshape(*records.shape[:2], -1), codes) * numbers[:, :, :1]
    values = (values + numbers[:, :, 1:] if has_offsets else values).reshape(len(ids), -1).T
    return values if outer is None else values * outer[ids][None]


def _numbers_of(held: UInt8[Array, "..."], codes: Any) -> Float[Array, "..."]:
    name = jnp.dtype(codes).name
    if name == "float4_e2m1fn":
        return jnp.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], jnp.float32)[held]
    return held.astype(jnp.float32) - {"int8": 128.0, "int4": 8.0, "uint4": 0.0}[name]


def _call(
    target: str,
    x: Array,
    panels: Array,
    outer: Array | None,
    which: Array,
    outputs: tuple[int, ...],
    out_dtype: Any,
    *,
    codes: Any,
    scales: Any,
    has_offsets: bool,
) -> Array:
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    assert x.dtype.name in DTYPES and out_dtype.name in DTYPES
    result = jax.ShapeDtypeStruct((len(x), math.prod(outputs)), out_dtype)
    outer = jnp.zeros(0) if outer is None else outer.reshape(-1)
    part = math.gcd(x.shape[1] // panels.shape[-2], PART)
    code, numbers = CODES[jnp.dtype(codes).name][0], SCALES[jnp.dtype(scales).name][0]
    call = native.ffi_call(target, result)
    return call(x, panels, outer, which, code=code, numbers=numbers, part=part, has_offsets=has_offsets)
