"""Makes a model with random parameters on the devices, from its configuration alone."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxllm.checkpoint.config import ModelSpec, read_config, resolve_dtype
from jaxllm.checkpoint.files import is_gguf
from jaxllm.checkpoint.loader import abstract_params
from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.placement import named, sharding_before
from jaxllm.engine.device.memory import device_memory, leaf_bytes
from jaxllm.engine.host_memory import machine_bytes
from jaxllm.errors import OutOfMemoryError
from jaxllm.models import transformer
from jaxllm.models.transformer import Params
from jaxllm.sharding.mesh import platform_of

STD = 0.02  # as models are usually initialised: activations stay finite in any dtype


def dummy_model(path: Path, dtype: str, mesh: Mesh) -> tuple[Any, Params]:
    """Configuration and random parameters of the model at `path`, a `config.json`, its directory, or a GGUF file.

    `dtype` is a name or "auto". Each device makes its own shards only. Raises `ModelFormatError`,
    `MeshError`, `OutOfMemoryError`, or `ValueError` for a file of another name.
    """
    if path.is_file() and not is_gguf(path):
        if path.name != "config.json":
            raise ValueError(f"{path} is not named config.json; give a config.json, or the directory that holds it")
        path = path.parent
    spec = read_config(path, resolve_dtype(dtype, platform_of(mesh)))
    return spec.cfg, random_params(spec, mesh)


def random_params(spec: ModelSpec, mesh: Mesh) -> Params:
    """Parameters split over `mesh`: matrices are uniform with standard deviation `STD`, vectors (such as scales of
    norms) have the constructor's values."""
    abstract = transformer.abstract(spec.module.Model, spec.cfg)
    expand_model(abstract, mesh)
    shardings = [sharding_before(variable, mesh) for variable in named(nnx.state(abstract, nnx.Param)).values()]
    variables, treedef = jax.tree.flatten(abstract_params(spec), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    _check_fits([variable.get_value() for variable in variables], shardings, mesh)

    @jax.jit(out_shardings=shardings)
    def make() -> list[jax.Array]:
        model = spec.module.Model(spec.cfg, rngs=nnx.Rngs(params=jax.random.key(0)))  # XLA drops its unused matrices
        values = jax.tree.leaves(nnx.state(model, nnx.Param))
        return [x if x.ndim < 2 else _uniform(x.shape, x.dtype, salt) for salt, x in enumerate(values)]

    arrays = make()
    return jax.tree.unflatten(treedef, [v.replace(array) for v, array in zip(variables, arrays, strict=True)])


def _uniform(shape: tuple[int, ...], dtype: Any, salt: int) -> jax.Array:
    """A hash of each element's index, in one pass: `jax.random` needs several times a parameter's memory."""
    bits = jnp.full(shape, salt * 0x9E3779B9 % 2**32, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        bits += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
        stride *= shape[axis]
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # constants found by search for low bias
        bits = (bits ^ (bits >> shift)) * np.uint32(factor)
    bits ^= bits >> 16
    minus_one_to_one = (bits >> 8).astype(jnp.float32) * np.float32(2.0**-23) - 1.0
    return (minus_one_to_one * (STD * math.sqrt(3))).astype(dtype)


def _check_fits(values: list[jax.ShapeDtypeStruct], shardings: list[NamedSharding], mesh: Mesh) -> None:
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(values, shardings, strict=True)]
    device = device_memory(mesh)
    need, have = leaf_bytes(placed), machine_bytes() // mesh.size if device is None else device.limit
    if need > have:
        raise OutOfMemoryError(
            f"the parameters take {need / 1e9:.2f} GB on each device, which has {have / 1e9:.2f} GB; use more devices "
            "(--mesh tensor=N) or a smaller dtype"
        )
