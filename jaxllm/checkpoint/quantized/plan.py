"""Which parts of a model hold which quantised modules of a checkpoint."""

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxllm.argument_checks import some_of
from jaxllm.checkpoint.fill import WeightPart
from jaxllm.checkpoint.quantized.fill import ModulePart, ProductPart, fill_table
from jaxllm.checkpoint.quantized.module import QuantizedModule
from jaxllm.checkpoint.tensors import StoredTensor
from jaxllm.checkpoint.window import HostArray, Needed
from jaxllm.errors import MeshError, ModelFormatError
from jaxllm.models.linear import Embedding, Linear, LinearShape, joined
from jaxllm.models.quantized import QuantizedLinear, WeightForm
from jaxllm.models.quantized_embedding import QuantizedEmbedding
from jaxllm.models.weights import Weight

Table = Mapping[str, Sequence[Weight]]  # of `WEIGHTS`, for all layers


_DENSE = ("", None)  # what a member is that no quantised module has


class _Piece(NamedTuple):
    module: QuantizedModule
    weight: Weight  # whose path is that of the product


class QuantizedPlan(NamedTuple):
    """The products and tables that hold quantised modules, and where all other tensors go."""

    shapes: Mapping[str, LinearShape]  # by the product's path, or the table's
    sources: Mapping[str, Sequence[ModulePart]]
    table: Table
    stored: Mapping[str, StoredTensor]
    tables: Collection[str] = ()  # of `shapes`, those of embeddings
    spare: Collection[str] = ()  # of `stored`, what a model may lack

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
        _check_experts(table, modules)
        for path, sources in by_product.items():
            _replace(model, path, sources)
        return cls._after(model, table, pieces, stored)

    def of_product(self, name: str) -> str | None:
        """The path of the quantised product whose weight the parameter `name` is a part of."""
        path, _, leaf = name.rpartition(".")
        return path if path in self.shapes and leaf != "bias" else None

    def sources_of(self, path: str, needed: Mapping[str, Sequence[Needed]]) -> list[ModulePart]:
        """What fills the product at `path`, as far as it is needed of the parameters with these names."""
        name = next(name for name in (f"{path}.codes", f"{path}.weight") if name in needed)
        found = []
        for (module, part), one in product(self.sources[path], needed[name]):
            if path in self.tables:
                windows = [part.within(box) for box in one.of(part.place)]
            else:
                windows = self._product_part(path, part).windows(one, module.form)
            found += [ModulePart(module, window) for window in windows]
        if not found and f"{path}.order" in needed:  # which each device has
            raise MeshError(f"some devices would hold nothing but padding of {path}; take fewer devices")
        return found

    def fill(self, path: str, source: ModulePart, hosts: Mapping[str, HostArray]) -> None:
        """Reads the module into the arrays of the product at `path`, which are given by the parameters' names."""
        own = {name.removeprefix(f"{path}."): host for name, host in hosts.items() if name.startswith(f"{path}.")}
        if path in self.tables:
            fill_table(own, source)
        else:
            self._product_part(path, source.part).fill(own, source.module)

    def _product_part(self, path: str, part: WeightPart) -> ProductPart:
        shape = self.shapes[path]
        return ProductPart(part, len(shape.inputs), int(shape.experts is not None))

    @classmethod
    def _after(
        cls, model: nnx.Module, table: Table, pieces: Sequence[_Piece], stored: Mapping[str, StoredTensor]
    ) -> "QuantizedPlan":
        shapes: dict[str, LinearShape] = {}
        sources: dict[str, list[ModulePart]] = {}
        rows: dict[str, int] = {}  # that have a place, of each module
        for module, weight in pieces:
            first_row = rows.get(module.name, 0)
            for place, dense, shape in _homes(model, weight):
                shapes[place.path] = shape
                part = WeightPart.at(module.name, place, dense, first_row)
                rows[module.name] = first_row + part.shape[0]
                if part.shape[1] != module.shape[1] or rows[module.name] > module.shape[0]:
                    raise _other_shape(module, part.shape)
                sources.setdefault(place.path, []).append(ModulePart(module, part))
        for module, _ in pieces:
            if rows[module.name] != module.shape[0]:
                raise _other_shape(module, (rows[module.name], module.shape[1]))
        rest = {
            name: tuple(_dense_home(model, weight) for weight in weights)
            for name, weights in table.items()
            if not name.endswith(".weight") or name.removesuffix(".weight") not in rows
        }
        tables = {path for path in shapes if isinstance(_find(model, path)[2], QuantizedEmbedding)}
        return cls(shapes, sources, rest, stored, tables)


def dense_owner(model: nnx.Module, weight: Weight) -> Linear | Embedding | None:
    """The product or table of the abstract model whose dense weight this is a piece of; None for other parameters."""
    path, dot, leaf = weight.path.rpartition(".")
    owner = _find(model, path)[2] if dot and leaf == "weight" else None
    return owner if type(owner) in (Linear, Embedding) else None


