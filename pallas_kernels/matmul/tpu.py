"""Products with a weight on TPUs whose rows depend on no other row, to the bit: a Mosaic kernel with tiles of one shape
for any number of rows, which adds up a tile's inputs in order.

The matrix unit streams a tile's rows past the weight, each alike; rows that pad the last tile are zeros that nobody
reads. A tile has all inputs, so that none are added up by the number of programs.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.gradients import with_gradient_of
from jaxllm.pallas_kernels.matmul import reference
from jaxllm.pallas_kernels.matmul.reference import as_matrices

DTYPES = ("float32", "bfloat16")
LANES = 128
MOST_ROWS, MOST_OUTPUTS = 128, 512  # of a tile
TILE_BYTES = 4 << 20  # of its rows, and of its part of the weight, if they are not of the least size
DEPTH = 512  # inputs at a time
VMEM_BYTES = 56 << 20


class StreamedTile(NamedTuple):
    """Of a program: rows, and outputs of each member."""

    rows: int
    outputs: int


def supports(equation: str, x: Array, weight: Array) -> bool:
    """Whether the kernel supports these dtypes."""
    return x.dtype.name in DTYPES and x.dtype == weight.dtype


def einsum(
    equation: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    out_dtype: Any = None,
    *,
    num_tokens: Int[Array, ""] | None = None,
    batch_invariant: bool = True,
    interpret: Any = False,
) -> Float[Array, "..."]:
    """See `reference.einsum`. Accumulates in float32, always in one order; `interpret` is that of `pl.pallas_call`."""
    del batch_invariant  # it always is
    kernel = partial(_einsum, equation, out_dtype=out_dtype, interpret=interpret)
    return with_gradient_of(partial(reference.einsum, equation, out_dtype=out_dtype), kernel, num_tokens)(x, weight)


def _einsum(equation: str, x: Array, weight: Array, *, out_dtype: Any, interpret: Any) -> Array:
    of = as_matrices(equation, x, weight)
    weight = of.weight
    if len(of.columns) == 2 and not of.transposed:  # gate and up, say: the compiler would copy them to one axis
        weight = weight.reshape(-1, *of.columns)
    y = _product(of.x, weight, of.transposed, jnp.dtype(out_dtype or x.dtype), interpret)
    return y.reshape(*of.rows, *of.columns)


def tile_of(inputs: int, members: int, outputs: int, itemsize: int) -> StreamedTile:
    """By the weight alone: a tile has all its inputs."""
    columns, rows = MOST_OUTPUTS, MOST_ROWS
    while columns > LANES and columns * members * inputs * itemsize > TILE_BYTES:
        columns //= 2
    while rows > 16 and rows * inputs * itemsize > TILE_BYTES:
        rows //= 2
    return StreamedTile(rows, min(columns, outputs))


def _product(x: Array, weight: Array, transposed: bool, out_dtype: Any, interpret: Any) -> Array:
    """`x[rows, inputs]` times `weight[inputs, outputs]`, or transposed `[outputs, inputs]`, or of several members
    `[inputs, members, outputs]`."""
    (rows, inputs), outputs, itemsize = x.shape, weight.shape[0 if transposed else -1], x.dtype.itemsize
    members = weight.shape[1:-1]
    tile = tile_of(inputs, math.prod(members), outputs, itemsize)
    x = jnp.pad(x, ((0, -rows % tile.rows), (0, 0)))
    columns = pl.BlockSpec((inputs, *members, tile.outputs), lambda n, _: (0, *(0 for _ in members), n))
    if transposed:
        columns = pl.BlockSpec((tile.outputs, inputs), lambda n, _: (n, 0))
    grid = pl.cdiv(outputs, tile.outputs), len(x) // tile.rows  # a part of the weight stays for all rows
    y = jax.ShapeDtypeStruct((len(x), *members, outputs), out_dtype)
    y = pl.pallas_call(
        partial(_kernel, transposed),
        grid=grid,
        in_specs=[pl.BlockSpec((tile.rows, inputs), lambda _, m: (m, 0)), columns],
        out_specs=pl.BlockSpec((tile.rows, *members, tile.outputs), lambda n, m: (m, *(0 for _ in members), n)),
        out_shape=y,
        scratch_shapes=[pltpu.VMEM((*members, *tile), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="jaxllm_matmul",
        cost_estimate=pl.CostEstimate(
            flops=2 * len(x) * weight.size,
            transcendentals=0,
            bytes_accessed=(weight.size + grid[0] * x.size) * itemsize + y.size * out_dtype.itemsize,
        ),
    )(x, weight)
    return y[:rows]


def _kernel(transposed: bool, x_ref: Any, weight_ref: Any, y_ref: Any, acc_ref: Any) -> None:
    inputs, members = x_ref.shape[1], [(i,) for i in range(weight_ref.shape[1])] if weight_ref.ndim == 3 else [()]
    highest = jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
    dims = (((1,), (1 if transposed else 0,)), ((), ()))

    def add(at: Any) -> None:
        for member in members:
            weight = weight_ref[:, at] if transposed else weight_ref[at, *member, :]
            acc_ref[(*member, ...)] += jax.lax.dot_general(
                x_ref[:, at], weight, dims, precision=highest, preferred_element_type=jnp.float32
            )

    acc_ref[...] = jnp.zeros_like(acc_ref)
    if inputs >= DEPTH:
        pl.loop(0, inputs // DEPTH)(lambda i: add(pl.ds(pl.multiple_of(i * DEPTH, DEPTH), DEPTH)))
    if inputs % DEPTH:
        add(pl.ds(inputs // DEPTH * DEPTH, inputs % DEPTH))
    for member in members:
        y_ref[:, *member, :] = acc_ref[(*member, ...)].astype(y_ref.dtype)
