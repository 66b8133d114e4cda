"""Fills parameters in host memory from a checkpoint's tensors: reads, casts, and puts the axes in order."""

import math
import re
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
from einops import rearrange

from jaxllm.checkpoint import native_read
from jaxllm.checkpoint.gguf.blocks import dequantize
from jaxllm.checkpoint.tensors import FLOATS, StoredTensor, read
from jaxllm.models.weights import Weight

_TILE = 2**18  # elements; source and target of a transposed copy stay in the L2 cache


class WeightPart(NamedTuple):
    """The place in a parameter of a checkpoint's tensor, or of some of its rows."""

    name: str
    axes: str  # einops pattern, from the tensor to the parameter
    sizes: dict[str, int]  # of the pattern's axes
    shape: tuple[int, ...]  # of the part of the checkpoint's tensor
    place: tuple[slice, ...]
    first_row: int  # where the tensor stacks several parts

    @classmethod
    def at(cls, name: str, weight: Weight, shape: Sequence[int], first_row: int) -> "WeightPart":
        """Of the tensor `name`, from `first_row` on, in a parameter of this shape."""
        sizes, part, place = _geometry(weight.axes, weight.part, weight.expert is not None, tuple(shape))
        if weight.expert is not None:
            place = (slice(weight.expert, weight.expert + 1), *place[1:])
        return cls(name, weight.axes, sizes, part, place, first_row)

    def of(self, tensor: StoredTensor) -> StoredTensor:
        """These rows of the checkpoint's `tensor`; they lie together in the file."""
        return tensor._replace(shape=self.shape, offset=tensor.offset + self.first_row * tensor.row_bytes)

    def interleaved(self) -> "WeightPart":
        """The part where the two halves of each head, which rope turns as pairs, are interleaved in the tensor."""
        left, right = self.axes.split("->")
        axes = re.sub(r"\bh\b", "half two", left) + "->" + re.sub(r"\bh\b", "(two half)", right)
        sizes = {name: size for name, size in self.sizes.items() if name != "h"}
        return self._replace(axes=axes, sizes=sizes | {"half": self.sizes["h"] // 2, "two": 2})

    def source_axes(self, target: np.ndarray) -> np.ndarray:
        """`target`, the part's place in the parameter, seen with the axes that the tensor has in its file, each alone:
        a view, since none of them are merged in a parameter."""
        left, right = self.axes.split("->")
        axes = " ".join(re.findall(r"\w+", left))
        view = rearrange(target, f"{right} -> {axes}", **self.sizes)
        assert np.may_share_memory(view, target)
        return view


@cache  # a mixture has tens of thousands of tensors, of a few kinds
def _geometry(
    axes: str, part: tuple[int, int | None, int | None] | None, is_of_expert: bool, shape: tuple[int, ...]
) -> tuple[dict[str, int], tuple[int, ...], tuple[slice, ...]]:
    """Sizes of the pattern's axes, the shape of the tensor's part, and its place; that of an expert is the first's."""
    place = [slice(None)] * len(shape)
    if part is not None:
        dim, start, stop = part
        place[dim] = slice(start, stop)
    if is_of_expert:
        place[0] = slice(0, 1)
    dims = [len(range(size)[piece]) for size, piece in zip(shape, place, strict=True)]
    left, right = axes.split("->")
    sizes = dict(zip(right.split(), dims, strict=True))
    groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", left)]
    return (
        sizes,
        tuple(math.prod(sizes.get(axis, 1) for axis in group) for group in groups),
        tuple(place),
    )  # "1" is no axis


class Filling(NamedTuple):
    """A parameter in host memory, one of its parts, and what is stored of it."""

    host: np.ndarray
    part: WeightPart
    tensor: StoredTensor

    @property
    def stored_part(self) -> "WeightPart":
        """The part with the axes that are stored."""
        return self.part.interleaved() if self.tensor.is_interleaved else self.part

    @property
    def target(self) -> np.ndarray:
        return self.host[self.part.place]


class Filler:
    """Fills with the threads of `pool`; in C++ what that can read."""

    def __init__(self, pool: Executor):
        self._pool = pool
        self._scratch = np.empty(0, np.uint8)  # reused, as the first touch of fresh pages is slow

    def fill(self, fillings: Sequence[Filling]) -> None:
        """ModelFormatError for files that can't be read, and for values that are not finite."""
        slow, jobs = [], []
        for one in fillings:
            if native_read.supports(one.tensor, one.host):
                jobs.append(native_read.FillJob(one.tensor, one.stored_part.source_axes(one.target)))
            else:
                slow.append(one)
        if jobs:
            native_read.read(jobs)
        for one in slow:
            self._fill(one)

    def _fill(self, filling: Filling) -> None:
        host, part, tensor = filling
        if tensor.num_bytes > len(self._scratch):
            self._scratch = np.empty(tensor.num_bytes, np.uint8)
        data = read(tensor, self._scratch, self._pool)
        if tensor.is_plain:
            source = data.view(FLOATS[tensor.dtype]).reshape(tensor.shape)
            is_finite = _copy(rearrange(source, part.axes, **part.sizes), filling.target, self._pool)
        else:
            is_finite = _decode(data, filling.stored_part, tensor, filling.target, self._pool)
        if not is_finite:
            raise tensor.not_finite(host.dtype)


def _decode(data: np.ndarray, part: WeightPart, tensor: StoredTensor, target: np.ndarray, pool: Executor) -> bool:
    """Dequantises and copies groups of rows of the tensor. False if not all of it is finite."""
    view = part.source_axes(target)
    row_axes = re.findall(r"\w+", re.findall(r"\([^)]*\)|\w+", part.axes.split("->")[0])[0])
    lengths, most_rows = [part.sizes[axis] for axis in row_axes], max(1, _TILE // math.prod(tensor.shape[1:]))

    def decode(group: tuple[slice, ...]) -> bool:
        block = view[group]
        first_row = int(np.ravel_multi_index([one.start for one in group], lengths))
        num_rows = math.prod(block.shape[: len(lengths)])
        values = dequantize(tensor.dtype, data[first_row * tensor.row_bytes :][: num_rows * tensor.row_bytes])
        values = values + np.float32(tensor.shift) if tensor.shift else values
        return _store(values.reshape(block.shape), block)

    return all(pool.map(decode, _row_groups(lengths, most_rows)))


def _row_groups(lengths: list[int], most: int) -> list[tuple[slice, ...]]:
    """Index ranges that follow each other in memory, of at most `most` rows, which have these axes."""
    steps = [min(max(1, most // math.prod(lengths[i + 1 :])), length) for i, length in enumerate(lengths)]
    ranges = [range(0, length, step) for length, step in zip(lengths, steps, strict=True)]
    return [
        tuple(slice(at, min(at + step, length)) for at, step, length in zip(corner, steps, lengths, strict=True))
        for corner in product(*ranges)
    ]


def _copy(source: np.ndarray, target: np.ndarray, pool: Executor) -> bool:
    """Casts and copies by tiles (faster than a transposed copy at once). False if not all of it is finite."""
    steps = list(target.shape)
    while math.prod(steps) > _TILE:
        longest = steps.index(max(steps))
        steps[longest] = -(-steps[longest] // 2)
    corners = product(*(range(0, size, step) for size, step in zip(target.shape, steps, strict=True)))
    tiles = [tuple(slice(i, i + step) for i, step in zip(corner, steps, strict=True)) for corner in corners]
    num_stripes = 64  # a task for each tile would cost more than copying it
    stripes = (tiles[i::num_stripes] for i in range(min(num_stripes, len(tiles))))
    return all(pool.map(lambda stripe: _copy_tiles(source, target, stripe), stripes))


def _copy_tiles(source: np.ndarray, target: np.ndarray, tiles: list[tuple[slice, ...]]) -> bool:
    return all([_store(source[tile], target[tile]) for tile in tiles])


def _store(block: np.ndarray, target: np.ndarray) -> bool:
    """Casts and copies a block. False if not all of it is finite."""
    exponent = np.array(np.inf, target.dtype).view(f"u{target.itemsize}")  # all its bits: an infinity or NaN
    with np.errstate(over="ignore"):
        block = block.astype(target.dtype, order="K")
    target[...] = block
    return bool(((block.view(exponent.dtype) & exponent) != exponent).all())
