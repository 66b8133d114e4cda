"""Which parts of a model hold which quantised modules of a checkpoint."""

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxllm.checkpoint.fill import WeightPart
from jaxllm.checkpoint.quantized.fill import QuantizedFilling
from jaxllm.checkpoint.quantized.module import QuantizedModule
from jaxllm.checkpoint.tensors import StoredTensor
from jaxllm.errors import ModelFormatError
from jaxllm.models.linear import Linear, LinearShape, joined
from jaxllm.models.quantized import QuantizedLinear, WeightForm
from jaxllm.models.weights import Weight

Table = Mapping[str, Sequence[Weight]]  # of `WEIGHTS`, for all layers


class ModulePart(NamedTuple):
    """A module, or some rows of one, and its place in a product's dense weight."""

    module: QuantizedModule
    part: WeightPart


class _Piece(NamedTuple):
    module: QuantizedModule
    weight: Weight  # whose path is that of the product


class QuantizedPlan(NamedTuple):
    """The products that hold quantised modules, and where all other tensors go."""

    shapes: Mapping[str, LinearShape]  # by the product's path
    sources: Mapping[str, Sequence[ModulePart]]
    table: Table
    stored: Mapping[str, StoredTensor]
    spare: Collection[str] = ()  # of these, what a model may lack

    @classmethod
    def of(
        cls, model: nnx.Module, table: Table, modules: Mapping[str, QuantizedModule], stored: Mapping[str, StoredTensor]
    ) -> "QuantizedPlan":
        """Gives the abstract `model` the forms of `modules`, in place. ModelFormatError for a module that is not one of
        its products, or whose groups don't fit."""
        pieces = [piece for name, module in modules.items() for piece in _pieces(name, module, table)]
        by_product: dict[str, list[_Piece]] = {}
        for piece in pieces:
            by_product.setdefault(piece.weight.path, []).append(piece)
        for path, sources in by_product.items():
            _replace(model, path, sources)
        return cls._after(model, table, pieces, stored)

    def of_product(self, name: str) -> str | None:
        """The path of the quantised product whose weight the parameter `name` is a part of."""
        path, _, leaf = name.rpartition(".")
        return path if path in self.shapes and leaf != "bias" else None

    def fill(self, path: str, source: ModulePart, hosts: Mapping[str, np.ndarray]) -> None:
        """Reads the module into the arrays of the product at `path`, which are given by the parameters' names."""
        own = {name.removeprefix(f"{path}."): host for name, host in hosts.items() if name.startswith(f"{path}.")}
        QuantizedFilling(own, source.part, len(self.shapes[path].inputs)).fill(source.module.read())

    @classmethod
    def _after(
        cls, model: nnx.Module, table: Table, pieces: Sequence[_Piece], stored: Mapping[str, StoredTensor]
    ) -> "QuantizedPlan":
        shapes: dict[str, LinearShape] = {}
        sources: dict[str, list[ModulePart]] = {}
        rows: dict[str, int] = {}  # that have a place, of each module
        for module, weight in pieces:
            weight, linear = _home(model, weight)
            shapes[weight.path] = linear.shape
            first_row, dense = rows.get(module.name, 0), tuple(linear.shape.weight_axes.values())
            part = WeightPart.at(module.name, weight, dense, first_row)
            rows[module.name] = first_row + part.shape[0]
            if part.shape[1] != module.shape[1] or rows[module.name] > module.shape[0]:
                raise _other_shape(module, part.shape)
            sources.setdefault(weight.path, []).append(ModulePart(module, part))
        for module, _ in pieces:
            if rows[module.name] != module.shape[0]:
                raise _other_shape(module, (rows[module.name], module.shape[1]))
        rest = {
            name: tuple(_dense_home(model, weight) for weight in weights)
            for name, weights in table.items()
            if not name.endswith(".weight") or name.removesuffix(".weight") not in rows
        }
        return cls(shapes, sources, rest, stored)


def _pieces(name: str, module: QuantizedModule, table: Table) -> list[_Piece]:
    weights = table.get(f"{name}.weight")
    if weights is None:
        raise ModelFormatError(f"{module.tensors[0].file}: {name} is quantised, but the model has no such module")
    found = []
    for weight in weights:
        path, dot, leaf = weight.path.rpartition(".")
        if leaf != "weight" or not dot:
            raise ModelFormatError(f"{module.tensors[0].file}: {name} is quantised, but only products can be")
        found.append(_Piece(module, dataclasses.replace(weight, path=path)))
    return found