def _pieces(name: str, module: QuantizedModule, table: Table) -> list[_Piece]:
    weights = table.get(f"{name}.weight")
    if weights is None:
        raise ModelFormatError(f"{module.tensors[0].file}: {name} is quantised, but the model has no such module")
    found = []
    for weight in weights:
        path, dot, leaf = weight.path.rpartition(".")
        if leaf != "weight" or not dot:
            what = "is quantised, but only products and tables can be"
            raise ModelFormatError(f"{module.tensors[0].file}: {name} {what}")
        found.append(_Piece(module, dataclasses.replace(weight, path=path)))
    return found


def _check_experts(table: Table, modules: Mapping[str, QuantizedModule]) -> None:
    """ModelFormatError unless all experts of a member are quantised, or none."""
    members = {member for name in modules for member in _expert_members(table.get(f"{name}.weight", ()))}
    missing = [
        name
        for name, weights in table.items()
        if name.removesuffix(".weight") not in modules and not members.isdisjoint(_expert_members(weights))
    ]
    if missing:
        file = next(iter(modules.values())).tensors[0].file
        raise ModelFormatError(
            f"{file}: other experts of their layers are quantised, but not {some_of(missing)}, or they are missing; "
            "download the files again"
        )


def _expert_members(weights: Sequence[Weight]) -> list[tuple[Any, ...]]:
    return [(weight.path, weight.part) for weight in weights if weight.expert is not None]


def _other_shape(module: QuantizedModule, wanted: Sequence[int]) -> ModelFormatError:
    return ModelFormatError(
        f"{module.tensors[0].file}: {module.name} is a weight of {list(module.shape)} (outputs, inputs), but the "
        f"configuration implies {list(wanted)}; take config and weights of one model"
    )


def _replace(model: nnx.Module, path: str, sources: Sequence[_Piece]) -> None:
    parent, key, linear = _find(model, path)
    if type(linear) is Embedding:
        _set(parent, key, _quantized_table(model, linear, sources[0].module))
        return
    if type(linear) is not Linear:
        source = sources[0].module
        raise ModelFormatError(
            f"{source.tensors[0].file}: {source.name} is quantised, which is not supported for {type(linear).__name__}"
        )
    forms: dict[str, tuple[Hashable, WeightForm | None]] = dict.fromkeys(_members(linear.shape), _DENSE)
    for source in sources:
        form = source.module.form
        # Each has an order of its own, and what is read dense is not with what is dense in the file.
        owner = "read dense" if form is None else source.module.name if form.is_reordered else ""
        for name in _covered(linear.shape, source.weight):
            if source.weight.expert is not None:
                _check_expert(source, forms[name], (owner, form))
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


def _quantized_table(model: nnx.Module, table: Embedding, module: QuantizedModule) -> Embedding:
    if module.form is None:
        raise ModelFormatError(
            f"{module.tensors[0].file}: {module.name} is a table quantised in a form that is read dense, which only "
            "products are; take another quantised form of the model"
        )
    has_tied_head = _get(model, "embed") is table and _get(model, "cfg").has_tied_head
    try:
        return QuantizedEmbedding.abstract(table, module.form, has_tied_head=has_tied_head)
    except ValueError as error:
        raise ModelFormatError(f"{module.tensors[0].file}: {module.name}: {error}") from error


def _check_expert(
    source: _Piece, before: tuple[Hashable, WeightForm | None], kind: tuple[Hashable, WeightForm | None]
) -> None:
    """ModelFormatError for a form that experts can't have, or that the one before has not."""
    module, form = source.module, kind[1]
    if form is not None and form.is_reordered:
        raise ModelFormatError(
            f"{module.tensors[0].file}: {module.name} takes its inputs in an order of its own (act-order), which is "
            "not supported for experts; take a checkpoint without it (desc_act or actorder)"
        )
    if before not in (_DENSE, kind):
        raise ModelFormatError(
            f"{module.tensors[0].file}: {module.name} is {form}, but other experts of its layer are {before[1]}; "
            "experts of different forms are not supported. Take another quantised form of the model"
        )


def _abstract_part(linear: Linear, names: Sequence[str]) -> Linear:
    shape = linear.shape.part(names)
    axes = shape.weight_axes
    value = jax.ShapeDtypeStruct(tuple(axes.values()), linear.weight.get_value().dtype)
    return Linear(shape, nnx.Param(value, axes=tuple(axes), part_of=shape.part_of))


def _homes(model: nnx.Module, weight: Weight) -> list[tuple[Weight, tuple[int, ...], LinearShape]]:
    """The places of the piece in products and tables, whose paths are theirs, with the sizes of their dense weights.
    That of a table with a tied head has two."""
    _, _, table = _find(model, weight.path)
    if not isinstance(table, QuantizedEmbedding):
        place, linear = _home(model, weight)
        return [(place, tuple(linear.shape.weight_axes.values()), linear.shape)]
    (_, width), (_, rows) = table.shape.inputs[0], table.shape.outputs[0]
    found = [(weight, (rows, width), table.shape)]
    if table.head is not None:
        head = dataclasses.replace(weight, path=f"{weight.path}.head", axes="v d -> d v")
        found.append((head, (width, rows), table.head.shape))
    return found


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
