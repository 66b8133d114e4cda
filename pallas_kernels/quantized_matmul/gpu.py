"""Products with a quantised weight on NVIDIA GPUs from A100 on. Few rows: a Pallas-Triton kernel that reads the codes
as they are. Many: XLA's product, with the weight in the dtype of the rows, or of eight bits on both sides."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.dispatch import compute_capability
from jaxllm.pallas_kernels.quantized_matmul import eight_bits, reference
from jaxllm.pallas_kernels.quantized_matmul.gpu_kernel import Tiling, kernel
from jaxllm.pallas_kernels.quantized_matmul.weight import QuantizedWeight

DTYPES = ("float32", "bfloat16")
MOST_ROWS = 64  # of the kernel: beyond, tensor cores want larger tiles than codes are dequantised for
PROGRAMS = 264  # that keep an H200 busy: two a multiprocessor
MIN_SPLIT = 512  # inputs worth a program of their own
UNSIGNED = {"float8_e4m3fn": jnp.uint8, "float8_e8m0fnu": jnp.uint8, "float4_e2m1fn": jnp.uint4}


def supports(x: Array, weight: QuantizedWeight, **options: Any) -> bool:
    return x.dtype.name in DTYPES and compute_capability() >= 80


def product(
    x: Float[Array, "..."],
    weight: QuantizedWeight,
    *,
    num_inputs: int,
    out_dtype: Any = None,
    activations: str | None = None,
    num_tokens: Any = None,
    interpret: bool = False,
) -> Float[Array, "..."]:
    """See `reference.product`; `interpret` is that of `pl.pallas_call`."""
    del num_tokens  # padding is multiplied, too
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    rows = math.prod(x.shape[: x.ndim - num_inputs])
    rounds = eight_bits.supports(weight, activations)
    if rounds and (compute_capability() >= 89 if activations == "float8_e4m3fn" else rows > MOST_ROWS):
        return eight_bits.product(x, weight, num_inputs=num_inputs, out_dtype=out_dtype)
    operands = flatten(x, weight, num_inputs)
    if rows <= MOST_ROWS and (spec := plan(*operands)) is not None:
        y = multiply(*operands, spec=spec, out_dtype=out_dtype, interpret=interpret)
        return y.reshape(*x.shape[: x.ndim - num_inputs], *output_shape(weight, num_inputs))
    if not weight.is_grouped:
        return reference.product(x, weight, num_inputs=num_inputs, out_dtype=out_dtype)
    dense = weight.dense(num_inputs).astype(x.dtype)
    axes = tuple(range(x.ndim - num_inputs, x.ndim)), tuple(range(num_inputs))
    highest = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jax.lax.dot_general(x, dense, (axes, ((), ())), precision=highest, preferred_element_type=jnp.float32)
    return y.astype(out_dtype)


def output_shape(weight: QuantizedWeight, num_inputs: int) -> tuple[int, ...]:
    return weight.scales.shape[num_inputs + 1 :] if weight.is_grouped else weight.scales.shape


def flatten(x: Array, weight: QuantizedWeight, num_inputs: int) -> tuple[Array, QuantizedWeight]:
    """x `[rows, inputs]`, and the weight with one axis of outputs, and one of inputs or groups."""
    x = x.reshape(-1, math.prod(x.shape[x.ndim - num_inputs :]))
    size = math.prod(output_shape(weight, num_inputs))
    codes, scales, offsets, outer = weight
    outer = None if outer is None else outer.reshape(size)
    if not weight.is_grouped:
        return x, QuantizedWeight(codes.reshape(size, -1), scales.reshape(size), None, outer)
    group = codes.shape[num_inputs]
    offsets = None if offsets is None else offsets.reshape(-1, 1, size)
    return x, QuantizedWeight(codes.reshape(-1, group, size), scales.reshape(-1, 1, size), offsets, outer)


def plan(x: Array, weight: QuantizedWeight) -> Tiling | None:
    """Tiles and splits for operands of `flatten`; None for shapes that none divides."""
    rows, inputs = x.shape
    outputs = weight.scales.shape[-1]
    group = weight.codes.shape[1] if weight.is_grouped else None
    depth, tile = math.gcd(128, group or inputs), math.gcd(128 if group else 64, outputs)
    if depth < 16 or tile < 32:
        return None
    parts = inputs // depth
    wanted = min(-(-PROGRAMS // (outputs // tile)), max(1, inputs // MIN_SPLIT))
    return Tiling(
        rows=max(16, pl.next_power_of_2(rows)),
        num_rows=rows,
        depth=depth,
        tile=tile,
        splits=max(n for n in range(1, wanted + 1) if parts % n == 0),
        parts=parts,
        group=group,
        codes=weight.codes.dtype.name,
        scales=weight.scales.dtype.name,
    )


class _Operand(NamedTuple):
    array: Array
    spec: pl.BlockSpec


def multiply(x: Array, weight: QuantizedWeight, *, spec: Tiling, out_dtype: Any, interpret: bool) -> Array:
    """The kernel, for operands of `flatten`: each program `spec.tile` outputs and a split of the inputs."""
    (rows, inputs), outputs, grouped = x.shape, weight.scales.shape[-1], weight.is_grouped

    def table(array: Array | None) -> _Operand | None:
        """Of numbers `[outputs]` or `[groups, 1, outputs]`: a program's columns."""
        if array is None:
            return None
        array = as_unsigned(array)
        if array.ndim == 1:
            return _Operand(array, pl.BlockSpec((spec.tile,), lambda n, _: (n,)))
        block = pl.BlockSpec((len(array), None, spec.tile), lambda n, _: (0, 0, n))
        return _Operand(array, block)

    codes = as_unsigned(weight.codes)
    if grouped:
        shape, block = (spec.parts, spec.depth, outputs), (spec.parts, spec.depth, spec.tile)
        codes = _Operand(codes.reshape(shape), pl.BlockSpec(block, lambda n, _: (0, 0, n)))
    else:
        shape, block = (outputs, spec.parts, spec.depth), (spec.tile, spec.parts, spec.depth)
        codes = _Operand(codes.reshape(shape), pl.BlockSpec(block, lambda n, _: (n, 0, 0)))
    given = [_Operand(x, pl.BlockSpec(x.shape, lambda *_: (0, 0))), codes]
    given += [table(array) for array in (weight.scales, weight.offsets, weight.outer)]
    arrays, specs = zip(*(operand or (None, None) for operand in given), strict=True)
    dtype = out_dtype if spec.splits == 1 else jnp.float32
    moved = codes.array.size * weight.codes.dtype.itemsize + x.size * x.dtype.itemsize
    y = pl.pallas_call(
        partial(kernel, spec),
        grid=(outputs // spec.tile, spec.splits),
        in_specs=list(specs),
        out_specs=pl.BlockSpec((None, rows, spec.tile), lambda n, split: (split, 0, n)),
        out_shape=jax.ShapeDtypeStruct((spec.splits, rows, outputs), dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name="jaxllm_quantized_matmul",
        cost_estimate=pl.CostEstimate(flops=2 * rows * inputs * outputs, transcendentals=0, bytes_accessed=moved),
    )(*arrays)
    return y[0] if spec.splits == 1 else jnp.sum(y, axis=0).astype(out_dtype)


def as_unsigned(array: Array) -> Array:
    """Floats of 8 and 4 bits as their bits, which every GPU and the kernel's compiler can read."""
    dtype = UNSIGNED.get(array.dtype.name)
    return array if dtype is None else jax.lax.bitcast_convert_type(array, dtype)