def _other_shape(module: QuantizedModule, wanted: Sequence[int]) -> ModelFormatError:
    return ModelFormatError(
        f"{module.tensors[0].file}: {module.name} is a weight of {list(module.shape)} (outputs, inputs), but the "
        f"configuration implies {list(wanted)}; take config and weights of one model"
    )


def _replace(model: nnx.Module, path: str, sources: Sequence[_Piece]) -> None:
    parent, key, linear = _find(model, path)
    if type(linear) is not Linear:
        source = sources[0].module
        raise ModelFormatError(
            f"{source.tensors[0].file}: {source.name} is quantised, which is not supported for {type(linear).__name__}"
        )
    forms: dict[str, tuple[Hashable, WeightForm | None]] = {name: ("", None) for name in _members(linear.shape)}
    for source in sources:
        form = source.module.form
        # Each has an order of its own, and what is read dense is not with what is dense in the file.
        owner = "read dense" if form is None else source.module.name if form.is_reordered else ""
        for name in _covered(linear.shape, source.weight):
            forms[name] = (owner, form)
    groups: dict[tuple[Hashable, WeightForm | None], list[str]] = {}
    for name, kind in forms.items():
        groups.setdefault(kind, []).append(name)
    parts: list[Linear] = []
    for (_, form), names in groups.items():
        part = linear if len(groups) == 1 else _abstract_part(linear, names)
        try:
            parts.append(part if form is None else QuantizedLinear.abstract(part, form))
        except ValueError as error:
            raise ModelFormatError(f"{sources[0].module.tensors[0].file}: {sources[0].module.name}: {error}") from error
    _set(parent, key, joined(linear, parts))


def _abstract_part(linear: Linear, names: Sequence[str]) -> Linear:
    shape = linear.shape.part(names)
    axes = shape.weight_axes
    value = jax.ShapeDtypeStruct(tuple(axes.values()), linear.weight.get_value().dtype)
    return Linear(shape, nnx.Param(value, axes=tuple(axes)))


def _home(model: nnx.Module, weight: Weight) -> tuple[Weight, Linear]:
    """The product that holds the piece, and its place there, whose path is the product's."""
    _, _, linear = _find(model, weight.path)
    parts = getattr(linear, "parts", None)
    if parts is None:
        return weight, linear
    covered = _covered(linear.shape, weight)
    index, part = next((i, part) for i, part in enumerate(parts) if covered[0] in dict(part.shape.members))
    slices = [part.shape.slice_of(name) for name in covered]
    dim = len(part.shape.weight_axes) + part.shape.member_dim
    place = (dim, slices[0].start, slices[-1].stop)
    return dataclasses.replace(weight, path=f"{weight.path}.parts.{index}", part=place), part


def _dense_home(model: nnx.Module, weight: Weight) -> Weight:
    """Likewise of a plain tensor's, whose path is that of the parameter."""
    path, _, leaf = weight.path.rpartition(".")
    if leaf != "weight" or not path or not hasattr(_find(model, path)[2], "parts"):
        return weight
    moved, _ = _home(model, dataclasses.replace(weight, path=path))
    return dataclasses.replace(moved, path=f"{moved.path}.weight")


def _members(shape: LinearShape) -> list[str]:
    return [name for name, _ in shape.members] or [""]


def _covered(shape: LinearShape, weight: Weight) -> list[str]:
    """The members that the piece fills: all, if it says no part."""
    if weight.part is None or not shape.members:
        return _members(shape)
    dim, start, stop = weight.part
    size = tuple(shape.weight_axes.values())[dim]
    first, last, _ = slice(start, stop).indices(size)
    slices = {name: shape.slice_of(name) for name, _ in shape.members}
    return [name for name, part in slices.items() if first <= part.start and part.stop <= last]


def _find(model: nnx.Module, path: str) -> tuple[Any, str | int, Any]:
    """What holds the module at `path`, its name there, and the module."""
    node: Any = model
    *names, last = [int(name) if name.isdecimal() else name for name in path.split(".")]
    for name in names:
        node = _get(node, name)
    return node, last, _get(node, last)


def _get(node: Any, name: str | int) -> Any:
    return node[name] if isinstance(name, int) else getattr(node, name, None)


def _set(node: Any, name: str | int, value: Any) -> None:
    if isinstance(name, int):
        node[name] = value
    else:
        setattr(node, name, value)
