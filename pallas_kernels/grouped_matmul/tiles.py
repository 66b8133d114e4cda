"""Which rows the kernels multiply at a time: tiles of one expert's rows each, in several sizes, so that little is
computed for rows that no tile has."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

LEAST, MOST = 8, 128  # rows of a tile


class RowTiles(NamedTuple):
    """Tiles in the order of their rows, then those that have none: of size 0, with the last one's expert."""

    expert: Int32[Array, " tiles"]
    first: Int32[Array, " tiles"]  # row
    end: Int32[Array, " tiles"]  # past the last row that is the expert's
    size: Int32[Array, " tiles"]  # rows that are computed
    count: Int32[Array, ""]  # of tiles that have rows


def sizes_of(num_rows: int, experts: int) -> tuple[int, ...]:
    """Sizes of tiles, descending: the largest for what an expert has on average, three smaller ones for what is left
    over."""
    mean = -(-num_rows // experts)
    largest = min(max(2 * LEAST, 1 << (mean - 1).bit_length()), MOST)
    return tuple(size for size in (largest >> i for i in range(4)) if size >= LEAST)


def tiles_of(
    offsets: Int[Array, " experts_plus_1"], num_rows: int, *, sizes: Sequence[int], chunk: int | None = None
) -> RowTiles:
    """Of the rows `offsets[e]:offsets[e + 1]` of each expert. None has rows of two chunks of `chunk` rows.

    An expert's rows are tiles of the largest size, and at most two smaller ones for the rest, of which less than half
    a tile of the smallest size or a quarter of the rest is in vain.
    """
    experts, largest, least = len(offsets) - 1, sizes[0], sizes[-1]
    starts, expert = offsets.astype(jnp.int32), jnp.arange(experts, dtype=jnp.int32)
    if chunk is not None and chunk < num_rows:
        inner = jnp.clip(jnp.arange(chunk, num_rows, chunk, dtype=jnp.int32), starts[0], starts[-1])
        starts = jnp.sort(jnp.concatenate([starts, inner]))
        expert = jnp.searchsorted(offsets, starts[:-1], side="right", method="compare_all").astype(jnp.int32) - 1
        expert = jnp.minimum(expert, experts - 1)  # of no rows, at the end
    lengths = jnp.diff(starts)
    full, rest = lengths // largest, lengths % largest
    unit = jnp.full_like(rest, least)
    for size in reversed(sizes):
        unit = jnp.where((rest > size // 2) & (size // 4 >= least), size // 4, unit)
    rest = -(-rest // unit) * unit
    small = rest & -rest  # the smaller of two sizes, or the only one
    parts = full + jax.lax.population_count(rest)
    ends = jnp.cumsum(parts)
    most = most_tiles(num_rows, len(lengths), sizes)
    index = jnp.arange(most, dtype=jnp.int32)
    at = jnp.minimum(index, ends[-1] - 1)[:, None]
    is_of = (at >= (ends - parts)[None, :]) & (at < ends[None, :])

    def of_group(values: Array) -> Array:  # sums, which a TPU computes faster than it gathers
        return jnp.sum(jnp.where(is_of, values[None, :], 0), axis=1)

    begin, end, full, rest, small = map(of_group, (starts[:-1], starts[1:], full, rest, small))
    part, parts = at[:, 0] - of_group(ends - parts), of_group(parts)
    is_full, is_last = part < full, part == parts - 1
    size = jnp.where(is_full, largest, jnp.where(is_last, small, rest - small))
    skipped = jnp.where(is_full, part * largest, full * largest + jnp.where(is_last, rest - small, 0))
    first = begin + skipped
    return RowTiles(
        expert=of_group(expert),
        first=first,
        end=jnp.minimum(first + size, end),
        size=jnp.where(index < ends[-1], size, 0),
        count=ends[-1],
    )


def most_tiles(num_rows: int, groups: int, sizes: Sequence[int]) -> int:
    """That `num_rows` of so many groups can have: two of the rest have more than two of the smallest."""
    return num_rows // sizes[0] + min(groups, num_rows) + min(groups, num_rows // (2 * sizes[-1] + 1))
