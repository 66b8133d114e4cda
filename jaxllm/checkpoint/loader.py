"""Parameters from a checkpoint onto a mesh, tensor by tensor."""

import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from itertools import product
from os import cpu_count
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from jaxllm.argument_checks import some_of
from jaxllm.checkpoint.config import ModelSpec
from jaxllm.checkpoint.fill import Filler, Filling, WeightPart
from jaxllm.checkpoint.formats import Checkpoint
from jaxllm.checkpoint.gguf.checkpoint import GgufCheckpoint
from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.placement import canonical, check_mesh, expansion_of, named
from jaxllm.checkpoint.quantized import gguf
from jaxllm.checkpoint.quantized.fill import stored_bytes
from jaxllm.checkpoint.quantized.kv_scales import Scales, read_kv_scales
from jaxllm.checkpoint.quantized.make import quantized_leaves
from jaxllm.checkpoint.quantized.module import QuantizedModule
from jaxllm.checkpoint.quantized.plan import QuantizedPlan
from jaxllm.checkpoint.quantized.scheme import Scheme, spare_biases
from jaxllm.checkpoint.tensors import DTYPES, FLOATS, StoredTensor
from jaxllm.checkpoint.weights_table import weights_table
from jaxllm.checkpoint.window import HostArray, HostWindow, Needed, concrete, needed, shard_at
from jaxllm.errors import ModelFormatError
from jaxllm.models import transformer
from jaxllm.models.linear import Embedding, Linear
from jaxllm.models.transformer import Params
from jaxllm.pallas_kernels.native import huge_pages
from jaxllm.progress import disabled
from jaxllm.sharding import rules

log = logging.getLogger(__name__)

_GROUP_BYTES = 32 << 20  # of tensors that are read at once: each time this thread waits for others that run Python
_COMPUTED = r".*\.rotary_emb\.inv_freq"  # in old checkpoints, and computed here
_PREFIX = "model."  # of the model in most families' checkpoints with a head


FillPlan = Mapping[str, list[WeightPart]]  # dotted name of the parameter -> what fills it


def abstract_params(spec: ModelSpec) -> Params:
    """The parameters as `ShapeDtypeStruct`s, each with its logical axes."""
    return nnx.state(transformer.abstract(spec.module.Model, spec.cfg), nnx.Param)


def load_quantized(checkpoint: Checkpoint, spec: ModelSpec, params: Params, mesh: Mesh) -> Params:
    """Reads a checkpoint of dense weights, each of which is quantised on the devices before the next ones are there,
    where the abstract `params` of `quantize_model` say so."""
    dense = transformer.abstract(spec.module.Model, spec.cfg)
    expand_model(dense, mesh)
    params = jax.tree.map(lambda leaf: leaf, params)
    variables = named(params)

    def take(name: str, array: jax.Array) -> None:
        leaves = {name: array}
        if name not in variables:
            leaves = quantized_leaves(name.removesuffix(".weight"), array, variables, mesh)
        for leaf, value in leaves.items():
            variables[leaf].set_value(value)

    dense_params = nnx.state(dense, nnx.Param)
    for name, variable in named(dense_params).items():
        if name in variables:  # is not quantised, and may be held in fewer bits, or in panels
            variable.set_value(variables[name].get_value())
            variable.set_metadata(**variables[name].get_metadata())
    load_params(checkpoint, spec, dense_params, mesh, take=take, brief=named(dense_params).keys() - variables.keys())
    return params


