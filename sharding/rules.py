"""Logical array axes -> mesh axes. The only file that knows both vocabularies."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.errors import MeshError
from jaxllm.sharding.mesh import mesh_in_context

Axes = Sequence[str | None]
AnyMesh = Mesh | AbstractMesh  # with devices, or of sizes alone

# Megatron's split: attention by KV head, the MLP by its hidden width, the vocabulary by token. Experts go to devices
# whole, and what is no expert's is split among the same devices, which would all have a copy of it.
RULES = {
    "vocab": ("tensor", "expert"),
    "heads": ("tensor", "expert"),
    "kv_heads": ("tensor", "expert"),
    "mlp": ("tensor", "expert"),
    "experts": ("expert",),
    "shards": ("data",),  # of sequences, and of what the engine keeps of them
}


def mesh_axes(axis: str | None, axes: Axes, mesh: AnyMesh) -> tuple[str, ...]:
    """Those of `mesh` that split the logical `axis` of an array with `axes`."""
    names = RULES.get(axis, ()) if axis else ()
    others = RULES["experts"] if "experts" in axes and axis != "experts" else ()
    return tuple(name for name in names if name in mesh.axis_names and name not in others)


def partition_spec(axes: Axes, mesh: AnyMesh) -> PartitionSpec:
    """How `mesh` splits an array with logical `axes`; None is never split."""
    names = [mesh_axes(axis, axes, mesh) for axis in axes]
    used = [name for each in names for name in each]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {tuple(axes)} use a mesh axis twice: {names}")
    return PartitionSpec(*(each[0] if len(each) == 1 else each or None for each in names))


def num_shards(axis: str | None, mesh: AnyMesh, axes: Axes = ()) -> int:
    """Parts that `mesh` splits the logical `axis` into, of an array with `axes`."""
    return math.prod(mesh.shape[name] for name in mesh_axes(axis, axes, mesh))


def local_shape(shape: Sequence[int], axes: Axes, mesh: Mesh | None) -> tuple[int, ...]:
    """Of one device's part of an array."""
    if mesh is None:
        return tuple(shape)
    return tuple(size // num_shards(axis, mesh, axes) for size, axis in zip(shape, axes, strict=True))


def sharding(axes: Axes, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(axes, mesh))


def shard_mesh(mesh: Mesh) -> Mesh:
    """The part of `mesh` that has the sequences of the first shard: one without `data`."""
    if "data" not in mesh.axis_names:
        return mesh
    sizes = {name: size for name, size in mesh.shape.items() if name != "data"} or {"tensor": 1}
    first = (slice(None),) * mesh.axis_names.index("data") + (slice(1),)
    devices = mesh.devices[first].reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def place(arrays: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """Arrays of the host, or of devices, as their meshes split them. Where a mesh has other processes' devices, each
    process has the whole of an array, the same in all of them, and gives its own devices their parts. Arrays of the
    host are copied, as a caller may write to them."""
    if all(map(_is_own, shardings)):
        owned = [_owned(array, sharding) for array, sharding in zip(arrays, shardings, strict=True)]
        return jax.device_put(owned, list(shardings))
    return [_place_own(array, sharding) for array, sharding in zip(arrays, shardings, strict=True)]


def _owned(array: Any, sharding: NamedSharding) -> Any:
    """A CPU takes an array of the host where it lies, whatever `may_alias` says."""
    is_shared = isinstance(array, np.ndarray) and next(iter(sharding.device_set)).platform == "cpu"
    return array.copy() if is_shared else array


def _is_own(sharding: NamedSharding) -> bool:
    return sharding.is_fully_addressable


def _place_own(array: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jax.device_put(array, sharding)
    host = np.asarray(array)  # of which `device_put` would compare the values with all other processes'
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def check_divides(name: str, shape: Sequence[int], axes: Axes, mesh: Mesh) -> None:
    """Raises `MeshError` if `mesh` does not split array `name` into equal parts."""
    for size, axis in zip(shape, axes, strict=True):
        if size % num_shards(axis, mesh, axes):
            raise MeshError(
                f"{say_devices(mesh_axes(axis, axes, mesh), mesh)}, which do not divide "
                f"the {size} {axis} of {name}; choose a divisor of {size}"
            )


def say_devices(names: Sequence[str], mesh: AnyMesh) -> str:
    """How many devices some axes of `mesh` have."""
    if len(names) == 1:
        return f"mesh axis {names[0]!r} has {mesh.shape[names[0]]} devices"
    return f"mesh axes {' and '.join(map(repr, names))} have {math.prod(mesh.shape[n] for n in names)} devices together"


def check_used(arrays: Iterable[Axes], mesh: Mesh) -> None:
    """Raises `MeshError` for a mesh axis of several devices that splits none of `arrays`, given by their axes: those
    devices would all do the same work. An axis of experts is for models that have some; `data` splits sequences."""
    used = {RULES[axis][0] for axes in arrays for axis in axes if axis in RULES} | {*RULES["shards"]}
    for name, size in mesh.shape.items():
        if size > 1 and name not in used:
            raise MeshError(
                f"mesh axis {name!r} has {size} devices that would all do the same work, as it splits nothing of this "
                "model; leave it out, or use 'tensor' or 'data'"
            )


def shard_map(fn: Callable, mesh: Mesh | None, in_axes: Sequence[Axes], out_axes: Sequence[Axes]) -> Callable:
    """`fn` run on each device's part of its arguments; axes () are those of a tree that every device has whole. A mesh
    of one device, or none, needs no wrapper. Within `over_shards`, `mesh` is that of a shard."""
    if mesh is None or mesh.size == 1:
        return fn
    return jax.shard_map(
        fn,
        mesh=mesh_in_context(mesh),
        axis_names=set(mesh.axis_names),
        in_specs=tuple(partition_spec(axes, mesh) for axes in in_axes),
        out_specs=tuple(partition_spec(axes, mesh) for axes in out_axes),
        check_vma=False,  # kernels loop over data-dependent bounds that the checker can't type
    )


def gathered(x: jax.Array) -> jax.Array:
    """Within `over_shards`: the arrays of all shards, one after the other on axis 0."""
    return jax.lax.all_gather(x, RULES["shards"], tiled=True)


def over_shards(fn: Callable, mesh: Mesh, *, num_shared: int = 0, shares_results: bool = False) -> Callable:
    """`fn` run for each shard, on its part of axis 0 of every array: all arguments but the first `num_shared`, which
    the shards have in common, and the results, unless they are the same for all. One shard needs no wrapper."""
    if num_shards("shards", mesh) == 1:
        return fn
    of_each, of_all = PartitionSpec(RULES["shards"]), PartitionSpec()

    def run(*arguments: Any) -> Any:
        return jax.shard_map(
            lambda *own: fn(*own),
            mesh=mesh,
            axis_names=set(RULES["shards"]),
            in_specs=tuple(of_all if i < num_shared else of_each for i in range(len(arguments))),
            out_specs=of_all if shares_results else of_each,
            check_vma=False,
        )(*arguments)

    return run
