"""Products with a weight on NVIDIA GPUs from A100 on whose rows depend on no other row, to the bit: in Pallas-Triton,
tiles of one shape for any number of rows, each of which adds up its inputs in order and alone.

A tensor core computes a row of a tile alike wherever it stands and whatever stands beside it; rows that pad a tile are
zeros that nobody reads. Programs share no inputs, so that nothing is added up by their number.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.dispatch import compute_capability
from jaxllm.pallas_kernels.gradients import with_gradient_of
from jaxllm.pallas_kernels.matmul import reference
from jaxllm.pallas_kernels.matmul.reference import as_matrices
from jaxllm.pallas_kernels.quantized_matmul.gpu_kernel import dot, iota

DTYPES = ("float32", "bfloat16")


class ProductTile(NamedTuple):
    """Of one program: rows, outputs, and inputs at a time."""

    rows: int
    outputs: int
    depth: int
    num_stages: int


# 32 outputs, so that few rows, which wait for the weight, have programs for a whole GPU; 64 rows, which a group of four
# warps multiplies at once, so that many rows read a weight as seldom as that allows. float32 in full precision takes no
# tensor core.
TILES = {"bfloat16": ProductTile(64, 32, 128, 3), "float32": ProductTile(32, 32, 32, 3)}


def supports(equation: str, x: Array, weight: Array) -> bool:
    """Whether the kernel supports these dtypes."""
    return x.dtype.name in DTYPES and x.dtype == weight.dtype and compute_capability() >= 80


def einsum(
    equation: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    out_dtype: Any = None,
    *,
    num_tokens: Int[Array, ""] | None = None,
    batch_invariant: bool = True,
    interpret: bool = False,
) -> Float[Array, "..."]:
    """See `reference.einsum`. Accumulates in float32, always in one order; `interpret` is that of `pl.pallas_call`."""
    del batch_invariant  # it always is
    kernel = partial(_einsum, equation, out_dtype=out_dtype, interpret=interpret)
    return with_gradient_of(partial(reference.einsum, equation, out_dtype=out_dtype), kernel, num_tokens)(x, weight)


def _einsum(equation: str, x: Array, weight: Array, *, out_dtype: Any, interpret: bool) -> Array:
    of = as_matrices(equation, x, weight)
    y = _product(of.x, of.weight, of.transposed, jnp.dtype(out_dtype or x.dtype), interpret)
    return y.reshape(*of.rows, *of.columns)


def _product(x: Array, weight: Array, transposed: bool, out_dtype: Any, interpret: bool) -> Array:
    """`x[rows, inputs]` times `weight[inputs, outputs]`, or transposed `[outputs, inputs]`."""
    (rows, inputs), outputs, tile = x.shape, weight.shape[0 if transposed else 1], TILES[x.dtype.name]
    moved = weight.size * weight.dtype.itemsize + x.size * x.dtype.itemsize + rows * outputs * out_dtype.itemsize
    columns = pl.BlockSpec((inputs, tile.outputs), lambda _, n: (0, n))
    if transposed:
        columns = pl.BlockSpec((tile.outputs, inputs), lambda _, n: (n, 0))
    return pl.pallas_call(
        partial(_kernel, tile, transposed, *x.shape, outputs),
        grid=(pl.cdiv(rows, tile.rows), pl.cdiv(outputs, tile.outputs)),  # neighbours share a part of the weight
        in_specs=[pl.BlockSpec((tile.rows, inputs), lambda m, _: (m, 0)), columns],
        out_specs=pl.BlockSpec((tile.rows, tile.outputs), lambda m, n: (m, n)),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), out_dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=tile.num_stages),
        interpret=interpret,
        name="jaxllm_matmul",
        cost_estimate=pl.CostEstimate(flops=2 * rows * inputs * outputs, transcendentals=0, bytes_accessed=moved),
    )(x, weight)


def _kernel(
    tile: ProductTile,
    transposed: bool,
    num_rows: int,
    inputs: int,
    outputs: int,
    x_ref: Any,
    weight_ref: Any,
    y_ref: Any,
) -> None:
    row, output = iota(tile.rows), iota(tile.outputs)
    is_row = pl.program_id(0) * tile.rows + row < num_rows
    is_output = None if outputs % tile.outputs == 0 else pl.program_id(1) * tile.outputs + output < outputs

    def add(part: Array, acc: Array) -> Array:
        index = part * tile.depth + iota(tile.depth)
        is_input = None if inputs % tile.depth == 0 else index < inputs
        x = _load(x_ref, (row, index), (is_row, is_input))
        if transposed:
            return acc + dot(x, _load(weight_ref, (output, index), (is_output, is_input)), 1)
        return acc + dot(x, _load(weight_ref, (index, output), (is_input, is_output)), 0)

    acc = jax.lax.fori_loop(0, pl.cdiv(inputs, tile.depth), add, jnp.zeros((tile.rows, tile.outputs), jnp.float32))
    plt.store(y_ref.at[row[:, None], output[None, :]], acc.astype(y_ref.dtype), mask=_both(is_row, is_output))


def _load(ref: Any, at: tuple[Array, Array], is_there: tuple[Array | None, Array | None]) -> Array:
    """`ref[at]` of all pairs, zeros where nothing is."""
    mask = _both(*is_there)
    return plt.load(ref.at[at[0][:, None], at[1][None, :]], mask=mask, other=None if mask is None else 0.0)


def _both(rows: Array | None, columns: Array | None) -> Array | None:
    """Of every pair, whether both hold; None: all do."""
    if columns is None:
        return None if rows is None else rows[:, None]
    return columns[None, :] if rows is None else rows[:, None] & columns[None, :]
