"""The caller's parameters onto a mesh, and the names that parameters go by."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.models.transformer import Params
from jaxllm.sharding import rules


def check_mesh(params: Params, mesh: Mesh) -> None:
    """Raises `MeshError` if `mesh` does not split one of `params` (abstract or not) evenly, or has an axis of several
    devices that splits none."""
    variables = named(params)
    for name, var in variables.items():
        rules.check_divides(name, var.get_value().shape, var.axes, mesh)
    rules.check_used((var.axes for var in variables.values()), mesh)


def place_params(params: Any, abstract: Params, mesh: Mesh) -> Params:
    """The caller's parameters, split over `mesh`, in the state that `abstract` describes.

    `params` is an `nnx.State`, or nested dicts and lists with the same paths; where the model has a floating dtype any
    other is kept. An
    array that lies as wanted already is shared, not copied, so donating it elsewhere ends both. Raises
    `ValueError` naming the leaves that don't fit, and `MeshError`.
    """
    check_mesh(abstract, mesh)
    want, got = named(abstract), named(params)
    missing, unexpected = sorted(want.keys() - got.keys()), sorted(got.keys() - want.keys())
    if missing or unexpected:
        raise ValueError(
            f"parameters do not fit the model: missing {some_of(missing)}, unexpected {some_of(unexpected)}; "
            "pass nnx.state(model) of a model with the same config, or nested dicts with the same paths"
        )
    for name, var in want.items():
        _check_leaf(name, got[name], var.get_value())
    shardings = [rules.sharding(var.axes, mesh) for var in want.values()]
    arrays = jax.device_put([_value(got[name]) for name in want], shardings)
    placed = jax.tree.map(lambda leaf: leaf, abstract)
    for var, array in zip(named(placed).values(), arrays, strict=True):
        var.set_value(array)
    return placed


def _check_leaf(name: str, leaf: Any, want: jax.ShapeDtypeStruct) -> None:
    value = _value(leaf)
    if not isinstance(value, jax.Array | np.ndarray):
        raise ValueError(f"parameter {name} is a {type(value).__name__}; pass a jax or numpy array")
    if isinstance(value, jax.Array) and value.is_deleted():
        raise ValueError(f"parameter {name} has been deleted or donated; pass the arrays that replaced it")
    if value.shape != want.shape:
        raise ValueError(f"parameter {name} has shape {value.shape}, but the model's config wants {want.shape}")
    is_floating = jnp.issubdtype(want.dtype, jnp.floating)
    if value.dtype != want.dtype and not (is_floating and jnp.issubdtype(value.dtype, jnp.floating)):
        wanted = "a floating one" if is_floating else want.dtype
        raise ValueError(f"parameter {name} has dtype {value.dtype}; convert it to {wanted}")


def named(params: Any) -> dict[str, Any]:
    """The variables (or arrays, in a plain pytree) by their dotted names."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def some_of(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) or "none") + more