def load_params(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    params: Params,
    mesh: Mesh,
    *,
    quantized: QuantizedPlan | None = None,
    take: Callable[[str, jax.Array], None] | None = None,
    brief: Collection[str] = (),
) -> Params:
    """Reads a checkpoint into arrays like the abstract `params`, split over `mesh` (see `expand_model`). `quantized` is
    what gave the model its forms, if some weights stay quantised. `take` gets each array with the parameter's name, if
    it is given; else the parameters that are returned hold them. Those of the names in `brief` it has done with when it
    returns, and their memory is free before more is read.

    The host holds two groups at most, each of 32 MB of the files or of one larger parameter, besides those that live
    there; quantised values become those of the model's dtype, some rows at a time. Of several processes each reads
    and holds what its own devices need; none waits for another, but where `take` computes. A mesh (`MeshError`) and
    tensors (`ModelFormatError`) that don't fit the model are found before data is read, by all processes; non-finite
    values then, by those that read them: that process should end, and whoever watches over the others end them.
    """
    params = jax.tree.map(lambda leaf: leaf, params)
    check_mesh(params, mesh)
    if quantized is None:
        stored = _stored(checkpoint, spec)
        quantized = QuantizedPlan({}, {}, weights_table(spec, stored), stored)
    plan = _plan(quantized, params)
    _check(checkpoint, spec, plan, quantized)

    start = time.perf_counter()
    units = _units(params, plan, quantized, mesh)
    total = sum(unit.num_bytes for unit in units)
    bar = tqdm(total=total, desc="loading", unit="B", unit_scale=True, disable=disabled(), leave=False)
    with bar, ThreadPoolExecutor(min(16, cpu_count() or 1)) as pool:
        arena, filler, previous = huge_pages.Arena(), Filler(pool), []
        for group in _groups(units):
            own = huge_pages.Arena()  # a chunk lives as long as any of its arrays
            variables = {name: var for unit in group for name, var in unit.variables.items()}
            passing = {name for name, var in variables.items() if name in brief or expansion_of(var) is not None}
            hosts = {
                name: _empty(wanted, variables[name].get_value().dtype, own if name in passing else arena)
                for unit in group
                for name, wanted in unit.needed.items()
            }
            _read(group, hosts, filler, pool)
            bar.update(sum(unit.num_bytes for unit in group))
            jax.block_until_ready(previous)  # one transfer runs while the next group is read, and no more
            previous = []
            for name, var in variables.items():
                array = _shard(hosts.pop(name), var, mesh, arena)
                var.set_value(array) if take is None else take(name, array)
                if name not in brief:
                    previous.append(array)
                del array
        jax.block_until_ready(previous)
    seconds = time.perf_counter() - start
    gigabytes = total / 1e9
    log.info("loaded %.2f GB in %.1f s (%.2f GB/s)", gigabytes, seconds, gigabytes / seconds)
    return params


def staging_bytes(params: Params) -> int:
    """Of the host, at most, that `load_params` and `load_quantized` take besides what they return: two groups."""
    shapes = [canonical(var) for var in named(params).values()]
    return 2 * (_GROUP_BYTES + max((math.prod(x.shape) * x.dtype.itemsize for x in shapes), default=0))


def _stored(checkpoint: Checkpoint, spec: ModelSpec) -> Mapping[str, StoredTensor]:
    """The tensors by the names of `WEIGHTS`, where a model saved without a head lacks their prefix, but those that are
    passed over. (Of those that only some configurations have, `_check` passes over what this one lacks.)"""
    tensors = checkpoint.tensors()
    ignored = _ignored(spec, tensors)
    if ignored:
        ignored -= weights_table(spec, tensors).keys()
    stored = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    prefix = getattr(spec.module, "PREFIX", _PREFIX)
    if any(name.startswith(prefix) for name in stored):
        return stored
    table = weights_table(spec, [prefix + name for name in stored])
    return {prefix + name if prefix + name in table else name: tensor for name, tensor in stored.items()}


def _ignored(spec: ModelSpec, names: Iterable[str]) -> set[str]:
    """Those of the `names` that `IGNORED` is of."""
    ignored = getattr(spec.module, "IGNORED", "").replace("{num_layers}", str(spec.cfg.num_layers))
    is_ignored = re.compile(f"{_COMPUTED}|{ignored}").fullmatch
    return {name for name in names if is_ignored(name)}


class _Unit(NamedTuple):
    """Parameters that are filled together: one, or those of a quantised product."""

    variables: dict[str, nnx.Variable]
    needed: dict[str, list[Needed]]  # of each, by this process
    num_bytes: int  # of that, in the files
    plain: list[tuple[str, WeightPart, StoredTensor]] = []  # what fills which of them
    quantized: list[Callable[[Mapping[str, HostArray]], None]] = []  # they fill all, given by their names


def _units(params: Params, plan: FillPlan, quantized: QuantizedPlan, mesh: Mesh) -> list[_Unit]:
    """In an order that is the same in all processes."""
    units, products = [], {}
    for name, var in named(params).items():
        path = quantized.of_product(name)
        if path is not None:
            products.setdefault(path, {})[name] = var
            continue
        wanted, plain = needed(var, mesh), []
        for part, one in product(plan[name], wanted):
            for window in map(part.within, one.of(part.place)):
                plain.append((name, window, window.of(quantized.stored[part.name])))
        num_bytes = sum(tensor.num_bytes for _, _, tensor in plain)
        units.append(_Unit({name: var}, {name: wanted}, num_bytes, plain))
    for path, variables in products.items():
        boxes = {name: needed(var, mesh) for name, var in variables.items()}
        sources = quantized.sources_of(path, boxes)
        fills = [partial(quantized.fill, path, source) for source in sources]
        units.append(_Unit(variables, boxes, stored_bytes(sources), quantized=fills))
    return units


def _read(group: Sequence[_Unit], hosts: Mapping[str, HostArray], filler: Filler, pool: Executor) -> None:
    """Fills the parameters of a group, given by their names."""
    plain = [filling for unit in group for filling in unit.plain]
    filler.fill([Filling(hosts[name].window(part.place), part, tensor) for name, part, tensor in plain])
    for read in [pool.submit(fill, hosts) for unit in group for fill in unit.quantized]:
        read.result()


