"""Parameters from a checkpoint onto a mesh, tensor by tensor."""

import dataclasses
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from jaxllm.checkpoint.config import ModelSpec
from jaxllm.checkpoint.fill import Filler, Filling, WeightPart
from jaxllm.checkpoint.formats import Checkpoint
from jaxllm.checkpoint.placement import canonical, check_mesh, expansion_of, named, some_of
from jaxllm.checkpoint.tensors import DTYPES, FLOATS, StoredTensor
from jaxllm.errors import ModelFormatError
from jaxllm.models import transformer
from jaxllm.models.transformer import Params
from jaxllm.models.weights import Weight
from jaxllm.pallas_kernels.native import huge_pages
from jaxllm.sharding import rules

log = logging.getLogger(__name__)

_GROUP_BYTES = 32 << 20  # of tensors that are read at once: each time this thread waits for others that run Python
_COMPUTED = r".*\.rotary_emb\.inv_freq"  # in old checkpoints, and computed here
_PREFIX = "model."  # of the model in most families' checkpoints with a head


FillPlan = Mapping[str, list[WeightPart]]  # dotted name of the parameter -> what fills it


def abstract_params(spec: ModelSpec) -> Params:
    """The parameters as `ShapeDtypeStruct`s, each with its logical axes."""
    return nnx.state(transformer.abstract(spec.module.Model, spec.cfg), nnx.Param)


def load_params(checkpoint: Checkpoint, spec: ModelSpec, params: Params, mesh: Mesh) -> Params:
    """Reads a checkpoint into arrays like the abstract `params`, split over `mesh` (see `expand_model`).

    The host holds two groups at most, each of 32 MB of the files or of one larger parameter, besides those that live
    there; quantised values become those of the model's dtype, some rows at a time. A mesh (`MeshError`) and tensors
    (`ModelFormatError`) that don't fit the model are found before data is read, non-finite values then.
    """
    params = jax.tree.map(lambda leaf: leaf, params)
    check_mesh(params, mesh)
    stored = _stored(checkpoint, spec)
    plan = _plan(spec, params)
    _check(checkpoint, spec, plan, stored)

    start = time.perf_counter()
    total = sum(part.of(stored[part.name]).num_bytes for parts in plan.values() for part in parts)
    bar = tqdm(total=total, desc="loading", unit="B", unit_scale=True, disable=None, leave=False)
    with bar, ThreadPoolExecutor(min(16, cpu_count() or 1)) as pool:
        arena, filler, previous = huge_pages.Arena(), Filler(pool), []
        for group in _groups(params, plan, stored):
            hosts = [_empty(canonical(var), arena) for _, var in group]
            fillings = [
                Filling(host, part, part.of(stored[part.name]))
                for host, (name, _) in zip(hosts, group, strict=True)
                for part in plan[name]
            ]
            filler.fill(fillings)
            bar.update(sum(filling.tensor.num_bytes for filling in fillings))
            arrays = [_shard(host, var, mesh) for host, (_, var) in zip(hosts, group, strict=True)]
            jax.block_until_ready(previous)  # one transfer runs while the next group is read, and no more
            previous = arrays
            for array, (_, var) in zip(arrays, group, strict=True):
                var.set_value(array)
        jax.block_until_ready(previous)
    seconds = time.perf_counter() - start
    gigabytes = total / 1e9
    log.info("loaded %.2f GB in %.1f s (%.2f GB/s)", gigabytes, seconds, gigabytes / seconds)
    return params


def _stored(checkpoint: Checkpoint, spec: ModelSpec) -> Mapping[str, StoredTensor]:
    """The tensors by the names of `WEIGHTS`, where a model saved without a head lacks their prefix."""
    stored, table, prefix = checkpoint.tensors(), _table(spec), getattr(spec.module, "PREFIX", _PREFIX)
    if any(name.startswith(prefix) for name in stored):
        return stored
    return {prefix + name if prefix + name in table else name: tensor for name, tensor in stored.items()}


def _groups(
    params: Params, plan: FillPlan, stored: Mapping[str, StoredTensor]
) -> Iterator[list[tuple[str, nnx.Variable]]]:
    """The parameters, with their names, as they are read together."""
    group, num_bytes = [], 0
    for name, var in named(params).items():
        group.append((name, var))
        num_bytes += sum(part.of(stored[part.name]).num_bytes for part in plan[name])
        if num_bytes >= _GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


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
    ignored = re.compile(f"{_COMPUTED}|{getattr(spec.module, 'IGNORED', '')}")
    unexpected = sorted(name for name in unused if not ignored.fullmatch(name))
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


def _empty(want: jax.ShapeDtypeStruct, arena: huge_pages.Arena) -> np.ndarray:
    """Uninitialised memory for such an array."""
    memory = arena.empty(math.prod(want.shape) * want.dtype.itemsize)
    return memory.view(want.dtype).reshape(want.shape)


def _shard(host: np.ndarray, var: nnx.Variable, mesh: Mesh) -> jax.Array:
    how = expansion_of(var)

    def part(index: Any) -> np.ndarray:
        return host[index] if how is None else how.shard(host, index)

    shape = host.shape if how is None else how.shape
    return jax.make_array_from_callback(shape, rules.sharding(var.axes, mesh), part)
