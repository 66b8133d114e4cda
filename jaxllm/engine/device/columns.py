"""Tables on the device with a row for each slot. A column is declared in one line: its type, and where a sequence's
value comes from. How rows are packed, sent and installed follows from that."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxllm.engine.schedule.sequence import Sequence


class Column(NamedTuple):
    """A field of each slot."""

    dtype: Any  # of four bytes
    of: Callable[[Sequence], Any]  # a sequence's value; of a list, what is missing is `fill`
    shape: tuple[Any, ...]  # of a slot's value; a name stands for one of the table's sizes
    fill: Any  # of empty slots


def column(dtype: Any, of: Callable[[Sequence], Any], *shape: int | str, fill: Any = 0) -> Any:
    """Declares a field of a table, a NamedTuple of arrays, as its default."""
    return Column(dtype, of, shape, fill)


@dataclass(frozen=True)
class RowLayout:
    """Where the columns of `table` lie in a packed row of int32. `sizes` are what its columns name."""

    table: Any  # a NamedTuple whose defaults are columns
    sizes: tuple[tuple[str, int], ...] = ()

    @cached_property
    def _columns(self) -> tuple[Column, ...]:
        sizes: Mapping[Any, int] = dict(self.sizes)
        declared = self.table._field_defaults.values()
        return tuple(c._replace(shape=tuple(sizes.get(size, size) for size in c.shape)) for c in declared)

    @cached_property
    def size(self) -> int:
        """Words of a row."""
        return sum(prod(c.shape) for c in self._columns)

    def offset(self, name: str) -> int:
        """Where a column's words begin in a row."""
        return self._offsets[name]

    @cached_property
    def _offsets(self) -> dict[str, int]:
        ends = itertools.accumulate((prod(c.shape) for c in self._columns), initial=0)
        return dict(zip(self.table._fields, ends, strict=False))

    def empty(self, num_slots: int) -> Any:
        """The table without sequences."""
        return self.table(*(jnp.full((num_slots, *c.shape), c.fill, c.dtype) for c in self._columns))

    def pack(self, sequence: Sequence) -> np.ndarray:
        """A sequence's row, int32 `[size]`; floats by their bits. ValueError for a list that is too long."""
        row = self._empty_row.copy()
        for dtype, at, getters in self._numbers:  # at once, as each access to an array costs as much as many numbers
            row.view(dtype)[at] = [of(sequence) for of in getters]
        for at, (dtype, of, shape, _) in self._lists:
            value = of(sequence)
            if len(value):
                row[at : at + prod(shape)].view(dtype).reshape(shape)[: len(value)] = value
        return row

    @cached_property
    def _lists(self) -> list[tuple[int, Column]]:
        """Columns with several words, and where they begin."""
        return [(at, c) for at, c in zip(self._offsets.values(), self._columns, strict=True) if c.shape]

    @cached_property
    def _numbers(self) -> list[tuple[Any, list[int], list[Callable[[Sequence], Any]]]]:
        """Of each type the other columns: where they are, and where a sequence's values come from."""
        found: dict[Any, tuple[list[int], list[Callable[[Sequence], Any]]]] = {}
        for at, c in zip(self._offsets.values(), self._columns, strict=True):
            if not c.shape:
                places, getters = found.setdefault(c.dtype, ([], []))
                places.append(at)
                getters.append(c.of)
        return [(dtype, *each) for dtype, each in found.items()]

    @cached_property
    def _empty_row(self) -> np.ndarray:
        return np.concatenate([np.full(prod(c.shape), c.fill, c.dtype).view(np.int32) for c in self._columns])

    def unpack(self, packed: Int[Array | np.ndarray, "rows size"]) -> Any:
        """The table's fields of packed rows, a numpy array (as views) or a traced one: `[rows, ...]` each."""
        fields, at = [], 0
        for dtype, _, shape, _ in self._columns:
            cells = packed[:, at : at + prod(shape)].reshape(-1, *shape)
            is_on_host = isinstance(cells, np.ndarray)
            fields.append(cells.view(dtype) if is_on_host else jax.lax.bitcast_convert_type(cells, dtype))
            at += prod(shape)
        return self.table(*fields)


def join(table: Any) -> Int[Array, "rows size"]:
    """A table's packed rows, of which `RowLayout.unpack` makes the table: one array in the place of many, where handing
    them over costs more than reading them."""
    each = [jax.lax.bitcast_convert_type(x, jnp.int32).reshape(x.shape[0], -1) for x in table]
    return jnp.concatenate(each, axis=1)


def install(table: Any, rows: Any, slots: Int[Array, " rows"]) -> Any:
    """Writes whole rows; padding has slots past the table, and is dropped."""
    return jax.tree.map(lambda column, values: column.at[slots].set(values, mode="drop"), table, rows)


def of_slots(table: Any, slots: Int[Array, " rows"]) -> Any:
    """The rows of some slots; of padding, any."""
    return jax.tree.map(lambda column: column.at[slots].get(mode="clip"), table)
