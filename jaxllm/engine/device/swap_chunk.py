"""Contents of blocks on their way to host memory and back."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array

Bounds = tuple[tuple[int | None, int | None], ...]  # of a device's part of an array


class SwapChunk:
    """Contents of some blocks of one shard (None: of all): on the device at first, on the host once settled. A process
    keeps what its own devices have of them, once."""

    def __init__(self, contents: list[Array], num_shards: int, shard: int | None):
        self._contents, self._kept = contents, []
        self._num_shards, self._shard = num_shards, shard
        self._places = [(x.shape, x.sharding) for x in contents]
        self.device_bytes = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in contents)
        for x in contents:
            for part in self._parts(x).values():
                part.copy_to_host_async()

    def _parts(self, x: Array) -> dict[Bounds, Any]:
        """The arrays that there are of the shard, by their places in `x`."""
        parts = {_bounds(part.index): part.data for part in x.addressable_shards}
        if self._shard is None:
            return parts
        first = self._shard * (len(x) // self._num_shards)
        return {place: part for place, part in parts.items() if (place[0][0] or 0) == first}

    def settle(self) -> None:
        """Waits for the copy and lets go of the device's memory. (On a CPU they are the same memory.)"""
        self._kept = [{place: np.asarray(part) for place, part in self._parts(x).items()} for x in self._contents]
        self._contents = []

    def on_device(self, others: Callable[[], list[Array]]) -> list[Array]:
        """The contents, as an executable takes them. `others` gives arrays for the places of the other shards."""
        if not self._kept:
            return self._contents
        fill: Sequence[Array | None] = [None] * len(self._kept)
        if self._shard is not None and self._num_shards > 1:
            fill = others()
        return [_array(*place, kept, x) for place, kept, x in zip(self._places, self._kept, fill, strict=True)]

    def give_up(self) -> None:
        """Nobody wants it any more."""
        self._contents, self._kept, self.device_bytes = [], [], 0


def _bounds(index: Any) -> Bounds:
    return tuple((part.start, part.stop) for part in index)


def _array(shape: tuple[int, ...], place: Sharding, kept: dict[Bounds, np.ndarray], other: Array | None) -> Array:
    """An array with what is `kept`, and what `other` has elsewhere."""
    there = {} if other is None else {part.device: part.data for part in other.addressable_shards}
    parts = [
        jax.device_put(kept[_bounds(index)], device) if _bounds(index) in kept else there[device]
        for device, index in place.addressable_devices_indices_map(shape).items()
    ]
    return jax.make_array_from_single_device_arrays(shape, place, parts)
