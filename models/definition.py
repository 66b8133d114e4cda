"""What a module is beside its arrays: classes and static attributes of all its parts, by which models differ."""

import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.models.linear import Embedding, Linear, LinearShape

# What training and evaluation set, and engines: they say how a model is run.
_RUN = frozenset({"deterministic", "use_running_average", "decode", "train", "training", "is_training", "fixed_order"})


class _Anything:
    """In the place of what is not compared."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "another object"


_ANYTHING = _Anything()


class _PlainFunction(NamedTuple):
    """Equal for functions that the same lines have made, with equal values around them."""

    name: str
    code: Any
    values: Any

    def __repr__(self) -> str:
        return self.name


class _DefinedPart(NamedTuple):
    """A module within a module."""

    kind: type
    attributes: Mapping[str, Any]
    has_arrays: bool

    def get(self, name: str) -> Any:
        return self.attributes[name] if name in self.attributes else _plain(getattr(self.kind, name, _ANYTHING))


@dataclasses.dataclass(frozen=True)
class Definition:
    """The classes and static attributes of a module and of those within it. It holds no arrays.

    Attributes are compared where they are numbers, strings, enumerations, None, classes, functions, or dataclasses and
    collections of them. Left out are dtypes, sizes of products (arrays have them), how weights are drawn, what differs
    between training and evaluation, and the form that a weight has in an engine.
    """

    parts: Mapping[tuple[Any, ...], _DefinedPart]

    @classmethod
    def of(cls, module: nnx.Module) -> "Definition":
        nodes = list(nnx.iter_graph(module))
        variables = [path for path, node in nodes if isinstance(node, nnx.Variable)]
        with_arrays = {path[:end] for path in variables for end in range(len(path))}
        modules = {
            path: node for path, node in nodes if isinstance(node, nnx.Module) and not isinstance(node, nnx.Dropout)
        }
        return cls(
            {
                path: _DefinedPart(_form(type(node)), _fields(vars(node)), path in with_arrays)
                for path, node in sorted(modules.items(), key=lambda item: len(item[0]))
            }
        )

    def difference(self, other: "Definition", here: str, there: str) -> str | None:
        """Where this one and the `other` first differ, in words, in which they are called `here` and `there`; None:
        nowhere. What only one of them has is left to who compares their arrays, if it has any."""
        for path in dict.fromkeys([*self.parts, *other.parts]):
            ours, theirs, name = self.parts.get(path), other.parts.get(path), ".".join(map(str, path))
            if ours is None or theirs is None:
                only = ours or theirs
                if only is not None and not only.has_arrays:
                    return f"{name} is {_called(only.kind)} {here if theirs is None else there} alone"
            elif not _is_same(ours.kind, theirs.kind):
                about = ", which is defined again" if _called(ours.kind) == _called(theirs.kind) else ""
                name = name or "the module"
                return f"{name} is {_called(ours.kind)} {here}, and {_called(theirs.kind)} {there}{about}"
            else:
                names = dict.fromkeys([*ours.attributes, *theirs.attributes])
                for found in (_differing((*path, one), ours.get(one), theirs.get(one)) for one in names):
                    if found is not None:
                        return f"{found.name} is {found.first!r:.100} {here}, and {found.second!r:.100} {there}"
        return None


class _Differing(NamedTuple):
    name: str
    first: Any
    second: Any


def _differing(path: tuple[Any, ...], first: Any, second: Any) -> _Differing | None:
    """The first values that differ, within fields and collections of equal names."""
    if first == second:
        return None
    inner: Iterator[tuple[Any, Any, Any]] = iter(())
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        inner = ((key, first[key], second[key]) for key in first)
    elif type(first) is type(second) is tuple and len(first) == len(second):
        inner = ((i, *pair) for i, pair in enumerate(zip(first, second, strict=True)))
    found = (_differing((*path, key), one, other) for key, one, other in inner)
    return next(filter(None, found), _Differing(".".join(map(str, path)), first, second))


def _fields(values: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    left_out = ("dtype", "_init", "_initializer")
    return {
        name: _plain(value, depth)
        for name, value in values.items()
        if not name.startswith("_pytree__")
        and not name.endswith(left_out)
        and name not in _RUN
        and "dropout" not in name
    }


def _plain(value: Any, depth: int = 0) -> Any:
    """`value` as it is compared."""
    is_number = isinstance(value, int | float | complex | np.generic)
    if depth > 8 or isinstance(value, LinearShape) or (is_number and value != value):
        return _ANYTHING
    if is_number:
        return value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, str | bytes | Enum | BuiltinFunctionType | np.ufunc | jnp.ufunc):
        return value
    if isinstance(value, type):
        return _PlainFunction(_called(value), None, None)
    if dataclasses.is_dataclass(value):
        given = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        # A context's length is the engine's; attention has the scale that its configuration may leave out.
        fields = {name: one for name, one in given.items() if name not in ("max_len", "query_scale")}
        return {"": _called(type(value)), **_fields(fields, depth + 1)}
    if isinstance(value, Mapping):
        return {key: _plain(one, depth + 1) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_plain(one, depth + 1) for one in value)
    return _of_function(value, depth)


def _of_function(value: Any, depth: int) -> Any:
    if isinstance(value, MethodType | property):
        return _plain(value.fget if isinstance(value, property) else value.__func__, depth + 1)
    if isinstance(value, partial):
        return _PlainFunction("partial", _plain(value.func, depth + 1), _plain((value.args, value.keywords), depth + 1))
    if isinstance(value, FunctionType):
        around = [_content(cell) for cell in value.__closure__ or ()]
        values = _plain((around, value.__defaults__, value.__kwdefaults__), depth + 1)
        return _PlainFunction(value.__qualname__, value.__code__, values)
    inner = getattr(value, "__wrapped__", None)  # of what jax.jit has made, say
    return _ANYTHING if inner is None else _plain(inner, depth + 1)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _form(kind: type) -> type:
    """The class of a dense product, or table, for the forms of it that engines have."""
    dense = next((base for base in (Linear, Embedding) if issubclass(kind, base)), None)
    return kind if dense is None or not kind.__module__.startswith("jaxllm.") else dense


def _called(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_same(first: type, second: type) -> bool:
    """Whether classes do the same: a notebook's cell that runs again makes another one of the same lines, and Qwix one
    each time that it wraps a module."""
    ours, theirs = first.__mro__, second.__mro__
    return len(ours) == len(theirs) and all(
        one is other or (_called(one) == _called(other) and _body(one) == _body(other))
        for one, other in zip(ours, theirs, strict=True)
    )


def _body(kind: type) -> dict[str, Any]:
    """What a class statement has in it."""
    return {name: one for name, one in _fields(vars(kind)).items() if name not in ("__doc__", "__annotations__")}
