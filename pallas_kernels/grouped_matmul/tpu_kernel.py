"""The kernel body of `tpu.py`, in Pallas-Mosaic: a tile of one expert's rows times a tile of its outputs."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

PACKED = 16  # rows at whose multiples a read of 16 bits may begin
LANES = 128
BITS = {"float8_e8m0fnu": jnp.uint8, "float4_e2m1fn": jnp.int4}  # of numbers that no chip converts


class BlockTiling(NamedTuple):
    """What is static in the kernel."""

    sizes: tuple[int, ...]  # of tiles of rows
    chunk: int  # rows of x that are in VMEM
    tile: int  # outputs of a program
    columns: int  # tiles of outputs
    form: str  # of the weight: "dense", "paired", "output" or "group"
    codes: str  # their dtype
    scales: str | None
    inputs: int
    group: int | None  # inputs that share a scale
    dequantised_in: str  # the dtype of the arithmetic


def kernel(
    spec: BlockTiling,
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
    weight_ref: Any,
    tables_ref: Any,
):
    """x and y are a chunk's rows, y with an axis of one or of two outputs that neighbours in memory have. Weights of
    the tile: dense [inputs, tile], paired [inputs, 2, tile], by output [tile, inputs], by group [groups, group, tile].
    `weight_ref` keeps what is multiplied, for the next tile of the same expert."""
    visit, pair = pl.program_id(1), jax.lax.div(pl.program_id(0), spec.columns)
    expert = expert_ref[visit]
    if weight_ref is not None:
        is_new = (visit == 0) | (expert != expert_ref[jnp.maximum(visit - 1, 0)])
        fill = {"paired": _fill_paired, "output": _fill_by_output, "group": _fill_by_group}[spec.form]
        pl.when(is_new)(partial(fill, spec, codes_ref, scales_ref, offsets_ref, pair, weight_ref, tables_ref))
    start, count = jax.lax.rem(first_ref[visit], spec.chunk), end_ref[visit] - first_ref[visit]

    def multiply(rows: int) -> None:
        """By way of a window whose first row is one that may be read."""
        window = min(-(-rows // PACKED) * PACKED + PACKED, spec.chunk)
        base = jnp.minimum(jax.lax.div(start, PACKED) * PACKED, spec.chunk - window)
        at, shift = pl.ds(pl.multiple_of(base, PACKED), window), start - base
        x = pltpu.roll(x_ref[at, :].astype(jnp.float32), jax.lax.rem(window - shift, window), 0)
        x = x[: min(rows, window)].astype(x_ref.dtype)
        weight = (codes_ref if weight_ref is None else weight_ref)[...]
        dims = (((1,), (1 if spec.form == "output" else 0,)), ((), ()))
        highest = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        y = jax.lax.dot_general(x, weight, dims, precision=highest, preferred_element_type=jnp.float32)
        if spec.form == "output":
            y = y * scales_ref[...].astype(jnp.float32)
        if outer_ref is not None:
            y = y * outer_ref[...]
        if window > len(y):
            y = jnp.concatenate([y, jnp.zeros((window - len(y), y.shape[1]), y.dtype)])
        y = pltpu.roll(y, shift, 0)
        row = jax.lax.broadcasted_iota(jnp.int32, (window, spec.tile), 0)
        is_own = (row >= shift) & (row < shift + count)
        for i in range(len(y_ref)):
            part = y[:, i * spec.tile : (i + 1) * spec.tile]
            merged = jnp.where(is_own, part, y_ref[i, at, :].astype(jnp.float32))
            y_ref[i, at, :] = merged.astype(y_ref.dtype)

    for rows in spec.sizes:
        pl.when(size_ref[visit] == rows)(partial(multiply, rows))


def _steps(total: int, unit: int, most: int) -> int:
    """The most that is at most `most`, a multiple of `unit`, and divides `total`; or `total`."""
    return max((n for n in range(unit, min(most, total) + 1, unit) if total % n == 0), default=total)


def _fill_paired(spec: BlockTiling, codes_ref: Any, *rest: Any) -> None:
    """Two outputs that are neighbours in memory are the halves of 32 bits, or every other row."""
    *_, weight_ref, _ = rest
    rows_ref = codes_ref.reshape(2 * spec.inputs, spec.tile)
    step = _steps(spec.inputs, 16, 512)
    words_ref = None if codes_ref.dtype == jnp.float32 else rows_ref.bitcast(jnp.uint32)

    def fill(i: jax.Array, _: None) -> None:
        begin = pl.multiple_of(i * step, step)
        for half in range(2):
            if words_ref is None:
                part = rows_ref[pl.ds(2 * begin + half, step, stride=2), :]
            else:
                words = words_ref[pl.ds(begin, step), :]
                words = words & jnp.uint32(0xFFFF0000) if half else words << 16
                part = jax.lax.bitcast_convert_type(words, jnp.float32)
            weight_ref[pl.ds(begin, step), half * spec.tile : (half + 1) * spec.tile] = part.astype(weight_ref.dtype)

    jax.lax.fori_loop(0, spec.inputs // step, fill, None)


def _fill_by_output(spec: BlockTiling, codes_ref: Any, *rest: Any) -> None:
    """Without scales, which come after the sums."""
    *_, weight_ref, _ = rest
    step = _steps(spec.tile, 32, 128)

    def fill(i: jax.Array, _: None) -> None:
        at = pl.ds(pl.multiple_of(i * step, step), step)
        weight_ref[at, :] = numbers(codes_ref[at, :], spec.codes, jnp.float32).astype(weight_ref.dtype)

    jax.lax.fori_loop(0, spec.tile // step, fill, None)


def _fill_by_group(
    spec: BlockTiling, codes_ref: Any, scales_ref: Any, offsets_ref: Any, pair: Any, weight_ref: Any, tables_ref: Any
) -> None:
    groups, dtype = spec.inputs // spec.group, jnp.dtype(spec.dequantised_in)
    is_halves = spec.codes == "float4_e2m1fn" and offsets_ref is None
    tables_ref[0] = _table(scales_ref, spec.scales, pair) * (0.5 if is_halves else 1.0)
    if offsets_ref is not None:
        tables_ref[1] = _table(offsets_ref, "float32", pair)
    step = _steps(groups, 1, max(1, 512 // spec.group))

    rows_ref = codes_ref.reshape(spec.inputs, spec.tile)

    def table(index: int, at: Any) -> jax.Array:
        """As many rows of it as a register has: the compiler repeats registers for nothing, but not rows."""
        rows = jnp.broadcast_to(tables_ref[index, at], (step, PACKED, spec.tile))
        return rows.astype(dtype)[:, None]

    def fill(i: jax.Array, _: None) -> None:
        at = pl.ds(i * step, step)
        begin = pl.multiple_of(i * step * spec.group, step * spec.group)
        codes = rows_ref[pl.ds(begin, step * spec.group), :]
        if is_halves:
            values = _halves(jax.lax.bitcast_convert_type(codes, BITS[spec.codes]), dtype)
        else:
            values = numbers(codes, spec.codes, dtype)
        values = values.reshape(step, -1, PACKED, spec.tile) * table(0, at)
        if offsets_ref is not None:
            values = values + table(1, at)
        values = values.reshape(step * spec.group, spec.tile)
        weight_ref[pl.ds(begin, step * spec.group), :] = values.astype(weight_ref.dtype)

    jax.lax.fori_loop(0, groups // step, fill, None)


def _table(ref: Any, name: str, pair: jax.Array) -> jax.Array:
    """float32 [groups, 1, tile] of [groups, tile], or of [groups, 1 or 2, tile], of which `pair` is wanted."""
    values = numbers(ref[...], name, jnp.float32)
    if values.ndim == 2:
        return values[:, None, :]
    return values if values.shape[1] == 1 else jnp.where(pair == 0, values[:, :1], values[:, 1:])


def numbers(codes: jax.Array, name: str, dtype: Any) -> jax.Array:
    """The numbers of dtype `name` that `codes` are, or their bits if it is float16."""
    if name in BITS:
        codes = jax.lax.bitcast_convert_type(codes, BITS[name])
    if name == "float4_e2m1fn":
        return _halves(codes, dtype) * 0.5
    if name == "float8_e8m0fnu":  # 2^(code - 127), NaN for 255
        bits = codes.astype(jnp.int32)
        value = jax.lax.bitcast_convert_type(jnp.where(bits == 0, 0x400000, bits << 23), jnp.float32)
        return jnp.where(bits == 255, jnp.nan, value).astype(dtype)
    if name == "float16":
        bits = codes.astype(jnp.int32)
        size = bits & 0x7FFF
        value = jax.lax.bitcast_convert_type(size << 13, jnp.float32) * 2.0**112
        value = jnp.where(size < 0x400, size.astype(jnp.float32) * 2.0**-24, value)
        value = jnp.where(size > 0x7C00, jnp.nan, jnp.where(size == 0x7C00, jnp.inf, value))
        return jnp.where(bits < 0, -value, value).astype(dtype)
    return codes.astype(dtype)


def _halves(codes: jax.Array, dtype: Any) -> jax.Array:
    """How many halves the bits of float4 stand for: their highest is the sign, and 0 to 7 are 0, 1, 2, 3, 4, 6, 8, 12.
    Sizes come of eight codes at a time, in 32 bits, as 8 less; the signs are those of the codes as integers."""
    bits = pltpu.bitcast(codes, jnp.uint32)
    high = bits & jnp.uint32(0x44444444)
    more = bits & (high - (high >> 2))  # 1, 2 and 3 for 5, 6 and 7
    largest = (high & bits << 1 & bits << 2) >> 1  # 2 more for 7
    size = (bits & jnp.uint32(0x77777777)) + more + largest
    size = pltpu.bitcast(size ^ jnp.uint32(0x88888888), jnp.int4).astype(dtype) + 8
    sign = jnp.uint32(0x80008000 if dtype == jnp.bfloat16 else 0x80000000)
    size = pltpu.bitcast(size, jnp.uint32) | pltpu.bitcast(codes.astype(dtype), jnp.uint32) & sign
    return pltpu.bitcast(size, dtype)
