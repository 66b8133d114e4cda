"""Where layers' caches lie in the pool: groups of layers, and arrays of pages that all groups share."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.engine.schedule.cache_groups import CacheGroup
from jaxllm.models.cache_spec import CacheSpec
from jaxllm.models.state_cache import num_cells
from jaxllm.sharding.mesh import platform_of
from jaxllm.sharding.rules import local_shape

Specs = Sequence[tuple[CacheSpec, ...]]  # of each layer


class PageArray(NamedTuple):
    """An array of the pool, `[pages, *shape]`: what a page holds of one cache."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical ones of `shape`
    dtype: Any


class Cell(NamedTuple):
    """Where a cache lies: in one of the pages of its group's block, in one of the arrays."""

    page: int
    array: int


class Place(NamedTuple):
    group: int
    cells: tuple[Cell, ...]  # one; of a state as many as its bytes take


@dataclass(frozen=True)
class CacheLayout:
    """Layers with equal windows are a group, which shares block tables. A page has one cell of each of `arrays`; all
    groups' blocks take whole pages, so that any page may become any group's.

    A group of c layers takes c / g pages of g cells, g being the greatest common divisor of all groups' numbers: no
    cell is left over, and the pool holds no fewer tokens of any length than if all layers kept everything.
    """

    groups: tuple[CacheGroup, ...]
    arrays: tuple[PageArray, ...]
    places: tuple[tuple[Place, ...], ...]  # of each layer's caches

    @cached_property
    def num_tables(self) -> int:
        """Pages of a block of all groups together."""
        return sum(group.num_pages for group in self.groups)

    def page_bytes(self, mesh: Mesh) -> int:
        """Of a page on each device."""
        shapes = (local_shape(array.shape, array.axes, mesh) for array in self.arrays)
        sizes = zip(shapes, self.arrays, strict=True)
        return sum(math.prod(shape) * jnp.dtype(array.dtype).itemsize for shape, array in sizes)


def cache_layout(specs: Specs, dtype: Any, mesh: Mesh, *, max_model_len: int, block_size: int) -> CacheLayout:
    """Of layers with these caches, whose keys and values are of `dtype`. A window that no sequence outgrows counts as
    none. Raises ValueError for caches of shapes that can't share pages."""
    caches = [spec if spec.is_state else replace(spec, dtype=dtype) for of_layer in specs for spec in of_layer]
    caches = [_limited(spec, max_model_len) for spec in caches]
    platform = platform_of(mesh)
    arrays = [PageArray(spec.block_shape(block_size, platform), spec.axes, jnp.dtype(spec.dtype)) for spec in caches]
    kinds = list(dict.fromkeys(sorted(map(_kind, caches), key=_order)))
    if len(kinds) == 1:
        groups = [CacheGroup(window=kinds[0].window, is_state=kinds[0].is_state)]
        found = [Place(0, (Cell(0, i),)) for i in range(len(caches))]
    else:
        units = [array for array, spec in zip(arrays, caches, strict=True) if not spec.is_state]
        wanted = [_cells(spec, array, units[0], mesh) for spec, array in zip(caches, arrays, strict=True)]
        of_kinds = [[i for i, spec in enumerate(caches) if _kind(spec) == kind] for kind in kinds]
        page, sizes = _common_page([[cell for i in of_kind for cell in wanted[i]] for of_kind in of_kinds])
        groups = [CacheGroup(kind.window, size, kind.is_state) for kind, size in zip(kinds, sizes, strict=True)]
        places: dict[int, Place] = {}
        for group, of_kind in enumerate(of_kinds):
            seats = _seats(page, sizes[group])
            places |= {i: Place(group, tuple(next(seats[cell]) for cell in wanted[i])) for i in of_kind}
        arrays, found = page, [places[i] for i in range(len(caches))]
    remaining = iter(found)
    of_layers = tuple(tuple(next(remaining) for _ in of_layer) for of_layer in specs)
    return CacheLayout(tuple(groups), tuple(arrays), of_layers)


class _Kind(NamedTuple):
    """What the caches of a group have in common."""

    window: int | None
    is_state: bool


def _kind(spec: CacheSpec) -> _Kind:
    return _Kind(spec.window, spec.is_state)


def _order(kind: _Kind) -> tuple[bool, bool, int]:
    """What keeps all tokens first: the token history lies beside it."""
    return kind.is_state, kind.window is not None, kind.window or 0


def _limited(spec: CacheSpec, max_model_len: int) -> CacheSpec:
    is_open = not spec.is_state and spec.window is not None and spec.window >= max_model_len
    return replace(spec, window=None) if is_open else spec


def _cells(spec: CacheSpec, array: PageArray, unit: PageArray, mesh: Mesh) -> list[PageArray]:
    """What a block of the cache takes: its own, or as many keys and values as a state has bytes."""
    if not spec.is_state:
        return [array]
    state, cell = (local_shape(each.shape, each.axes, mesh) for each in (array, unit))
    return [unit] * num_cells(state, spec.dtype, cell, unit.dtype)


def _common_page(groups: Sequence[Sequence[PageArray]]) -> tuple[list[PageArray], list[int]]:
    """The largest page that each group's cells are a whole number of, and how many each takes."""
    counts = [Counter(cells) for cells in groups]
    sizes = [math.gcd(*count.values()) for count in counts]
    pages = [{cell: n // size for cell, n in count.items()} for count, size in zip(counts, sizes, strict=True)]
    if any(page != pages[0] for page in pages):
        shapes = [{cell.shape: n for cell, n in count.items()} for count in counts]
        raise ValueError(
            f"layers of different windows cache blocks of these shapes, so many of each: {shapes}; they can't share "
            "one pool. Let all layers that cache keys and values have equally many heads and features, or one window"
        )
    common = math.gcd(*sizes)
    page = [cell for cell, n in pages[0].items() for _ in range(n * common)]
    return page, [size // common for size in sizes]


def _seats(page: Sequence[PageArray], num_pages: int) -> dict[PageArray, Iterator[Cell]]:
    """The cells of a block, by what they hold."""

    def of(array: PageArray) -> Iterator[Cell]:
        return (Cell(number, i) for number in range(num_pages) for i, other in enumerate(page) if other == array)

    return {array: of(array) for array in page}
