"""Sums of rows on TPUs: a Mosaic kernel, each row of a tile alike, with tiles that the rows' width alone decides."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.gradients import with_gradient_of

ROWS = 8  # of a register, and at least of a tile
TILE_BYTES = 1 << 20  # a tile takes, if not of the least size
VMEM_BYTES = 40 << 20


def supports(x: Array) -> bool:
    return x.dtype == jnp.float32


def row_sums(x: Float[Array, "*rows d"], *, interpret: Any = False) -> Float[Array, "*rows 1"]:
    """See `api.row_sums`; `interpret` is that of `pl.pallas_call`."""
    return with_gradient_of(partial(jnp.sum, axis=-1, keepdims=True), partial(_row_sums, interpret=interpret))(x)


def _row_sums(x: Array, *, interpret: Any) -> Array:
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    rows = max(ROWS, min(512, TILE_BYTES // (4 * width) // ROWS * ROWS))
    padded = jnp.pad(flat, ((0, -len(flat) % rows), (0, 0)))
    sums = pl.pallas_call(
        _kernel,
        grid=(len(padded) // rows,),
        in_specs=[pl.BlockSpec((rows, width), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((rows, 1), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((len(padded), 1), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="jaxllm_row_sums",
    )(padded)
    return sums[: len(flat)].reshape(*x.shape[:-1], 1)


def _kernel(x_ref: Any, sums_ref: Any) -> None:
    sums_ref[...] = jnp.sum(x_ref[...], axis=1, keepdims=True)
