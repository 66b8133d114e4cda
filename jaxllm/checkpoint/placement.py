"""The caller's parameters onto a mesh and back, and the names that parameters go by."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jaxllm.argument_checks import a_type, some_of
from jaxllm.checkpoint.quantized.make import quantized_leaves
from jaxllm.models.panel_linear import InPanels
from jaxllm.models.transformer import Params
from jaxllm.pallas_kernels.native import huge_pages
from jaxllm.sharding import rules
from jaxllm.sharding.expand import Expansion, Lengthened


def check_mesh(params: Params, mesh: Mesh) -> None:
    """Raises `MeshError` if `mesh` does not split one of `params` (abstract or not) evenly, or has an axis of several
    devices that splits none."""
    variables = named(params)
    for name, var in variables.items():
        rules.check_divides(name, var.get_value().shape, var.axes, mesh)
    rules.check_used((var.axes for var in variables.values()), mesh)


def place_params(params: Any, abstract: Params, mesh: Mesh, *, cast: bool = False, donate: bool = False) -> Params:
    """The caller's parameters, split over `mesh`, in the state that `abstract` describes (see `expand_model`).

    `params` is an `nnx.State`, or nested dicts and lists with the same paths; where the model has a floating dtype any
    other is kept, unless `cast` makes it the model's. An array that lies as wanted already is shared, not copied, so
    donating it elsewhere ends both. Those that the mesh can't split as they are it expands, one after the other, and
    deletes what it has expanded if they are to `donate`; dense weights of products that are quantised it quantises. Of
    several processes each calls this with the same parameters. Raises `ValueError` naming the leaves that don't fit,
    and `MeshError`.
    """
    check_mesh(abstract, mesh)
    want, got = named(abstract), named(params)
    got = _quantized(got, want)
    missing, unexpected = sorted(want.keys() - got.keys()), sorted(got.keys() - want.keys())
    if missing or unexpected:
        raise ValueError(
            f"parameters do not fit the model: missing {some_of(missing)}, unexpected {some_of(unexpected)}; "
            "pass nnx.state(model) of a model with the same config, or nested dicts with the same paths"
        )
    for name, var in want.items():
        _check_leaf(name, got[name], canonical(var))
        got[name] = _fitting(name, _value(got[name]), var, cast=cast)
    whole = [name for name, var in want.items() if expansion_of(var) is None]
    shardings = [rules.sharding(want[name].axes, mesh) for name in whole]
    arrays = dict(zip(whole, rules.place([got[name] for name in whole], shardings), strict=True))
    placed, arena = jax.tree.map(lambda leaf: leaf, abstract), huge_pages.Arena()
    for name, var in named(placed).items():
        how = expansion_of(var)
        var.set_value(arrays[name] if how is None else _expand(got[name], var, how, mesh, arena))
        if how is not None and donate:
            got[name].delete()
    return placed


def _quantized(got: dict[str, Any], want: dict[str, nnx.Variable]) -> dict[str, Any]:
    """With dense weights of products that are quantised in the form of those."""
    found: dict[str, Any] = {}
    for name, leaf in got.items():
        path = name.removesuffix(".weight")
        if name in want:
            found[name] = leaf
        elif (codes := want.get(f"{path}.panels", want.get(f"{path}.codes"))) is not None:
            if codes.get_metadata("num_inputs", None) is None:
                raise ValueError(
                    f"parameter {name} is dense, and the model's table is quantised, which is done to products alone; "
                    "give its codes and scales, as LLM.params has them"
                )
            _check_leaf(name, leaf, dense_shape(codes))
            found |= quantized_leaves(path, jnp.asarray(_value(leaf)), want)
        elif parts := {key: var for key, var in want.items() if key.startswith(f"{path}.parts.") and _place(var)}:
            for key, weight in _divided(name, leaf, parts).items():
                part, is_dense = key.rpartition(".")[0], key.endswith(".weight")
                found |= {key: weight} if is_dense else quantized_leaves(part, weight, want)
        else:
            found[name] = leaf
    return found


def _place(variable: nnx.Variable) -> Any:
    """See `LinearShape.part_of`."""
    return variable.get_metadata("part_of", None)


def _divided(name: str, leaf: Any, parts: dict[str, nnx.Variable]) -> dict[str, Array]:
    """The members that each of a product's `parts` has, which are its codes or a dense weight, of the dense weight of
    them all."""
    dim = _place(next(iter(parts.values())))[0]
    places = {key: _place(var)[1] for key, var in parts.items()}
    shapes = [canonical(var) if key.endswith(".weight") else dense_shape(var) for key, var in parts.items()]
    shape = list(shapes[0].shape)
    shape[dim] = max(stop for pieces in places.values() for _, stop in pieces)
    _check_leaf(name, leaf, jax.ShapeDtypeStruct(tuple(shape), shapes[0].dtype))
    weight = jnp.asarray(_value(leaf))
    return {
        key: jnp.concatenate([jax.lax.slice_in_dim(weight, *ends, axis=dim) for ends in pieces], axis=dim)
        for key, pieces in places.items()
    }


def dense_shape(codes: nnx.Variable) -> jax.ShapeDtypeStruct:
    """The canonical shape of the dense weight of a product that has these codes, or panels."""
    return jax.ShapeDtypeStruct(codes.get_metadata("dense_shape"), jnp.float32)


def canonical_params(placed: Params, mesh: Mesh) -> Params:
    """The parameters that `place_params` or `load_params` has put on `mesh` with their canonical shapes; arrays that
    have those are shared, not copied."""
    params = jax.tree.map(lambda leaf: leaf, placed)
    for var in named(params).values():
        how = expansion_of(var)
        if how is not None:
            var.set_value(_contraction(how, sharding_before(var, mesh))(var.get_value()))
            var.set_metadata(axes=how.canonical_axes(var.axes))
            var.del_metadata("expansion")
    return params


def completed(params: Any, abstract: Params, current: Callable[[], Params]) -> dict[str, Any]:
    """`params`, by name, with what they leave out and need not bring, of the `current` ones: variables that are no
    `nnx.Param`, which training does not change; and all others, where they are the low-rank weights (`nnx.LoRAParam`)
    alone. Keys of random numbers are no parameters."""
    variables = named(abstract)
    given = {name: leaf for name, leaf in named(params).items() if not isinstance(leaf, nnx.RngState)}
    low_rank = {name for name, var in variables.items() if isinstance(var, nnx.LoRAParam)}
    is_low_rank = bool(low_rank) and given.keys() == low_rank
    optional = {name for name, var in variables.items() if is_low_rank or not isinstance(var, nnx.Param)}
    if optional <= given.keys():
        return given
    return {name: var for name, var in named(current()).items() if name in optional} | given


def canonical(variable: nnx.Variable) -> jax.ShapeDtypeStruct:
    """Shape and dtype that a parameter has outside of the mesh."""
    value, how = variable.get_value(), expansion_of(variable)
    return jax.ShapeDtypeStruct(value.shape if how is None else how.canonical, value.dtype)


def expansion_of(variable: nnx.Variable) -> Expansion | None:
    """What makes of a parameter what its mesh holds; None if that is the same."""
    return variable.get_metadata("expansion", None)


def sharding_before(variable: nnx.Variable, mesh: Mesh) -> NamedSharding:
    """How `mesh` splits the canonical array of a parameter."""
    how = expansion_of(variable)
    return rules.sharding(variable.axes, mesh) if how is None else how.canonical_sharding(variable.axes, mesh)


def _expand(
    array: Array | np.ndarray, variable: nnx.Variable, how: Expansion, mesh: Mesh, arena: huge_pages.Arena
) -> Array:
    """One at a time, so that no more than a device's part of one array lies beside the results."""
    sharding = rules.sharding(variable.axes, mesh)
    if isinstance(how, InPanels):
        return jax.device_put(how.of_whole(np.asarray(array), arena.array), sharding)
    (before,) = rules.place([array], [sharding_before(variable, mesh)])
    return jax.block_until_ready(_expansion(how, sharding)(before))


