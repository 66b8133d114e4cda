"""Products of groups of rows with a weight each on TPUs: a Mosaic kernel whose index maps fetch the weights of experts
that have rows, each once, and which makes numbers of codes in VMEM."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.dispatch import device_kind
from jaxllm.pallas_kernels.grouped_matmul.reference import is_owned
from jaxllm.pallas_kernels.grouped_matmul.tiles import sizes_of, tiles_of
from jaxllm.pallas_kernels.grouped_matmul.tpu_kernel import LANES, PACKED, BlockTiling, kernel
from jaxllm.pallas_kernels.quantized_matmul import QuantizedWeight

DTYPES = ("float32", "bfloat16")
FEW_BYTES, MANY_BYTES = 2**21, 2**22  # of a tile's weight: for a few rows, which wait for the first; for many
CHUNK_BYTES = 6 * 2**20  # of x in VMEM, of which there are two
VMEM_BYTES = 48 * 2**20


class _ExpertOperand(NamedTuple):
    array: Array
    spec: pl.BlockSpec


def supports(
    x: Array, weight: Array | QuantizedWeight, offsets: Array, *, num_inputs: int = 1, out_dtype: Any = None
) -> bool:
    """One axis of inputs, and one of outputs, or two of which the first is gate and up: what experts have."""
    if x.dtype.name not in DTYPES or num_inputs != 1 or not len(x) or x.shape[1] % PACKED:
        return False
    if not isinstance(weight, QuantizedWeight):
        return weight.dtype == x.dtype and (weight.ndim == 3 or (weight.ndim == 4 and weight.shape[2] == 2))
    outputs, group = _outputs(weight), weight.codes.shape[2] if weight.is_grouped else PACKED
    return group % PACKED == 0 and (len(outputs) == 1 or (len(outputs) == 2 and outputs[0] == 2))


def product(
    x: Float[Array, "rows inputs"],
    weight: Float[Array, "experts ..."] | QuantizedWeight,
    offsets: Int[Array, " experts_plus_1"],
    *,
    num_inputs: int = 1,
    out_dtype: Any = None,
    interpret: Any = False,
) -> Float[Array, "rows ..."]:
    """See `reference.product`; `interpret` is that of `pl.pallas_call`."""
    outputs, num_rows = _outputs(weight), len(x)
    x = jnp.pad(x, ((0, -num_rows % PACKED), (0, 0)))
    spec = plan(x, weight)
    y = multiply(x, weight, offsets, spec=spec, out_dtype=jnp.dtype(out_dtype or x.dtype), interpret=interpret)
    y = jnp.moveaxis(y[:, :num_rows], 0, 1)
    return jnp.where(is_owned(num_rows, offsets)[:, None, None], y, jnp.zeros((), y.dtype)).reshape(num_rows, *outputs)


def _outputs(weight: Any) -> tuple[int, ...]:
    if not isinstance(weight, QuantizedWeight):
        return weight.shape[2:]
    return weight.scales.shape[3:] if weight.is_grouped else weight.scales.shape[1:]


def _codes(weight: Any) -> Any:
    return weight.codes if isinstance(weight, QuantizedWeight) else weight


def _bits(dtype: Any) -> int:
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits


def plan(x: Any, weight: Any) -> BlockTiling:
    """Tiles for `x[rows, inputs]`, whose rows are a multiple of `PACKED`."""
    (rows, inputs), outputs, codes = x.shape, _outputs(weight), _codes(weight)
    sizes = sizes_of(rows, len(codes))
    form, group, scales = "dense" if len(outputs) == 1 else "paired", None, None
    if isinstance(weight, QuantizedWeight):
        form, scales = "group" if weight.is_grouped else "output", weight.scales.dtype.name
        group = codes.shape[2] if weight.is_grouped else None
    most = LANES  # of a paired one, whose rows then are neighbours
    if form != "paired":
        most = (FEW_BYTES if sizes[0] < 32 else MANY_BYTES) * 8 // (inputs * _bits(codes.dtype))
        most = max(LANES, min(1024, most // LANES * LANES))
    columns = -(-outputs[-1] // most)
    tile = outputs[-1] if columns == 1 and form != "paired" else -(-outputs[-1] // (columns * LANES)) * LANES
    chunk = CHUNK_BYTES // (inputs * x.dtype.itemsize) // sizes[0] * sizes[0]
    # The products of codes and these scales are then rounded once, as those of float32 are afterwards.
    exact = scales in ("bfloat16", "float8_e8m0fnu") and weight.offsets is None
    return BlockTiling(
        sizes=sizes,
        chunk=min(rows, max(chunk, sizes[0])),
        tile=tile,
        columns=columns,
        form=form,
        codes=codes.dtype.name,
        scales=scales,
        inputs=inputs,
        group=group,
        dequantised_in="bfloat16" if exact and has_bfloat16() else "float32",
    )


def has_bfloat16() -> bool:
    """Whether the vector unit adds and multiplies it."""
    return any(name in (device_kind() or "") for name in ("v6", "TPU7x"))


def multiply(
    x: Array, weight: Array | QuantizedWeight, offsets: Array, *, spec: BlockTiling, out_dtype: Any, interpret: Any
) -> Array:
    """The kernel: `[1 or 2, rows, outputs]`; rows of nobody are not written."""
    tiles = tiles_of(offsets, len(x), sizes=spec.sizes, chunk=spec.chunk)
    outputs, pairs = _outputs(weight)[-1], math.prod(_outputs(weight)[:-1])
    together = pairs if spec.form == "paired" else 1  # that a program has

    def rows_of(*place: Any) -> Any:
        _, visit, _, first, *_ = place
        return jax.lax.div(first[visit], spec.chunk)

    x_spec = pl.BlockSpec((spec.chunk, spec.inputs), lambda *place: (rows_of(*place), 0))
    parts = list(weight) if isinstance(weight, QuantizedWeight) else [weight, None, None, None]
    given = [None if part is None else operand(part, name, spec) for name, part in zip(_PARTS, parts, strict=True)]
    arrays, specs = zip(*(part or (None, None) for part in given), strict=True)

    def written(*place: Any) -> tuple[Any, ...]:
        return (jax.lax.div(place[0], spec.columns), rows_of(*place), jax.lax.rem(place[0], spec.columns))

    depth, width = (spec.tile, spec.inputs) if spec.form == "output" else (spec.inputs, together * spec.tile)
    groups = 1 if spec.group is None else spec.inputs // spec.group
    is_grouped = spec.form == "group"
    tables = pltpu.VMEM((2, groups, 1, spec.tile), jnp.float32)
    codes = _codes(weight)
    touched = min(len(x), len(codes)) / len(codes)
    return pl.pallas_call(
        partial(_with_scratch, spec),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pairs // together * spec.columns, tiles.count),
            in_specs=[x_spec, *specs],
            out_specs=pl.BlockSpec((together, spec.chunk, spec.tile), written),
            scratch_shapes=[]
            if spec.form == "dense"
            else [pltpu.VMEM((depth, width), x.dtype)] + [tables] * is_grouped,
        ),
        out_shape=jax.ShapeDtypeStruct((pairs, len(x), outputs), out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="jaxllm_grouped_matmul",
        cost_estimate=pl.CostEstimate(
            flops=2 * len(x) * spec.inputs * pairs * outputs,
            transcendentals=0,
            bytes_accessed=int(touched * codes.size * _bits(codes.dtype) / 8)
            + x.size * x.dtype.itemsize
            + len(x) * pairs * outputs * out_dtype.itemsize,
        ),
    )(*tiles[:4], x, *arrays)


def _with_scratch(spec: BlockTiling, *refs: Any) -> None:
    count = {"dense": 0, "group": 2}.get(spec.form, 1)
    scratch = refs[len(refs) - count :]
    kernel(spec, *refs[: len(refs) - count], *scratch, *[None] * (2 - count))


_PARTS = QuantizedWeight._fields


def operand(part: Array, name: str, spec: BlockTiling) -> _ExpertOperand:
    """A part of the weight as the compiler lays it out by itself, and its block for a program. Of a few bits the last
    two axes are those that are large; of 16 and more, those that are declared."""
    if part.dtype == jnp.float16:
        part = jax.lax.bitcast_convert_type(part, jnp.int16)
    narrow = _bits(part.dtype) <= 8
    tile, columns = spec.tile, spec.columns

    def block(array: Array, shape: tuple[int | None, ...], index: Any) -> _ExpertOperand:
        """`index` are the block's places on the axes after the experts', by pair and column."""

        def place(n: Any, visit: Any, expert: Any, *_: Any) -> tuple[Any, ...]:
            return (expert[visit], *index(jax.lax.div(n, columns), jax.lax.rem(n, columns)))

        return _ExpertOperand(array, pl.BlockSpec((None, *shape), place))

    if spec.form == "dense":
        return block(part, (spec.inputs, tile), lambda _, n: (0, n))
    if spec.form == "paired":
        return block(part, (spec.inputs, 2, tile), lambda _, n: (0, 0, n))
    experts, outputs = len(part), part.shape[-1]
    if spec.form == "output":
        if name == "codes":
            array = part.reshape(experts, -1, *part.shape[-2:])
            return block(array, (None, tile, spec.inputs), lambda pair, n: (pair, n, 0))
        return block(part.reshape(experts, -1, 1, outputs), (None, 1, tile), lambda pair, n: (pair, 0, n))
    groups = spec.inputs // spec.group
    if name == "outer":
        return block(part.reshape(experts, -1, 1, outputs), (None, 1, tile), lambda pair, n: (pair, 0, n))
    if name == "codes":
        array = jnp.moveaxis(part.reshape(experts, groups, spec.group, -1, outputs), 3, 2)
        return block(array, (groups, None, spec.group, tile), lambda pair, n: (0, pair, 0, n))
    array = part.reshape(experts, groups, -1, outputs)
    pairs = array.shape[2]
    if narrow or (pairs == 1 and part.dtype.itemsize == 2):
        return block(jnp.moveaxis(array, 2, 1), (None, groups, tile), lambda pair, n: (pair, 0, n))
    return block(array, (groups, pairs, tile), lambda _, n: (0, 0, n))
