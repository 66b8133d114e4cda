"""Products of groups of rows with a weight each on NVIDIA GPUs from A100 on: a Pallas-Triton kernel that reads the
weights of experts that have rows as they are."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.dispatch import compute_capability
from jaxllm.pallas_kernels.grouped_matmul.gpu_kernel import GroupTiling, kernel, tile_and_column
from jaxllm.pallas_kernels.grouped_matmul.reference import is_owned
from jaxllm.pallas_kernels.grouped_matmul.tiles import most_tiles, sizes_of, tiles_of
from jaxllm.pallas_kernels.quantized_matmul import QuantizedWeight
from jaxllm.pallas_kernels.quantized_matmul.gpu import DTYPES, MIN_SPLIT, PROGRAMS, as_unsigned, output_shape


def supports(
    x: Array, weight: Array | QuantizedWeight, offsets: Array, *, num_inputs: int = 1, out_dtype: Any = None
) -> bool:
    if x.dtype.name not in DTYPES or compute_capability() < 80 or not len(x):
        return False
    x, weight = jax.eval_shape(partial(flatten, num_inputs=num_inputs), x, weight)
    codes = weight.codes
    if codes.dtype.itemsize == 1 and 2**31 <= codes.size <= 2**32:  # offsets that Pallas-Triton counts in 32 bits
        return False
    return plan(x, weight) is not None


def product(
    x: Float[Array, "rows ..."],
    weight: Float[Array, "experts ..."] | QuantizedWeight,
    offsets: Int[Array, " experts_plus_1"],
    *,
    num_inputs: int = 1,
    out_dtype: Any = None,
    interpret: bool = False,
) -> Float[Array, "rows ..."]:
    """See `reference.product`; `interpret` is that of `pl.pallas_call`."""
    quantized = isinstance(weight, QuantizedWeight)
    outputs = output_shape(one_of(weight), num_inputs) if quantized else weight.shape[1 + num_inputs :]
    x, weight = flatten(x, weight, num_inputs)
    spec = plan(x, weight)
    if spec is None:
        raise ValueError(f"no tiles divide a weight of {weight.codes.shape}; choose implementation='reference'")
    y = multiply(x, weight, offsets, spec=spec, out_dtype=jnp.dtype(out_dtype or x.dtype), interpret=interpret)
    y = jnp.where(is_owned(len(y), offsets)[:, None], y, jnp.zeros((), y.dtype))
    return y.reshape(len(y), *outputs)


def one_of(weight: QuantizedWeight) -> QuantizedWeight:
    """Shapes of one expert's parts."""
    return jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape[1:], part.dtype), weight)


def flatten(x: Array, weight: Array | QuantizedWeight, num_inputs: int) -> tuple[Array, QuantizedWeight]:
    """x `[rows, inputs]`, and the weight with one axis of outputs, and one of inputs or groups; a dense one as codes
    `[experts, inputs, outputs]` without scales."""
    x = x.reshape(len(x), -1)
    if not isinstance(weight, QuantizedWeight):
        return x, QuantizedWeight(weight.reshape(len(weight), x.shape[1], -1), None)
    size = math.prod(output_shape(one_of(weight), num_inputs))
    codes, scales, offsets, outer = weight
    experts = len(codes)
    outer = None if outer is None else outer.reshape(experts, size)
    if scales.ndim < codes.ndim:
        return x, QuantizedWeight(codes.reshape(experts, size, -1), scales.reshape(experts, size), None, outer)
    group = codes.shape[1 + num_inputs]
    offsets = None if offsets is None else offsets.reshape(experts, -1, size)
    codes = codes.reshape(experts, -1, group, size)
    return x, QuantizedWeight(codes, scales.reshape(experts, -1, size), offsets, outer)