def _groups(units: Sequence[_Unit]) -> Iterator[list[_Unit]]:
    """Those that are read together."""
    group, num_bytes = [], 0
    for unit in units:
        group.append(unit)
        num_bytes += unit.num_bytes
        if num_bytes >= _GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _plan(quantized: QuantizedPlan, params: Params) -> FillPlan:
    """Of the parameters that no quantised product has."""
    variables = named(params).items()
    shapes = {name: canonical(var).shape for name, var in variables if quantized.of_product(name) is None}
    plan: dict[str, list[WeightPart]] = {name: [] for name in shapes}
    for name, weights in quantized.table.items():
        first_row = 0
        for weight in weights:
            if weight.path in plan:
                part = WeightPart.at(name, weight, shapes[weight.path], first_row)
                plan[weight.path].append(part)
                first_row += part.shape[0]
    for name, parts in plan.items():
        filled = sum(math.prod(part.sizes.values()) for part in parts)
        assert filled == math.prod(shapes[name]), f"WEIGHTS fills {filled} of {name} {shapes[name]}"
    return plan


def plan_quantized(
    checkpoint: Checkpoint, spec: ModelSpec, model: nnx.Module, modules_of: Callable[[Mapping[str, StoredTensor]], Any]
) -> QuantizedPlan:
    """Gives the abstract `model` the forms that the checkpoint's weights have. `modules_of` is `Scheme.modules`."""
    stored = _stored(checkpoint, spec)
    modules, rest = modules_of(stored)
    names = {f"{name}.weight" for name in modules} | rest.keys()
    plan = QuantizedPlan.of(model, weights_table(spec, names), modules, rest)
    return plan._replace(spare=spare_biases(modules, rest))


def stored_kv_scales(checkpoint: Checkpoint, spec: ModelSpec, scheme: Scheme, kind: str) -> Scales | None:
    """See `read_kv_scales`."""
    return read_kv_scales(scheme, _stored(checkpoint, spec), spec.cfg.num_layers, kind)


def plan_blocks(checkpoint: GgufCheckpoint, spec: ModelSpec, model: nnx.Module) -> QuantizedPlan:
    """Gives the abstract `model` the forms of a GGUF file's blocks. ValueError if no product has some that are kept."""
    stored = _stored(checkpoint, spec)
    table = weights_table(spec, stored)
    kinds = (Linear, Embedding)
    products = {f"{'.'.join(map(str, path))}.weight" for path, node in nnx.iter_graph(model) if type(node) in kinds}
    modules: dict[str, QuantizedModule] = {}
    for name, tensor in stored.items():
        if name in table and all(piece.path in products for piece in table[name]):
            module = gguf.module(name.removesuffix(".weight"), tensor, spec.cfg.head_dim)
            if module is not None:
                modules[module.name] = module
    if not modules:
        raise ValueError(f"{checkpoint.path} holds no blocks that are kept quantised; leave quantization out")
    rest = {name: tensor for name, tensor in stored.items() if name.removesuffix(".weight") not in modules}
    return QuantizedPlan.of(model, table, modules, rest)


def _check(checkpoint: Checkpoint, spec: ModelSpec, plan: FillPlan, quantized: QuantizedPlan) -> None:
    """Raises `ModelFormatError` unless the checkpoint holds what the model needs, and nothing else."""
    stored = quantized.stored
    shapes: dict[str, tuple[int, ...]] = {}
    for part in (part for parts in plan.values() for part in parts):
        rows = max(shapes.get(part.name, (0,))[0], part.first_row + part.shape[0])
        shapes[part.name] = (rows, *part.shape[1:])
    missing = sorted(shapes.keys() - stored.keys())
    spare = weights_table(spec, optional=False).keys() | set(quantized.spare)  # a tied lm_head is in the table
    unexpected = stored.keys() - shapes.keys() - spare
    unexpected = sorted(unexpected - _ignored(spec, unexpected))
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


def _empty(wanted: Sequence[Needed], dtype: np.dtype, arena: huge_pages.Arena) -> HostArray:
    """Uninitialised memory for what is needed of an array."""
    windows = []
    for one in wanted:
        shape = [part.stop - part.start for part in one.window]
        windows.append(HostWindow(arena.array(shape, dtype), tuple(part.start for part in one.window)))
    return HostArray(windows)


def _shard(host: HostArray, var: nnx.Variable, mesh: Mesh, arena: huge_pages.Arena) -> jax.Array:
    """`arena` has what becomes of a parameter that is expanded."""
    how, shape = expansion_of(var), var.get_value().shape

    def part(index: Any) -> np.ndarray:
        return shard_at(host, how, concrete(index, shape), arena.array)

    return jax.make_array_from_callback(shape, rules.sharding(var.axes, mesh), part)
