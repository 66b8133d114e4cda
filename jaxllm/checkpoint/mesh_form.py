"""A model as a mesh holds it: which parameters are expanded there, and the products that they belong to."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jaxllm.errors import MeshError
from jaxllm.models.linear import LinearShape
from jaxllm.models.quantized import QuantizedLinear
from jaxllm.sharding.expand import Leaf, Repeated, check_splits, expansion
from jaxllm.sharding.rules import AnyMesh, num_shards

Path = tuple[Any, ...]  # of names and indices


def expand_model(model: nnx.Module, mesh: AnyMesh) -> bool:
    """Gives the abstract `model` the shapes that `mesh` can split, in place; whether there were others.

    A parameter that is expanded has its `Expansion` in its metadata, from which those who place, load, update and
    return parameters know its canonical shape. Raises `MeshError` naming a parameter that can't be split.
    """
    for path, node in list(nnx.iter_graph(model)):
        if isinstance(node, QuantizedLinear):
            _fit(path, node, mesh)
    nodes = dict(nnx.iter_graph(model))
    variables = {path: node for path, node in nodes.items() if isinstance(node, nnx.Variable)}
    products = {path: _linear_shapes(node) for path, node in nodes.items() if isinstance(node, nnx.Module)}
    leaves = {path: _leaf(path, variable, products) for path, variable in variables.items()}
    check_splits({".".join(map(str, path)): leaf for path, leaf in leaves.items()}, mesh)
    found = {path: expansion(leaf, mesh) for path, leaf in leaves.items()}
    for path, how in found.items():
        if how is not None:
            dtype = variables[path].get_value().dtype
            variables[path].set_value(jax.ShapeDtypeStruct(how.shape, dtype))
            variables[path].set_metadata(expansion=how)
    for path, shapes in products.items():
        for name, shape in shapes.items():
            setattr(nodes[path], name, _expanded(shape, mesh))
    return any(how is not None for how in found.values())


def _fit(path: Path, linear: QuantizedLinear, mesh: AnyMesh) -> None:
    """Makes the groups of a quantised weight such as each device has whole ones of. MeshError if that can't be."""
    name = ".".join(map(str, path))
    axes = tuple(linear.shape.weight_axes)
    if linear.order is not None and any(num_shards(axis, mesh, axes) > 1 for axis, _ in linear.shape.inputs):
        raise MeshError(
            f"{name} takes its inputs in an order of its own (act-order), and the mesh {dict(mesh.shape)} splits them; "
            "take one device, or a checkpoint without act-order (desc_act or actorder)"
        )
    axis, size = linear.shape.inputs[-1]
    count = num_shards(axis, mesh, axes)
    if size % count == 0:
        try:
            linear.fit(size // count)
        except ValueError as error:
            raise MeshError(f"{name} on {dict(mesh.shape)}: {error}; take fewer devices") from error


def _linear_shapes(module: nnx.Module) -> dict[str, LinearShape]:
    return {name: value for name, value in vars(module).items() if isinstance(value, LinearShape)}


def _leaf(path: Path, variable: nnx.Variable, products: Mapping[Path, Mapping[str, LinearShape]]) -> Leaf:
    """The parameter, with the members that its product, or one around that, has on an axis of its size."""
    axes, shape = tuple(variable.get_metadata("axes")), variable.get_value().shape
    around = [product for end in range(len(path)) for product in products.get(path[:end], {}).values()]
    members = [_members(product) for product in around]
    sizes = dict(zip(axes, shape, strict=True))
    fitting = [m for m in members if m and all(sum(parts) == sizes.get(axis) for axis, parts in m.items())]
    return Leaf(axes=axes, shape=shape, members=fitting[-1] if fitting else {})


def _members(shape: LinearShape) -> dict[str, Sequence[int]]:
    return {} if shape.axis is None else {shape.axis: [size for _, size in shape.members]}


def _expanded(shape: LinearShape, mesh: AnyMesh) -> LinearShape:
    axes = shape.weight_axes
    leaf = Leaf(axes=tuple(axes), shape=tuple(axes.values()), members=_members(shape))
    how = expansion(leaf, mesh)
    if how is None:
        return shape
    sizes = dict(zip(axes, how.shape, strict=True))
    members = shape.members
    if isinstance(how, Repeated) and members:
        members = tuple((name, size) for (name, _), size in zip(members, how.member_sizes, strict=True))
    return dataclasses.replace(
        shape,
        inputs=tuple((name, sizes[name]) for name, _ in shape.inputs),
        outputs=tuple((name, sizes[name]) for name, _ in shape.outputs),
        members=members,
    )
