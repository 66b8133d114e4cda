"""Parameters from a checkpoint onto a mesh, tensor by tensor."""

import dataclasses
import logging
import math
import re
import time
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import product
from os import cpu_count
from typing import Any, NamedTuple

import jax
import numpy as np
from einops import rearrange
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from jaxllm.checkpoint.config import ModelSpec
from jaxllm.checkpoint.formats import Checkpoint
from jaxllm.checkpoint.gguf.blocks import dequantize
from jaxllm.checkpoint.placement import canonical, check_mesh, expansion_of, named, some_of
from jaxllm.checkpoint.tensors import DTYPES, FLOATS, StoredTensor, read
from jaxllm.errors import ModelFormatError
from jaxllm.models import transformer
from jaxllm.models.transformer import Params
from jaxllm.models.weights import Weight
from jaxllm.sharding import rules

log = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes
_TILE = 2**18  # elements; source and target of a transposed copy stay in the L2 cache
_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")  # in old checkpoints, and computed here


class WeightPart(NamedTuple):
    """The place in a parameter of a checkpoint's tensor, or of some of its rows."""

    name: str
    axes: str  # einops pattern, from the tensor to the parameter
    sizes: dict[str, int]  # of the pattern's axes
    place: tuple[slice, ...]
    first_row: int  # where the tensor stacks several parts

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part of the checkpoint's tensor."""
        groups = re.findall(r"\([^)]*\)|\S+", self.axes.split("->")[0])
        return tuple(math.prod(self.sizes[axis] for axis in group.strip("()").split()) for group in groups)

    def of(self, tensor: StoredTensor) -> StoredTensor:
        """These rows of the checkpoint's `tensor`; they lie together in the file."""
        return tensor._replace(shape=self.shape, offset=tensor.offset + self.first_row * tensor.row_bytes)

    def interleaved(self) -> "WeightPart":
        """The part where the two halves of each head, which rope turns as pairs, are interleaved in the tensor."""
        left, right = self.axes.split("->")
        axes = re.sub(r"\bh\b", "half two", left) + "->" + re.sub(r"\bh\b", "(two half)", right)
        sizes = {name: size for name, size in self.sizes.items() if name != "h"}
        return self._replace(axes=axes, sizes=sizes | {"half": self.sizes["h"] // 2, "two": 2})


FillPlan = Mapping[str, list[WeightPart]]  # dotted name of the parameter -> what fills it


def abstract_params(spec: ModelSpec) -> Params:
    """The parameters as `ShapeDtypeStruct`s, each with its logical axes."""
    return nnx.state(transformer.abstract(spec.module.Model, spec.cfg), nnx.Param)


def load_params(checkpoint: Checkpoint, spec: ModelSpec, params: Params, mesh: Mesh) -> Params:
    """Reads a checkpoint into arrays like the abstract `params`, split over `mesh` (see `expand_model`).

    The host holds two parameters at most, besides those that live there; quantised values become those of the model's
    dtype, some rows at a time. A mesh (`MeshError`) and tensors (`ModelFormatError`) that don't fit the model are found
    before data is read, non-finite values then.
    """
    params = jax.tree.map(lambda leaf: leaf, params)
    check_mesh(params, mesh)
    stored = checkpoint.tensors()
    plan = _plan(spec, params)
    _check(checkpoint, spec, plan, stored)

    start = time.perf_counter()
    sizes = [part.of(stored[part.name]).num_bytes for parts in plan.values() for part in parts]
    scratch = np.empty(max(sizes), np.uint8)  # reused, as the first touch of fresh pages is slow
    bar = tqdm(total=sum(sizes), desc="loading", unit="B", unit_scale=True, disable=None, leave=False)
    with bar, ThreadPoolExecutor(min(16, cpu_count() or 1)) as pool:
        previous = None
        for name, var in named(params).items():
            host = _empty(canonical(var))
            for part in plan[name]:
                tensor = part.of(stored[part.name])
                _fill(host, part, tensor, scratch, pool)
                bar.update(tensor.num_bytes)
            array = _shard(host, var, mesh)
            jax.block_until_ready(previous)  # one transfer runs while the next parameter is read, and no more
            previous = array
            var.set_value(array)
        jax.block_until_ready(previous)
    seconds = time.perf_counter() - start
    gigabytes = sum(sizes) / 1e9
    log.info("loaded %.2f GB in %.1f s (%.2f GB/s)", gigabytes, seconds, gigabytes / seconds)
    return params


def _plan(spec: ModelSpec, params: Params) -> FillPlan:
    shapes = {name: canonical(var).shape for name, var in named(params).items()}
    plan: dict[str, list[WeightPart]] = {name: [] for name in shapes}
    for name, weights in _table(spec).items():
        first_row = 0
        for weight in weights:
            if weight.path in plan:
                part = _part(name, weight, shapes[weight.path], first_row)
                plan[weight.path].append(part)
                first_row += part.shape[0]
    for name, parts in plan.items():
        filled = sum(math.prod(part.sizes.values()) for part in parts)
        assert filled == math.prod(shapes[name]), f"WEIGHTS fills {filled} of {name} {shapes[name]}"
    return plan


def _table(spec: ModelSpec, *, optional: bool = True) -> dict[str, tuple[Weight, ...]]:
    """`WEIGHTS` and, if wanted, `OPTIONAL_WEIGHTS` with their layers spelled out."""
    module, table = spec.module, {}
    weights = {**module.WEIGHTS, **(getattr(module, "OPTIONAL_WEIGHTS", {}) if optional else {})}
    for name, entry in weights.items():
        pieces = entry if isinstance(entry, tuple) else (entry,)
        for i in range(spec.cfg.num_layers if "{i}" in name else 1):
            table[name.replace("{i}", str(i))] = tuple(
                dataclasses.replace(piece, path=piece.path.replace("{i}", str(i))) for piece in pieces
            )
    return table


def _part(name: str, weight: Weight, shape: tuple[int, ...], first_row: int) -> WeightPart:
    place = [slice(None)] * len(shape)
    if weight.part is not None:
        dim, start, stop = weight.part
        place[dim] = slice(start, stop)
    dims = [len(range(size)[piece]) for size, piece in zip(shape, place, strict=True)]
    sizes = dict(zip(weight.axes.split("->")[1].split(), dims, strict=True))
    return WeightPart(name, weight.axes, sizes, tuple(place), first_row)


def _check(checkpoint: Checkpoint, spec: ModelSpec, plan: FillPlan, stored: Mapping[str, StoredTensor]) -> None:
    """Raises `ModelFormatError` unless the checkpoint holds what the model needs, and nothing else."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in (part for parts in plan.values() for part in parts):
        rows = max(shapes.get(part.name, (0,))[0], part.first_row + part.shape[0])
        shapes[part.name] = (rows, *part.shape[1:])
    missing = sorted(shapes.keys() - stored.keys())
    unused = stored.keys() - shapes.keys() - _table(spec, optional=False).keys()  # a tied lm_head is in the table
    unexpected = sorted(name for name in unused if not _COMPUTED.fullmatch(name))
    if missing or unexpected:
        raise ModelFormatError(
            f"{checkpoint.path}: the tensors are not those of its {checkpoint.config_name}: missing "
            f"{some_of(missing)}, unexpected {some_of(unexpected)}; take config and weights of one model"
        )
    for name, shape in shapes.items():
        tensor = stored[name]
        if tensor.dtype not in DTYPES:
            raise ModelFormatError(
                f"{tensor.file}: {tensor.name} has dtype {tensor.dtype}, but only {list(FLOATS)} are supported; "
                "take the model's unquantised weights"
            )
        if tensor.shape != shape:
            raise ModelFormatError(
                f"{tensor.file}: {tensor.name} has shape {list(tensor.shape)}, but {checkpoint.config_name} implies "
                f"{list(shape)}; take config and weights of one model"
            )


def _empty(want: jax.ShapeDtypeStruct) -> np.ndarray:
    """Uninitialised memory, aligned such that JAX on the CPU uses it as it is rather than a copy."""
    num_bytes = math.prod(want.shape) * want.dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(want.dtype).reshape(want.shape)


def _fill(host: np.ndarray, part: WeightPart, tensor: StoredTensor, scratch: np.ndarray, pool: Executor) -> None:
    data, target = read(tensor, scratch, pool), host[part.place]
    if tensor.is_plain:
        source = data.view(FLOATS[tensor.dtype]).reshape(tensor.shape)
        is_finite = _copy(rearrange(source, part.axes, **part.sizes), target, pool)
    else:
        is_finite = _decode(data, part, tensor, target, pool)
    if not is_finite:
        raise ModelFormatError(
            f"{tensor.file}: {tensor.name} holds values that are not finite in {host.dtype}; "
            "download the file again, or choose a dtype of wider range"
        )


def _decode(data: np.ndarray, part: WeightPart, tensor: StoredTensor, target: np.ndarray, pool: Executor) -> bool:
    """Dequantises and copies groups of rows of the tensor. False if not all of it is finite."""
    part = part.interleaved() if tensor.is_interleaved else part
    left, right = part.axes.split("->")
    axes, row_axes = re.findall(r"\w+", left), re.findall(r"\w+", re.findall(r"\([^)]*\)|\w+", left)[0])
    # The other way round the parameter takes the tensor's axes as a view, since none of them are merged.
    view = rearrange(target, f"{right} -> {' '.join(axes)}", **part.sizes)
    assert np.may_share_memory(view, target)
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


def _shard(host: np.ndarray, var: nnx.Variable, mesh: Mesh) -> jax.Array:
    how = expansion_of(var)

    def part(index: Any) -> np.ndarray:
        return host[index] if how is None else how.shard(host, index)

    shape = host.shape if how is None else how.shape
    return jax.make_array_from_callback(shape, rules.sharding(var.axes, mesh), part)