def plan(x: Any, weight: QuantizedWeight) -> GroupTiling | None:
    """Tiles and splits for operands of `flatten`; None for shapes that none divides."""
    (rows, inputs), (codes, scales, *_) = x.shape, weight
    experts, is_dense = len(codes), scales is None
    outputs = codes.shape[2] if is_dense else scales.shape[-1]
    by_output = not is_dense and scales.ndim < codes.ndim and codes.ndim == 3
    group = codes.shape[2] if codes.ndim == 4 else None
    sizes = sizes_of(rows, experts)
    many = sizes[0] >= 32
    deepest, widest = 64 if many else 128, 128 if many else 64
    if x.dtype == jnp.float32:  # no tensor cores: float32 in full precision
        sizes, deepest, widest = tuple(size for size in sizes if size <= 32), 32, 64
    if is_dense:
        depth, tile = deepest, widest
        depth = math.gcd(depth, inputs) if inputs % 16 == 0 else depth
        tile = math.gcd(tile, outputs) if outputs % 32 == 0 else tile
    else:
        depth, tile = math.gcd(deepest, group or inputs), math.gcd(widest, outputs)
        if depth < 16 or tile < 16:
            return None
    parts, columns = -(-inputs // depth), -(-outputs // tile)
    live = max(min(rows, experts), rows // sizes[0])  # tiles, about
    wanted = min(-(-PROGRAMS // (live * columns)), max(1, inputs // MIN_SPLIT))
    return GroupTiling(
        sizes=sizes,
        inputs=inputs,
        outputs=outputs,
        depth=depth,
        tile=tile,
        splits=max(n for n in range(1, wanted + 1) if parts % n == 0),
        parts=parts,
        by_output=by_output,
        group=group,
        codes=codes.dtype.name,
        scales=None if is_dense else scales.dtype.name,
    )


def multiply(
    x: Array, weight: QuantizedWeight, offsets: Array, *, spec: GroupTiling, out_dtype: Any, interpret: bool
) -> Array:
    """The kernel, for operands of `flatten`; rows of nobody are not written."""
    rows, experts = len(x), len(weight.codes)
    tiles = tiles_of(offsets, rows, sizes=spec.sizes)
    num_tiles, columns = most_tiles(rows, experts, spec.sizes), -(-spec.outputs // spec.tile)

    def whole(array: Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)

    def columns_of(array: Array | None, axis: int = -1) -> pl.BlockSpec | None:
        """All of it but, on `axis`, a program's outputs."""
        if array is None:
            return None
        axis %= array.ndim
        block = tuple(spec.tile if i == axis else size for i, size in enumerate(array.shape))

        def index(*_: Any) -> tuple[Any, ...]:
            column = tile_and_column(num_tiles, columns)[1]
            return tuple(column if i == axis else 0 for i in range(array.ndim))

        return pl.BlockSpec(block, index)

    codes, scales, shifts, outer = (None if part is None else as_unsigned(part) for part in weight)
    if spec.by_output:
        codes = codes.reshape(experts, spec.outputs, spec.parts, spec.depth)
    elif scales is not None:
        codes = codes.reshape(experts, spec.parts, spec.depth, spec.outputs)
    code_spec = whole(codes) if scales is None else columns_of(codes, 1 if spec.by_output else -1)
    specs = [whole(array) for array in (*tiles[:4], x)]
    specs += [code_spec, columns_of(scales), columns_of(shifts), columns_of(outer)]
    dtype = out_dtype if spec.splits == 1 else jnp.dtype(jnp.float32)
    touched = min(rows, experts) / experts
    y = pl.pallas_call(
        partial(kernel, spec),
        grid=(num_tiles * columns, spec.splits),
        in_specs=specs,
        out_specs=pl.BlockSpec((None, rows, spec.outputs), lambda _, split: (split, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((spec.splits, rows, spec.outputs), dtype),
        compiler_params=plt.CompilerParams(num_warps=8 if spec.sizes[0] >= 64 else 4, num_stages=4),
        interpret=interpret,
        name="jaxllm_grouped_matmul",
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * spec.inputs * spec.outputs,
            transcendentals=0,
            bytes_accessed=int(touched * codes.nbytes) + x.nbytes + rows * spec.outputs * dtype.itemsize,
        ),
    )(*tiles[:4], x, codes, scales, shifts, outer)
    return y[0] if spec.splits == 1 else jnp.sum(y, axis=0).astype(out_dtype)
