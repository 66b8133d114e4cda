"""Logical array axes -> mesh axes. The only file that knows both vocabularies."""

import math
from collections.abc import Callable, Iterable, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxllm.errors import MeshError

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


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


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
    devices would all do the same work. An axis of experts is for models that have some."""
    used = {RULES[axis][0] for axes in arrays for axis in axes if axis in RULES}
    for name, size in mesh.shape.items():
        if size > 1 and name not in used:
            raise MeshError(
                f"mesh axis {name!r} has {size} devices that would all do the same work, as it splits nothing of this "
                f"model; leave it out, or use 'tensor', or run {size} engines on a part of the mesh each"
            )


def shard_map(fn: Callable, mesh: Mesh | None, in_axes: Sequence[Axes], out_axes: Sequence[Axes]) -> Callable:
    """`fn` run on each device's part of its arguments; axes () are those of a tree that every device has whole. A mesh
    of one device, or none, needs no wrapper."""
    if mesh is None or mesh.size == 1:
        return fn
    return jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=tuple(partition_spec(axes, mesh) for axes in in_axes),
        out_specs=tuple(partition_spec(axes, mesh) for axes in out_axes),
        check_vma=False,  # kernels loop over data-dependent bounds that the checker can't type
    )
