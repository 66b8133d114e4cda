"""Makes a model with random parameters on the devices, from its configuration alone."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxllm.checkpoint.config import ModelSpec, read_config, resolve_dtype
from jaxllm.checkpoint.files import is_gguf
from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.placement import canonical, expansion_of, named, sharding_before
from jaxllm.engine.device.device_memory import measure
from jaxllm.engine.device.memory import leaf_bytes
from jaxllm.errors import OutOfMemoryError
from jaxllm.models import transformer
from jaxllm.models.quantized import WeightForm
from jaxllm.models.transformer import Params
from jaxllm.sharding.mesh import platform_of

STD = 0.02  # as models are usually initialised: activations stay finite in any dtype
_WIDTH = STD * math.sqrt(3)  # of a uniform distribution around 0, to each side


def dummy_model(path: Path, dtype: str, mesh: Mesh) -> tuple[Any, Params]:
    """Configuration and random parameters of the model at `path`, a `config.json`, its directory, or a GGUF file.

    `dtype` is a name or "auto". Each device makes its own shards only. Raises `ModelFormatError`,
    `MeshError`, `OutOfMemoryError`, or `ValueError` for a file of another name.
    """
    spec = read_config(config_folder(path), resolve_dtype(dtype, platform_of(mesh)))
    model = transformer.abstract(spec.module.Model, spec.cfg)
    expand_model(model, mesh)
    return spec.cfg, random_params(spec, nnx.state(model, nnx.Param), mesh)


def config_folder(path: Path) -> Path:
    """What `open_checkpoint` takes for `path`, which may be a `config.json`. ValueError for a file of another name."""
    if not path.is_file() or is_gguf(path):
        return path
    if path.name != "config.json":
        raise ValueError(f"{path} is not named config.json; give a config.json, or the directory that holds it")
    return path.parent


def random_params(spec: ModelSpec, abstract: Params, mesh: Mesh) -> Params:
    """Canonical parameters for `abstract`, split over `mesh`: matrices are uniform with standard deviation `STD`, and
    so are those that quantised ones stand for; vectors (such as scales of norms) have the constructor's values."""
    params = jax.tree.map(lambda leaf: leaf, abstract)
    variables = named(params)
    wanted = {name: canonical(variable) for name, variable in variables.items()}
    shardings = {name: sharding_before(variable, mesh) for name, variable in variables.items()}
    _check_fits(wanted, shardings, mesh)

    @jax.jit(out_shardings=shardings)
    def make() -> dict[str, jax.Array]:
        model = spec.module.Model(spec.cfg, rngs=nnx.Rngs(params=jax.random.key(0)))  # XLA drops its unused matrices
        own, found = named(nnx.state(model, nnx.Param)), {}
        for salt, (name, want) in enumerate(wanted.items()):
            path, _, leaf = name.rpartition(".")
            codes = variables.get(f"{path}.codes")
            if codes is not None and leaf != "bias":
                found[name] = _quantized(leaf, want, codes.get_metadata("form"), salt)
            elif len(want.shape) < 2:
                found[name] = own[name].get_value().astype(want.dtype)
            else:
                found[name] = (_uniform(want.shape, salt) * _WIDTH).astype(want.dtype)
        return found

    for name, array in make().items():
        variables[name].set_value(array)
        how = expansion_of(variables[name])
        if how is not None:
            variables[name].set_metadata(axes=how.canonical_axes(variables[name].axes))
            variables[name].del_metadata("expansion")
    return params


def _quantized(leaf: str, want: jax.ShapeDtypeStruct, form: WeightForm, salt: int) -> jax.Array:
    """The array `leaf` of a quantised weight: codes are spread over what the dtype has, and offsets centre them."""
    dtype = jnp.dtype(form.codes)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    most = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    least = 0.0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -most
    middle, half = (least + most) / 2, (most - least) / 2
    scale = _WIDTH / half
    if leaf == "order":
        return jnp.arange(want.shape[0], dtype=want.dtype)
    if leaf == "codes":
        values = _uniform(want.shape, salt) * half + middle
        return (jnp.round(values) if is_integer else values).astype(dtype)
    values = {"outer": scale, "scales": 1.0 if form.has_outer else scale, "offsets": -middle * scale}
    return jnp.full(want.shape, values[leaf], want.dtype)


def _uniform(shape: tuple[int, ...], salt: int) -> jax.Array:
    """float32 from -1 to 1: a hash of each element's index, in one pass, as `jax.random` needs several times a
    parameter's memory."""
    bits = jnp.full(shape, salt * 0x9E3779B9 % 2**32, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        bits += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
        stride *= shape[axis]
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # constants found by search for low bias
        bits = (bits ^ (bits >> shift)) * np.uint32(factor)
    bits ^= bits >> 16
    return (bits >> 8).astype(jnp.float32) * np.float32(2.0**-23) - 1.0


def _check_fits(values: Mapping[str, jax.ShapeDtypeStruct], shardings: Mapping[str, NamedSharding], mesh: Mesh) -> None:
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name]) for name, x in values.items()]
    device, need = measure(mesh), leaf_bytes(placed)
    if device is not None and need > device.limit:
        raise OutOfMemoryError(
            f"the parameters take {need / 1e9:.2f} GB on each device, which has {device.limit / 1e9:.2f} GB; use more "
            "devices (--mesh tensor=N) or a smaller dtype"
        )
