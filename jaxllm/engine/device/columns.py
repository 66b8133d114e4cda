"""Tables on the device with a row for each slot. A column is declared in one line: its type, and where a sequence's
value comes from. How rows are packed, sent and installed follows from that."""

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
        return sum(prod(c.shape) for c in self._columns[: self.table._fields.index(name)])

    def empty(self, num_slots: int) -> Any:
        """The table without sequences."""
        return self.table(*(jnp.full((num_slots, *c.shape), c.fill, c.dtype) for c in self._columns))

    def pack(self, sequence: Sequence) -> np.ndarray:
        """A sequence's row, int32 `[size]`; floats by their bits. ValueError for a list that is too long."""
        row, at = np.zeros(self.size, np.int32), 0
        for dtype, of, shape, fill in self._columns:
            cells = row[at : at + prod(shape)].view(dtype).reshape(shape)
            at += prod(shape)
            value = of(sequence)
            if shape:
                cells[...] = fill
                cells[: len(value)] = value
            else:
                cells[...] = value
        return row

    def unpack(self, packed: Int[Array | np.ndarray, "rows size"]) -> Any:
        """The table's fields of packed rows, a numpy array (as views) or a traced one: `[rows, ...]` each."""
        fields, at = [], 0
        for dtype, _, shape, _ in self._columns:
            cells = packed[:, at : at + prod(shape)].reshape(-1, *shape)
            is_on_host = isinstance(cells, np.ndarray)
            fields.append(cells.view(dtype) if is_on_host else jax.lax.bitcast_convert_type(cells, dtype))
            at += prod(shape)
        return self.table(*fields)


def install(table: Any, rows: Any, slots: Int[Array, " rows"]) -> Any:
    """Writes whole rows; padding has slots past the table, and is dropped."""
    return jax.tree.map(lambda column, values: column.at[slots].set(values, mode="drop"), table, rows)


def of_slots(table: Any, slots: Int[Array, " rows"]) -> Any:
    """The rows of some slots; of padding, any."""
    return jax.tree.map(lambda column: column.at[slots].get(mode="clip"), table)
