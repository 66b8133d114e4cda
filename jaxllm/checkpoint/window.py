"""Which parts of each parameter this process has in its memory while it loads: of several hosts each has what its own
devices hold."""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.checkpoint.placement import canonical, expansion_of
from jaxllm.sharding import rules
from jaxllm.sharding.expand import Empty, Expansion

Box = tuple[slice, ...]  # the indices of each axis, from where to where


class Needed(NamedTuple):
    """A window of an array of this shape, and the boxes in it that this process needs."""

    shape: tuple[int, ...]
    window: Box
    boxes: Sequence[Box]

    def of(self, place: Box) -> list[Box]:
        """What is needed of `place`; nothing is in two of the boxes."""
        return _apart([common for box in self.boxes if _volume(common := _common(box, place))])


class HostWindow(NamedTuple):
    """A part of an array in this host's memory: that from the index `origin` on."""

    values: np.ndarray
    origin: tuple[int, ...]

    def at(self, box: Box) -> np.ndarray:
        """A view of what lies at this box of the whole array."""
        indices = zip(box, self.origin, strict=True)
        return self.values[tuple(slice(part.start - first, part.stop - first) for part, first in indices)]

    @property
    def box(self) -> Box:
        return tuple(slice(first, first + size) for first, size in zip(self.origin, self.values.shape, strict=True))


class HostArray(NamedTuple):
    """The windows of an array that this host has."""

    windows: Sequence[HostWindow]

    def window(self, box: Box) -> HostWindow:
        return next(window for window in self.windows if _has(window.box, box))

    def at(self, box: Box) -> np.ndarray:
        """See `HostWindow`."""
        return self.window(box).at(box)


def needed(variable: nnx.Variable, mesh: Mesh) -> list[Needed]:
    """What this process needs of a parameter as it is outside of the mesh (see `expansion_of`). All that a device holds
    comes from one window, and nothing is in two of them."""
    how, shape = expansion_of(variable), canonical(variable).shape
    devices = own_devices(mesh)
    if len(devices) == mesh.size:
        whole = concrete((slice(None),) * len(shape), shape)
        return [Needed(shape, whole, [whole])]
    held = variable.get_value().shape
    indices = rules.sharding(variable.axes, mesh).devices_indices_map(held)
    parts = [concrete(index, held) for device, index in indices.items() if device in devices]
    boxes = [box for part in parts for box in _sources(how, part)]
    windows = _apart([_hull(_sources(how, part)) for part in parts])
    return [Needed(shape, window, [box for box in boxes if _has(window, box)]) for window in windows]


def shard_at(host: HostArray, how: Expansion | None, box: Box, empty: Empty) -> np.ndarray:
    """What a device holds at `box` of the array that its mesh has (see `expansion_of`): a view, or an array whose
    memory `empty` may give."""
    window = host.window(_hull(_sources(how, box)))
    return window.at(box) if how is None else how.shard(window.values, box, window.origin, empty)


def _sources(how: Expansion | None, box: Box) -> list[Box]:
    return [box] if how is None else how.sources(box)


def own_devices(mesh: Mesh) -> Collection[Any]:
    """This process's."""
    return set(mesh.local_devices)


def concrete(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """`index` with both ends of each part."""
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))


def _apart(boxes: Sequence[Box]) -> list[Box]:
    """Boxes that have all of these, of which those that overlap, or are a box together, are one."""
    found: list[Box] = []
    for box in boxes:
        one = box
        while (other := next((other for other in found if _go_together(one, other)), None)) is not None:
            found.remove(other)
            one = _hull([one, other])
        found.append(one)
    return found


def _go_together(one: Box, other: Box) -> bool:
    return _volume(_common(one, other)) > 0 or _volume(_hull([one, other])) <= _volume(one) + _volume(other)


def _has(one: Box, other: Box) -> bool:
    return all(a.start <= b.start and b.stop <= a.stop for a, b in zip(one, other, strict=True))


def _common(one: Box, other: Box) -> Box:
    pairs = zip(one, other, strict=True)
    starts_and_stops = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs]
    return tuple(slice(start, max(start, stop)) for start, stop in starts_and_stops)


def _hull(boxes: Sequence[Box]) -> Box:
    return tuple(
        slice(min(part.start for part in parts), max(part.stop for part in parts)) for parts in zip(*boxes, strict=True)
    )


def _volume(box: Box) -> int:
    return math.prod(part.stop - part.start for part in box)
