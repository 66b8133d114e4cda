"""What a mesh can't split as it is, expanded: KV heads repeated for more devices than heads, the vocabulary padded.

Parameters come from and go to users as the model has them ("canonical"); an `Expansion` makes of one what a mesh holds,
a whole array inside jit or a device's part of one on the host, and back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxllm.errors import MeshError
from jaxllm.sharding.rules import AnyMesh, Axes, mesh_axes, num_shards, partition_spec, say_devices

Empty = Callable[[Sequence[int], np.dtype], np.ndarray]  # of a shape and a dtype, uninitialised


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """An array as its model has it. `members` are the sizes of those that share an axis, by the axis."""

    axes: Axes
    shape: tuple[int, ...]
    members: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def group(self) -> tuple[int, tuple[int, ...]] | None:
        """The dimension of what belongs to a KV head, and the sizes there: those of one are the head's own (its key),
        the others its group's (its queries), and can be shared out."""
        if "group" in self.axes:
            dim = self.axes.index("group")
            return dim, (self.shape[dim],)
        dim = next((dim for dim, axis in enumerate(self.axes) if axis in self.members), None)
        return None if dim is None else (dim, tuple(self.members[str(self.axes[dim])]))

    def unsplit(self, mesh: AnyMesh) -> int | None:
        """A dimension that `mesh` can't split, expanded or not."""
        for dim, (size, axis) in enumerate(zip(self.shape, self.axes, strict=True)):
            count = num_shards(axis, mesh, self.axes)
            if axis != "vocab" and size % count:
                copies, rest = divmod(count, size)
                if axis != "kv_heads" or rest or not self._shares(copies):
                    return dim
        return None

    def _shares(self, copies: int) -> bool:
        """Whether each copy of a KV head gets some of its group."""
        group = self.group
        if group is None:
            return True
        shared = [size for size in group[1] if size > 1 or self.axes[group[0]] == "group"]
        return all((copies - 1) * -(-size // copies) < size for size in shared)


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """Of arrays of a `canonical` shape to another one."""

    canonical: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The expanded one."""
        raise NotImplementedError

    def sources(self, index: tuple[slice, ...]) -> list[tuple[slice, ...]]:
        """The boxes of the canonical array that make up what lies at `index` of the expanded one; both ends of each
        slice are given."""
        raise NotImplementedError

    def shard(self, x: np.ndarray, index: tuple[slice, ...], origin: Sequence[int], empty: Empty) -> np.ndarray:
        """What lies at `index` of the expanded array, without the rest of it; `empty` may give its memory. `x` has the
        canonical array from `origin` on; both ends of each slice are given."""
        raise NotImplementedError

    def contract(self, x: Any) -> Any:
        """The canonical array that expands to `x`."""
        raise NotImplementedError

    def canonical_axes(self, axes: Axes) -> Axes:
        """Those of the canonical array of one that has `axes`."""
        return axes

    def canonical_sharding(self, axes: Axes, mesh: Mesh) -> NamedSharding:
        """How `mesh` holds the canonical array of one that has `axes`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Lengthened(Expansion):
    """To `size` entries of the dimension `dim`, which a mesh then splits."""

    dim: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.size if dim == self.dim else size for dim, size in enumerate(self.canonical))

    @property
    def changed(self) -> tuple[int, ...]:
        """The dimensions that it changes."""
        return (self.dim,)

    def part(self, x: Any, start: int, stop: int, origin: Sequence[int]) -> Any:
        """Entries `start` to `stop` of what a canonical array expands to (a NumPy array gives one), of which `x` has
        what is there from the index `origin` on."""
        raise NotImplementedError

    def expand(self, x: Any) -> Any:
        """What the canonical array expands to."""
        return self.part(x, 0, self.size, (0,) * len(self.canonical))

    def shard(self, x: np.ndarray, index: tuple[slice, ...], origin: Sequence[int], empty: Empty) -> np.ndarray:
        moved = [slice(part.start - first, part.stop - first) for part, first in zip(index, origin, strict=True)]
        kept = tuple(slice(None) if dim in self.changed else part for dim, part in enumerate(moved))
        return self.part(x[kept], index[self.dim].start, index[self.dim].stop, origin)

    def canonical_sharding(self, axes: Axes, mesh: Mesh) -> NamedSharding:
        """Split by another dimension, if one divides, so that no device has all of it."""
        names = [*partition_spec(axes, mesh)]
        name, names[self.dim] = names[self.dim], None
        count = num_shards(axes[self.dim], mesh, axes)
        fit = [
            (size, dim)
            for dim, size in enumerate(self.canonical)
            if dim not in self.changed and names[dim] is None and size % count == 0
        ]
        if fit:
            names[max(fit)[1]] = name
        return NamedSharding(mesh, PartitionSpec(*names))


class Padded(Lengthened):
    """Zeros after the last entry."""

    def part(self, x: Any, start: int, stop: int, origin: Sequence[int]) -> Any:
        first, last = self._filled(start, stop)
        return _pad(_take(x, self.dim, first - origin[self.dim], last - origin[self.dim]), self.dim, stop - start)

    def sources(self, index: tuple[slice, ...]) -> list[tuple[slice, ...]]:
        part = slice(*self._filled(index[self.dim].start, index[self.dim].stop))
        return [(*index[: self.dim], part, *index[self.dim + 1 :])]

    def _filled(self, start: int, stop: int) -> tuple[int, int]:
        size = self.canonical[self.dim]
        return min(start, size), min(stop, size)

    def contract(self, x: Any) -> Any:
        return _take(x, self.dim, 0, self.canonical[self.dim])


@dataclass(frozen=True, kw_only=True)
class Repeated(Lengthened):
    """Each KV head as often as there are devices for it, which share out the queries of its group. Where those can't
    be equal parts, queries of zeros fill the last one's: what they attend to is multiplied by zeros."""

    group: tuple[int, tuple[int, ...]] | None = None  # see `Leaf`

    @property
    def copies(self) -> int:
        return self.size // self.canonical[self.dim]

    @property
    def member_sizes(self) -> tuple[int, ...]:
        """What becomes of the group's."""
        return () if self.group is None else tuple(-(-size // self.copies) for size in self.group[1])

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(super().shape)
        if self.group is not None:
            shape[self.group[0]] = sum(self.member_sizes)
        return tuple(shape)

    @property
    def changed(self) -> tuple[int, ...]:
        return (self.dim,) if self.group is None else (self.dim, self.group[0])

    def part(self, x: Any, start: int, stop: int, origin: Sequence[int]) -> Any:
        return _concatenate([self._head(x, i, origin) for i in range(start, stop)], self.dim)

    def sources(self, index: tuple[slice, ...]) -> list[tuple[slice, ...]]:
        found = []
        for i in range(index[self.dim].start, index[self.dim].stop):
            box, (head, copy) = list(index), divmod(i, self.copies)
            box[self.dim] = slice(head, head + 1)
            if self.group is None:
                found.append(tuple(box))
                continue
            for part in self._shares(copy):
                box[self.group[0]] = part
                found.append(tuple(box))
        return found

    def _head(self, x: Any, i: int, origin: Sequence[int]) -> Any:
        head, copy = divmod(i, self.copies)
        x = _take(x, self.dim, head - origin[self.dim], head - origin[self.dim] + 1)
        if self.group is None:
            return x
        dim, parts = self.group[0], []
        for part, share in zip(self._shares(copy), self.member_sizes, strict=True):
            parts.append(_pad(_take(x, dim, part.start - origin[dim], part.stop - origin[dim]), dim, share))
        return _concatenate(parts, dim)

    def _shares(self, copy: int) -> list[slice]:
        """What a copy of a head has of each member of its group."""
        assert self.group is not None
        found, sizes = [], self.group[1]
        for first, size, share in zip(_starts(sizes), sizes, self.member_sizes, strict=True):
            start = 0 if size == 1 else copy * share
            found.append(slice(first + start, first + min(start + share, size)))
        return found

    def contract(self, x: Any) -> Any:
        if self.group is None:
            return _concatenate([_take(x, self.dim, i, i + 1) for i in range(0, self.size, self.copies)], self.dim)
        return _concatenate([self._canonical_head(x, i) for i in range(0, self.size, self.copies)], self.dim)

    def _canonical_head(self, x: Any, first_copy: int) -> Any:
        assert self.group is not None
        dim, sizes = self.group
        copies = [_take(x, self.dim, i, i + 1) for i in range(first_copy, first_copy + self.copies)]
        parts = []
        for first, size, share in zip(_starts(self.member_sizes), sizes, self.member_sizes, strict=True):
            shares = [_take(copy, dim, first, first + share) for copy in copies[: 1 if size == 1 else None]]
            parts.append(_take(_concatenate(shares, dim), dim, 0, size))
        return _concatenate(parts, dim)


def expansion(leaf: Leaf, mesh: AnyMesh) -> Lengthened | None:
    """What makes of `leaf`, which `check_splits` has let pass, what `mesh` can split; None if it can already."""
    for dim, (size, axis) in enumerate(zip(leaf.shape, leaf.axes, strict=True)):
        count = num_shards(axis, mesh, leaf.axes)
        if size % count:
            options = {"canonical": leaf.shape, "dim": dim}
            if axis == "vocab":
                return Padded(**options, size=padded(size, mesh))
            return Repeated(**options, size=count, group=leaf.group)
    return None


def padded(vocab: int, mesh: AnyMesh) -> int:
    """Columns of the logits of `vocab` tokens on `mesh`."""
    count = num_shards("vocab", mesh)
    return -(-vocab // count) * count


def repeated(kv_heads: int, mesh: AnyMesh) -> int:
    """The KV heads that a pool has on `mesh`, all devices together."""
    return max(kv_heads, num_shards("kv_heads", mesh))


def check_splits(leaves: Mapping[str, Leaf], mesh: AnyMesh) -> None:
    """Raises `MeshError` for one of `leaves` that `mesh` can't split, with the sizes of its axis that would do."""
    for name, leaf in leaves.items():
        dim = leaf.unsplit(mesh)
        if dim is not None:
            axis = leaf.axes[dim]
            names = mesh_axes(axis, leaf.axes, mesh)
            queries = ", nor have a part of the queries of one head each" if axis == "kv_heads" else ""
            sizes = range(1, 2 * mesh.shape[names[0]])
            fit = [n for n in sizes if _all_split(leaves, mesh, names[0], n)]
            remedy = f"{names[0]!r} can have {', '.join(map(str, fit))}" if fit else f"no size of {names[0]!r} does"
            raise MeshError(
                f"{say_devices(names, mesh)}, which do not divide the {leaf.shape[dim]} {axis} of {name}{queries}; "
                f"for this model {remedy if len(names) > 1 else remedy.replace(repr(names[0]), 'it', 1)}"
            )


def _all_split(leaves: Mapping[str, Leaf], mesh: AnyMesh, mesh_axis: str, size: int) -> bool:
    """Whether `mesh` could split all `leaves` if it had `size` devices on `mesh_axis`."""
    sizes = dict(mesh.shape) | {mesh_axis: size}
    resized = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    return all(leaf.unsplit(resized) is None for leaf in leaves.values())


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][: len(sizes)]


def _take(x: Any, dim: int, start: int, stop: int) -> Any:
    return x[(slice(None),) * dim + (slice(start, stop),)]


def _concatenate(parts: Sequence[Any], dim: int) -> Any:
    return parts[0] if len(parts) == 1 else (np if isinstance(parts[0], np.ndarray) else jnp).concatenate(parts, dim)


def _pad(x: Any, dim: int, size: int) -> Any:
    if x.shape[dim] == size:
        return x
    zeros = np.zeros((*x.shape[:dim], size - x.shape[dim], *x.shape[dim + 1 :]), x.dtype)
    return _concatenate([x, zeros], dim)
