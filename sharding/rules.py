"""Logical array axes -> mesh axes. The only file that knows both vocabularies."""

from collections.abc import Callable, Iterable, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxllm.errors import MeshError

Axes = Sequence[str | None]
AnyMesh = Mesh | AbstractMesh  # with devices, or of sizes alone

# Megatron's split: attention by KV head, the MLP by its hidden width, the vocabulary by token.
RULES = {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "experts": "expert"}


def partition_spec(axes: Axes, mesh: AnyMesh) -> PartitionSpec:
    """How `mesh` splits an array with logical `axes`; None is never split."""
    mesh_axes = [RULES.get(axis) if axis else None for axis in axes]
    mesh_axes = [axis if axis in mesh.axis_names else None for axis in mesh_axes]
    used = [axis for axis in mesh_axes if axis]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {tuple(axes)} use a mesh axis twice: {mesh_axes}")
    return PartitionSpec(*mesh_axes)


def num_shards(axis: str, mesh: AnyMesh) -> int:
    """Parts that `mesh` splits the logical `axis` into."""
    return mesh.shape.get(RULES.get(axis), 1)


def local_shape(shape: Sequence[int], axes: Axes, mesh: Mesh | None) -> tuple[int, ...]:
    """Of one device's part of an array."""
    if mesh is None:
        return tuple(shape)
    return tuple(size // num_shards(axis, mesh) if axis else size for size, axis in zip(shape, axes, strict=True))


def sharding(axes: Axes, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(axes, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def check_divides(name: str, shape: Sequence[int], axes: Axes, mesh: Mesh) -> None:
    """Raises `MeshError` if `mesh` does not split array `name` into equal parts."""
    for size, axis, mesh_axis in zip(shape, axes, partition_spec(axes, mesh), strict=True):
        if mesh_axis and size % mesh.shape[mesh_axis]:
            raise MeshError(
                f"mesh axis {mesh_axis!r} has {mesh.shape[mesh_axis]} devices, which do not divide "
                f"the {size} {axis} of {name}; choose a divisor of {size}"
            )


def check_used(arrays: Iterable[Axes], mesh: Mesh) -> None:
    """Raises `MeshError` for a mesh axis of several devices that splits none of `arrays`, given by their axes: those
    devices would all do the same work."""
    used = {mesh_axis for axes in arrays for mesh_axis in partition_spec(axes, mesh) if mesh_axis}
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
