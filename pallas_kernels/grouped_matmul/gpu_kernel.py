"""The kernel body of `gpu.py`, in Pallas-Triton: a tile of one expert's rows times a tile of its outputs, for a split
of the inputs. The sums are transposed, outputs by rows: tensor cores take 8 columns, but not 8 rows."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxllm.pallas_kernels.quantized_matmul.gpu_kernel import dot, iota, numbers


class GroupTiling(NamedTuple):
    """What is static in the kernel."""

    sizes: tuple[int, ...]  # of tiles of rows
    inputs: int
    outputs: int
    depth: int  # inputs that are multiplied at once
    tile: int  # outputs of a program
    splits: int  # programs that share a tile's inputs
    parts: int  # inputs, in units of `depth`
    by_output: bool  # codes; else dense, or codes by group
    group: int | None  # inputs that share a scale
    codes: str  # their dtype
    scales: str | None


def tile_and_column(num_tiles: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """Of this program. Neighbours share an expert's weight, or else rows, in the L2 cache: eight tiles go through all
    columns together."""
    program, width = pl.program_id(0), min(8, num_tiles)
    first = jax.lax.div(program, width * columns) * width
    within = jax.lax.rem(program, width * columns)
    width = jnp.minimum(num_tiles - first, width)
    return first + jax.lax.rem(within, width), jax.lax.div(within, width)


def kernel(
    spec: GroupTiling,
    expert_ref: Any,
    first_ref: Any,
    end_ref: Any,
    size_ref: Any,
    x_ref: Any,
    codes_ref: Any,
    scales_ref: Any,
    offsets_ref: Any,
    outer_ref: Any,
    y_ref: Any,
):
    """Weights, of this program's outputs: dense [experts, inputs, all outputs], codes [experts, parts, depth, tile] or
    by output [experts, tile, parts, depth], scales and offsets [experts, groups, tile] or [experts, tile], `outer`
    [experts, tile]."""
    tile, column = tile_and_column(len(expert_ref), -(-spec.outputs // spec.tile))
    size, expert = plt.load(size_ref.at[tile]), plt.load(expert_ref.at[tile])
    first, end = plt.load(first_ref.at[tile]), plt.load(end_ref.at[tile])
    begin = pl.program_id(1) * (spec.parts // spec.splits)
    output = column * spec.tile + iota(spec.tile)
    is_output = None if spec.outputs % spec.tile == 0 else output < spec.outputs

    def weight(part: jax.Array, dtype: Any) -> jax.Array:
        """[tile, depth]"""
        if spec.by_output:
            return numbers(plt.load(codes_ref.at[expert, :, part]), spec.codes, dtype)
        if spec.scales is not None:
            return numbers(plt.load(codes_ref.at[expert, part]), spec.codes, dtype).T
        index = (part * spec.depth + iota(spec.depth))[:, None]
        mask = None if spec.inputs % spec.depth == 0 else index < spec.inputs
        if is_output is not None:
            mask = is_output[None, :] if mask is None else mask & is_output[None, :]
        at = codes_ref.at[expert, index, output[None, :]]
        return plt.load(at, mask=mask, other=None if mask is None else 0.0).astype(dtype).T

    def multiply(rows: int) -> None:
        row = (first + iota(rows))[:, None]

        def add(i: jax.Array, acc: jax.Array) -> jax.Array:
            part = begin + i
            index = (part * spec.depth + iota(spec.depth))[None, :]
            mask = row < end if spec.inputs % spec.depth == 0 else (row < end) & (index < spec.inputs)
            x = plt.load(x_ref.at[row, index], mask=mask, other=0.0)
            y = dot(weight(part, x.dtype), x, 1)
            if spec.group is None:
                return acc + y
            group = jax.lax.div(part, spec.group // spec.depth)
            y = y * numbers(plt.load(scales_ref.at[expert, group]), spec.scales, jnp.float32)[:, None]
            if offsets_ref is not None:
                sums = jnp.sum(x.astype(jnp.float32), axis=1)
                y = y + plt.load(offsets_ref.at[expert, group])[:, None] * sums[None, :]
            return acc + y

        acc = jnp.zeros((spec.tile, rows), jnp.float32)
        acc = jax.lax.fori_loop(0, spec.parts // spec.splits, add, acc)
        if spec.by_output:
            acc = acc * numbers(plt.load(scales_ref.at[expert]), spec.scales, jnp.float32)[:, None]
        if outer_ref is not None:
            acc = acc * plt.load(outer_ref.at[expert])[:, None]
        row = (first + iota(rows))[None, :]
        mask = row < end if is_output is None else (row < end) & is_output[:, None]
        plt.store(y_ref.at[row, output[:, None]], acc.astype(y_ref.dtype), mask=mask)

    for rows in spec.sizes:
        pl.when(size == rows)(partial(multiply, rows))
