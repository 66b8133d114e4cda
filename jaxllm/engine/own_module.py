"""A user's own module, as the engine serves it: its graph, its class, its attributes and all of its arrays."""

import dataclasses
import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxllm.argument_checks import a_type
from jaxllm.checkpoint.placement import named, some_of
from jaxllm.engine.model_interface import check_interface, kv_dtype
from jaxllm.models.definition import Definition
from jaxllm.models.transformer import Params
from jaxllm.models.wrapped import Wrapped, definition_of, name_of
from jaxllm.sharding.rules import RULES

log = logging.getLogger(__name__)


class OwnModule(NamedTuple):
    """What is served of a module."""

    cfg: Any
    model: nnx.Module  # of ShapeDtypeStructs; the engine's own object
    params: Params  # all arrays of the user's
    definition: Definition | None  # of what the user gave, as it was then
    without_axes: tuple[str, ...]  # names of those that nothing says how to split
    misnamed: tuple[str, ...]  # names of those with an axis that is nearly called as one that meshes split


def open_module(model: Any) -> OwnModule:
    """A module's configuration, an abstract copy of its own class and attributes, and its arrays. Raises `TypeError`
    for a module without the interface, and `ValueError` for one that does not do what it says."""
    name, definition = name_of(model), definition_of(model)
    check_interface(model, name)
    _say_training(model, name)
    if not all(map(_is_served, named(nnx.state(model)).values())):
        model = Wrapped.of_module(model, model.cfg)
    graph, params = nnx.split(model)
    variables = named(params)
    _check_arrays(variables)
    axes = {key: _axes_of(key, variable, variables) for key, variable in variables.items()}
    shapes = jax.tree.map(lambda leaf: leaf, params)
    for key, variable in named(shapes).items():
        value = variable.get_value()
        variable.set_value(jax.ShapeDtypeStruct(value.shape, value.dtype))
        variable.set_metadata(axes=axes[key] or (None,) * value.ndim)
    cfg = dataclasses.replace(model.cfg, dtype=kv_dtype(graph, shapes, model.cfg, name))
    without_axes = tuple(key for key in axes if axes[key] is None)
    return OwnModule(cfg, nnx.merge(graph, shapes), params, definition, without_axes, tuple(_misnamed(axes)))


def _check_arrays(variables: Mapping[str, nnx.Variable]) -> None:
    for name, variable in variables.items():
        value = variable.get_value()
        if not hasattr(value, "shape"):
            raise ValueError(f"parameter {name} is {a_type(value)}; give an array, or leave it out of the parameters")


def _say_training(model: nnx.Module, name: str) -> None:
    """Logs which parts of `model` do what is done in training alone, as dropout does."""
    own = model.model if isinstance(model, Wrapped) else model
    modes = ("deterministic", "use_running_average")  # which eval() sets
    parts = [
        ".".join(map(str, path))
        for path, part in (nnx.iter_modules(own) if isinstance(own, nnx.Module) else ())
        if any(getattr(part, mode, None) is False for mode in modes) and getattr(part, "rate", 1) != 0
    ]
    if parts:
        log.warning(
            "%s is served as it trains, as %s say: every step draws the same dropout, and norms go by its tokens; "
            "give LLM the module after model.eval()",
            *(name, some_of(parts)),
        )


def _misnamed(axes: Mapping[str, tuple[str | None, ...] | None]) -> Iterator[str]:
    for key, named_axes in axes.items():
        for axis in {*(named_axes or ())} - {None, *RULES}:
            if near := difflib.get_close_matches(str(axis), RULES, n=1, cutoff=0.8):
                yield f"{key} ({axis!r} for {near[0]!r}?)"


def say_replicated(names: Sequence[str], misnamed: Sequence[str], mesh: Mesh) -> None:
    """Logs which parameters each device of `mesh` has whole, as they have no logical axes, or seem to have mistaken
    ones."""
    if misnamed and mesh.size > 1:
        log.warning(
            "axes of %d parameters are split by no mesh, but are nearly called as some that are: %s; jaxllm.sharding."
            "rules has their names",
            len(misnamed),
            some_of(list(misnamed)),
        )
    if names and mesh.size > 1:
        log.warning(
            "each of %d devices has all of %d parameters without logical axes: %s; nnx.Param(value, axes=(...)) names "
            "them, as in jaxllm.sharding.rules",
            mesh.size,
            len(names),
            some_of(list(names)),
        )


def _is_served(leaf: Any) -> bool:
    """Whether the engine has an array as it stands in a module's state: in a variable, and of numbers."""
    return isinstance(leaf, nnx.Variable) and not isinstance(leaf, nnx.RngState)


def _axes_of(name: str, variable: nnx.Variable, variables: dict[str, nnx.Variable]) -> tuple[str | None, ...] | None:
    """The logical axes that it brings; None if there are none, or those of another array, as low-rank weights have
    that were made of a larger one's metadata."""
    shape, axes = variable.get_value().shape, variable.get_metadata("axes", None)
    if axes is None or len(axes) != len(shape):
        return None if shape else ()
    if isinstance(variable, nnx.LoRAParam):  # the rank, by Qwix's names
        axes = (*axes[:-1], None) if name.endswith("lora_a") else (None, *axes[1:])
    whole = variables.get(f"{name.rpartition('.')[0]}.qvalue")
    if whole is None:
        return tuple(axes)
    # Of Qwix's quantised arrays: a scale is one for all entries of an axis, which is then of size 1.
    sizes = zip(axes, shape, whole.get_value().shape, strict=True)
    return tuple(axis if size == full else None for axis, size, full in sizes)
