"""Parameters of another code base as those of a model here, by a table, inside jit or outside."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from flax.core import meta
from jaxtyping import Array

from jaxllm.argument_checks import some_of
from jaxllm.models import registry, transformer
from jaxllm.models.conversion_tables import TABLES, ForeignTable, ForeignWeight


def convert(tree: Any, table: str | ForeignTable, model: Any) -> dict[str, Any]:
    """The parameters of `model`, a `Config` or a module of `jaxllm.models` that has one, as nested dicts with its
    paths, which `LLM((cfg, params))` and `update_params` take. Dtypes are those of `tree`.

    `tree` holds arrays, or variables of Flax, by the names of `table`: one of `TABLES`, by its name, or one's own. A
    level "params" around all is passed over. The function is pure: inside jit the result is on the devices, as the
    compiler splits it or `out_shardings` says. Nothing of `tree` is donated.

    Raises `ValueError` with the names that are missing, that the table or the model does not know, and with the shapes
    that are not those of `model`.
    """
    cfg = getattr(model, "cfg", model)
    rules = _table(table)
    found = _named(tree)
    wanted = _wanted(cfg)
    known = {name: place for name, place in _spelled(rules, cfg.num_layers).items() if place[0].path in wanted}
    missing, unknown = sorted(known.keys() - found.keys()), sorted(found.keys() - known.keys())
    if missing or unknown:
        raise ValueError(
            f"the tree is not that of the model: missing {some_of(missing)}, unknown {some_of(unknown)}; take the "
            "table and the configuration of the model that was trained, and merge adapters first"
        )
    parts: dict[str, list[_Part]] = {path: [] for path in wanted}
    for name, places in known.items():
        for part in _parts(name, found[name], places, wanted, cfg):
            parts[part.path].append(part)
    return _nested({path: _joined(path, some, wanted[path]) for path, some in parts.items()})


class _Part(NamedTuple):
    path: str
    dim: int
    start: int
    value: Array


def _table(given: str | ForeignTable) -> ForeignTable:
    if isinstance(given, Mapping):
        return given
    if given not in TABLES:
        raise ValueError(f"table={given!r:.100} is unknown; choose one of {sorted(TABLES)}, or give a table")
    return TABLES[given]


def _named(tree: Any) -> dict[str, Any]:
    """Arrays by their dotted names."""
    boxes = nnx.Variable | meta.AxisMetadata
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, boxes))
    named = {jax.tree_util.keystr(path, simple=True, separator="."): _unboxed(leaf) for path, leaf in leaves}
    while named and all(name.startswith("params.") for name in named):
        named = {name.removeprefix("params."): leaf for name, leaf in named.items()}
    return named


def _unboxed(leaf: Any) -> Any:
    if isinstance(leaf, nnx.Variable):
        return leaf.get_value()
    return leaf.unbox() if isinstance(leaf, meta.AxisMetadata) else leaf


@cache
def _wanted(cfg: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of the model."""
    state = nnx.state(transformer.abstract(registry.model_for(cfg), cfg), nnx.Param)
    return {name: leaf.shape for name, leaf in _named(state).items()}


def _spelled(table: ForeignTable, num_layers: int) -> dict[str, list[ForeignWeight]]:
    """By the tensor's name, its place in each of the parameters that it fills: several, where it stacks layers."""
    found = {}
    for name, weight in table.items():
        paths = [weight.path.replace("{i}", str(i)) for i in range(num_layers if "{i}" in weight.path else 1)]
        places = [replace(weight, path=path) for path in paths]
        if "{i}" in name:
            found |= {name.replace("{i}", str(i)): [place] for i, place in enumerate(places)}
        else:
            found[name] = places
    return found


def _parts(
    name: str, value: Any, places: list[ForeignWeight], wanted: Mapping[str, tuple[int, ...]], cfg: Any
) -> list[_Part]:
    weight, shape = places[0], wanted[places[0].path]
    dim, start, stop = weight.part or (0, None, None)
    begin, end, _ = slice(start, stop).indices(shape[dim])
    left, right = weight.axes.split(" -> ")
    is_stacked = right.startswith("l ")
    dims = [*shape[:dim], end - begin, *shape[dim + 1 :]]
    sizes = dict(zip(right.split(), [len(places), *dims] if is_stacked else dims, strict=True))
    groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", left)]
    implied = tuple(math.prod(sizes[axis] for axis in group) for group in groups)
    value = jnp.asarray(value)
    if weight.may_be_padded and value.ndim == len(implied):
        dim_v = groups.index(["v"])
        value = jax.lax.slice_in_dim(value, 0, min(implied[dim_v], value.shape[dim_v]), axis=dim_v)
    if value.shape != implied:
        raise ValueError(f"{name} has shape {value.shape}, but the model's configuration implies {implied}")
    if weight.interleaved:
        left, right = re.sub(r"\bh\b", "half two", left), re.sub(r"\bh\b", "(two half)", right)
        sizes = {axis: size for axis, size in sizes.items() if axis != "h"} | {"two": 2, "half": sizes["h"] // 2}
    value = rearrange(value, f"{left} -> {right}", **sizes)
    if weight.head_dim_power:
        value = (value.astype(jnp.float32) * cfg.head_dim**weight.head_dim_power).astype(value.dtype)
    arrays = list(value) if is_stacked else [value]
    return [_Part(place.path, dim, begin, array) for place, array in zip(places, arrays, strict=True)]


def _joined(path: str, parts: list[_Part], shape: tuple[int, ...]) -> Array:
    parts = sorted(parts, key=lambda part: part.start)
    filled = sum(part.value.size for part in parts)
    if filled != math.prod(shape):
        raise ValueError(f"the table fills {filled} of the {math.prod(shape)} values of {path}; it is for other models")
    return parts[0].value if len(parts) == 1 else jnp.concatenate([part.value for part in parts], axis=parts[0].dim)


def _nested(named: Mapping[str, Array]) -> dict[str, Any]:
    """Keys that are numbers are of lists, and ints."""
    tree: dict[str, Any] = {}
    for name, value in named.items():
        *above, last = (int(key) if key.isdecimal() else key for key in name.split("."))
        node: dict[Any, Any] = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value
    return tree
