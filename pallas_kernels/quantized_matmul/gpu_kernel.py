"""The kernel body of `gpu.py`, in Pallas-Triton: a tile of outputs, for a split of the inputs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


class Tiling(NamedTuple):
    """What is static in the kernel."""

    rows: int  # of x, a power of two and at least 16
    num_rows: int  # that x has
    depth: int  # inputs that are multiplied at once; they share a scale
    tile: int  # outputs of a program
    splits: int  # programs that share a tile's inputs
    parts: int  # inputs, in units of `depth`
    group: int | None  # inputs that share a scale; None: all, and the codes are by output
    codes: str  # their dtype
    scales: str


def kernel(spec: Tiling, x_ref: Any, codes_ref: Any, scales_ref: Any, offsets_ref: Any, outer_ref: Any, y_ref: Any):
    """Codes are [parts, depth, tile], or [tile, parts, depth] without groups; scales and offsets are [groups, tile], or
    without groups [tile]; `outer` is [tile]."""
    row, inputs = iota(spec.rows)[:, None], iota(spec.depth)[None, :]
    is_row = row < spec.num_rows
    first = pl.program_id(1) * (spec.parts // spec.splits)

    def add(i: jax.Array, acc: jax.Array) -> jax.Array:
        part = first + i
        x = plt.load(x_ref.at[row, part * spec.depth + inputs], mask=is_row, other=0.0)
        if spec.group is None:
            return acc + dot(x, numbers(plt.load(codes_ref.at[:, part]), spec.codes, x.dtype), 1)
        y = dot(x, numbers(plt.load(codes_ref.at[part]), spec.codes, x.dtype), 0)
        group = jax.lax.div(part, spec.group // spec.depth)
        y = y * numbers(plt.load(scales_ref.at[group]), spec.scales, jnp.float32)[None, :]
        if offsets_ref is not None:
            sums = jnp.sum(x.astype(jnp.float32), axis=1)
            y = y + sums[:, None] * plt.load(offsets_ref.at[group])[None, :]
        return acc + y

    acc = jnp.zeros((spec.rows, spec.tile), jnp.float32)
    acc = jax.lax.fori_loop(0, spec.parts // spec.splits, add, acc)
    if spec.group is None:
        acc = acc * numbers(scales_ref[:], spec.scales, jnp.float32)[None, :]
    if outer_ref is not None:
        acc = acc * outer_ref[:][None, :]
    plt.store(y_ref.at[row, iota(spec.tile)[None, :]], acc.astype(y_ref.dtype), mask=is_row)


def numbers(codes: jax.Array, name: str, dtype: Any) -> jax.Array:
    """The numbers of dtype `name` that `codes`, their bits if they are floats of 8 or 4 bits, stand for."""
    if name == "float8_e4m3fn":  # by way of float16, which has the same numbers, 2^8 times smaller
        bits = codes.astype(jnp.uint16)
        value = from_bits((bits & 0x80) << 8 | (bits & 0x7F) << 7, jnp.float16).astype(jnp.float32) * 2.0**8
        return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, value).astype(dtype)
    if name == "float4_e2m1fn":
        bits = codes.astype(jnp.uint16)
        value = from_bits((bits & 8) << 12 | (bits & 7) << 9, jnp.float16).astype(jnp.float32) * 2.0**14
        return value.astype(dtype)
    if name == "float8_e8m0fnu":  # 2^(code - 127), NaN for 255
        bits = codes.astype(jnp.uint32)
        value = from_bits(jnp.where(bits == 0, jnp.uint32(0x400000), bits << 23), jnp.float32)
        return jnp.where(bits == 255, jnp.nan, value).astype(dtype)
    return codes.astype(jnp.float32).astype(dtype)


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, dtype)


def iota(size: int) -> jax.Array:
    return jnp.arange(size, dtype=jnp.int32)


def dot(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
    """float32 products: bfloat16 as they are, float32 in full precision."""
    dims = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
