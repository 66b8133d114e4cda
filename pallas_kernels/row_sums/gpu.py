"""Sums of rows on NVIDIA GPUs, in Pallas-Triton: a program for each, in tiles that its width alone decides."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.gradients import with_gradient_of

TILE = 4096  # that a program reads at once


def supports(x: Array) -> bool:
    return x.dtype == jnp.float32


def row_sums(x: Float[Array, "*rows d"], *, interpret: bool = False) -> Float[Array, "*rows 1"]:
    """See `api.row_sums`; `interpret` is that of `pl.pallas_call`."""
    return with_gradient_of(partial(jnp.sum, axis=-1, keepdims=True), partial(_row_sums, interpret=interpret))(x)


def _row_sums(x: Array, *, interpret: bool) -> Array:
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    tile = min(TILE, pl.next_power_of_2(width))
    sums = pl.pallas_call(
        partial(_kernel, tile),
        out_shape=jax.ShapeDtypeStruct((len(flat),), x.dtype),
        grid=(len(flat),),
        compiler_params=plt.CompilerParams(num_warps=max(1, tile // 256), num_stages=2),
        interpret=interpret,
        name="jaxllm_row_sums",
    )(flat)
    return sums.reshape(*x.shape[:-1], 1)


def _kernel(tile: int, x_ref: Any, sums_ref: Any) -> None:
    row, width, lanes = pl.program_id(0), x_ref.shape[1], jnp.arange(tile, dtype=jnp.int32)

    def add(i: Array, total: Array) -> Array:
        index = i * tile + lanes
        return total + plt.load(x_ref.at[row, index], mask=index < width, other=0.0)

    total = jax.lax.fori_loop(0, pl.cdiv(width, tile), add, jnp.zeros(tile, jnp.float32))
    sums_ref[row] = jnp.sum(total)