@cache
def _expansion(how: Lengthened, sharding: NamedSharding) -> Callable[[Any], Array]:
    return jax.jit(how.expand, out_shardings=sharding)


@cache
def _contraction(how: Expansion, sharding: NamedSharding) -> Callable[[Any], Array]:
    return jax.jit(how.contract, out_shardings=sharding)


def _fitting(name: str, value: Any, variable: nnx.Variable, *, cast: bool) -> Any:
    """`value`, in the variable's dtype if it shall be `cast`. ValueError for one of 64 bits, which nothing here
    computes in, and for any other where panels are made of it."""
    dtype = variable.get_value().dtype
    if value.dtype == dtype:
        return value
    if cast:
        with jax.enable_x64(value.dtype.itemsize == 8):
            return value.astype(dtype)
    if value.dtype.itemsize == 8:
        raise ValueError(f"parameter {name} is {value.dtype}; cast it to float32, or less, first")
    if isinstance(expansion_of(variable), InPanels):
        raise ValueError(f"parameter {name} is {value.dtype}, the engine's is {dtype}; cast it first")
    return value


def release_others(params: Any, placed: Params) -> None:
    """Frees the arrays of `params` whose memory `placed` does not share."""
    kept = {address for leaf in jax.tree.leaves(placed) for address in _addresses(leaf)}
    for leaf in map(_value, named(params).values()):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted() and kept.isdisjoint(_addresses(leaf)):
            leaf.delete()


def _addresses(array: Array) -> list[tuple[Any, int]]:
    return [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in array.addressable_shards]


def _check_leaf(name: str, leaf: Any, want: jax.ShapeDtypeStruct) -> None:
    value = _value(leaf)
    if isinstance(value, Tracer):
        raise ValueError(
            f"parameter {name} is traced: an engine takes parameters outside of jit, grad and the like; give it what "
            "the transformed function returns"
        )
    if not isinstance(value, jax.Array | np.ndarray):
        raise ValueError(f"parameter {name} is {a_type(value)}; pass a jax or numpy array")
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
