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
from jaxllm.checkpoint.gguf.blocks import BLOCKS, dequantize
from jaxllm.checkpoint.tensors import FLOATS, StoredTensor, read
from jaxllm.checkpoint.window import Box, HostWindow, concrete
from jaxllm.models.weights import Weight

_TILE = 2**18  # elements; source and target of a transposed copy stay in the L2 cache


class WeightPart(NamedTuple):
    """The place in a parameter of a checkpoint's tensor, or of some of its rows."""

    name: str
    axes: str  # einops pattern, from the tensor to the parameter
    sizes: dict[str, int]  # of the pattern's axes
    shape: tuple[int, ...]  # of the part of the checkpoint's tensor
    place: Box
    first_row: int  # where the tensor stacks several parts
    whole: "WeightPart | None" = None  # that this is a window of

    @classmethod
    def at(cls, name: str, weight: Weight, shape: Sequence[int], first_row: int) -> "WeightPart":
        """Of the tensor `name`, from `first_row` on, in a parameter of this shape."""
        sizes, part, place = _geometry(weight.axes, weight.part, weight.expert is not None, tuple(shape))
        if weight.expert is not None:
            place = (slice(weight.expert, weight.expert + 1), *place[1:])
        return cls(name, weight.axes, sizes, part, place, first_row)

    def within(self, box: Box) -> "WeightPart":
        """What of it lies in `box`, which is a box of its place."""
        if box == self.place:
            return self
        left, right = self.axes.split("->")
        sizes = {axis: part.stop - part.start for axis, part in zip(right.split(), box, strict=True)}
        shape = tuple(math.prod(sizes.get(axis, 1) for axis in group) for group in _groups(left))
        return self._replace(sizes=sizes, shape=shape, place=box, whole=self)

    def of(self, tensor: StoredTensor) -> StoredTensor:
        """What the checkpoint's `tensor` has of it: without a window some rows, which lie together in the file. A
        window that cuts blocks of quantised values is one of whole rows."""
        whole = self.whole or self
        rows = tensor._replace(shape=whole.shape, offset=tensor.offset + whole.first_row * tensor.row_bytes)
        if self.whole is None:
            return rows
        groups = self.file_box
        sizes = [size for group in groups for size, _ in group]
        box = [part for group in groups for _, part in group]
        shape = self.shape
        if not _cuts_no_block(tensor.dtype, groups[-1]):
            box[-len(groups[-1]) :] = [slice(0, size) for size, _ in groups[-1]]
            shape = (*shape[:-1], whole.shape[-1])
        return rows.window(sizes, box, shape)

    @property
    def file_box(self) -> list[list[tuple[int, slice]]]:
        """Of the axes that make up each axis of the tensor: the size there, and from where to where this part is."""
        whole = self.whole or self
        left, right = self.axes.split("->")
        place = zip(right.split(), self.place, whole.place, strict=True)
        parts = {axis: slice(part.start - all_.start, part.stop - all_.start) for axis, part, all_ in place}
        return [[(whole.sizes.get(axis, 1), parts.get(axis, slice(0, 1))) for axis in group] for group in _groups(left)]

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
    part_shape = tuple(math.prod(sizes.get(axis, 1) for axis in group) for group in _groups(left))  # "1" is no axis
    return sizes, part_shape, concrete(place, shape)


def _groups(left: str) -> list[list[str]]:
    """The axes that make up each axis of a pattern's tensor."""
    return [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", left)]


def _cuts_no_block(dtype: str, columns: Sequence[tuple[int, slice]]) -> bool:
    """Whether this part of a row is of whole blocks."""
    num_values = BLOCKS[dtype].num_values
    sizes = [size for size, _ in columns]
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    cut = [i for i, (size, part) in enumerate(columns) if part.stop - part.start < size]
    ends = [end * stride for (_, part), stride in zip(columns, strides, strict=True) for end in (part.start, part.stop)]
    return not cut or all(end % num_values == 0 for end in ends[: 2 * cut[-1] + 2])


class Filling(NamedTuple):
    """A parameter in host memory, one of its parts, and what is stored of it."""

    host: HostWindow
    part: WeightPart
    tensor: StoredTensor

    @property
    def stored_part(self) -> "WeightPart":
        """The part with the axes that are stored."""
        return self.part.interleaved() if self.tensor.is_interleaved else self.part

    @property
    def target(self) -> np.ndarray:
        return self.host.at(self.part.place)


class Filler:
    """Fills with the threads of `pool`; in C++ what that can read."""

    def __init__(self, pool: Executor):
        self._pool = pool
        self._scratch = np.empty(0, np.uint8)  # reused, as the first touch of fresh pages is slow

    def fill(self, fillings: Sequence[Filling]) -> None:
        """ModelFormatError for files that can't be read, and for values that are not finite."""
        slow, jobs = [], []
        for one in fillings:
            is_window = one.tensor.shape == one.part.shape
            if is_window and native_read.supports(one.tensor, one.host.values):
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
            raise tensor.not_finite(host.values.dtype)


def _decode(data: np.ndarray, part: WeightPart, tensor: StoredTensor, target: np.ndarray, pool: Executor) -> bool:
    """Dequantises and copies groups of rows of the tensor. False if not all of it is finite."""
    view = part.source_axes(target)
    row_axes = re.findall(r"\w+", re.findall(r"\([^)]*\)|\w+", part.axes.split("->")[0])[0])
    lengths, most_rows = [part.sizes[axis] for axis in row_axes], max(1, _TILE // math.prod(tensor.shape[1:]))
    is_cut = tensor.shape[1:] != part.shape[1:]  # whole rows are read for a window of their columns
    columns = part.file_box[-1] if is_cut else []

    def decode(group: tuple[slice, ...]) -> bool:
        block = view[group]
        first_row = int(np.ravel_multi_index([one.start for one in group], lengths))
        num_rows = math.prod(block.shape[: len(lengths)])
        values = dequantize(tensor.dtype, data[first_row * tensor.row_bytes :][: num_rows * tensor.row_bytes])
        values = values + np.float32(tensor.shift) if tensor.shift else values
        if is_cut:
            values = values.reshape(num_rows, *(size for size, _ in columns))[:, *(kept for _, kept in columns)]
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
