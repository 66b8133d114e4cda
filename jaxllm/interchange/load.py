"""Models with the parameters of a checkpoint, as modules that train."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.checkpoint.config import read_spec, resolve_dtype
from jaxllm.checkpoint.formats import Checkpoint, open_checkpoint
from jaxllm.checkpoint.loader import load_params
from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.orbax_model import OrbaxModel
from jaxllm.checkpoint.placement import canonical_params
from jaxllm.checkpoint.quantized.detect import scheme_of
from jaxllm.default_model import DEFAULT_MODEL
from jaxllm.engine.device.own_settings import with_own_settings
from jaxllm.from_vllm.dtypes import dtype_name
from jaxllm.hub.locate import locate
from jaxllm.models import transformer
from jaxllm.models.transformer import Params
from jaxllm.sharding.mesh import make_mesh, map_axes, platform_of


@with_own_settings
def load(
    path: str | os.PathLike[str] | None = None,
    dtype: Any = None,
    mesh: str | Mesh | None = None,
    *,
    axes: Mapping[str, Any] | None = None,
    revision: str | None = None,
    config: Any = None,
) -> transformer.Backbone:
    """The model in a directory in Hugging Face format, in a GGUF file or of the hub, or one whose parameters Orbax has
    saved, with its parameters on `mesh`.

    `path` and `revision` are as `LLM` takes them (None: the model in the package), and so are `mesh` (None: one device)
    and `axes`. Of a `jax.sharding.Mesh` the parameters have its own axes in their shardings, of its types. `dtype` is
    that of all parameters, by name or as an object; None is float32 on a CPU and bfloat16 elsewhere. The parameters
    have the shapes that `cfg` gives them on any mesh, and the module remembers as `source` where it comes from, for
    `save_hf`. Blocks of a GGUF file become numbers of `dtype`. A directory that Orbax has written takes a `config`, as
    `LLM` does: a Config, whose dtype None leaves as it is, a directory in Hugging Face format or its name on the hub,
    which is then the `source`, or the content of a `config.json`.

    Raises what `LLM` raises for models that can't be read, `MeshError`, and `ValueError` for an unknown dtype and for
    weights that are quantised, which don't train.
    """
    theirs = mesh if isinstance(mesh, Mesh) else None
    mesh = make_mesh(mesh) if axes is None else map_axes(mesh, axes)
    name = "auto" if dtype is None else dtype_name(dtype)
    if config is None:
        model, params, source = _read_checkpoint(path, revision, name, mesh)
    else:
        model, params, source = _read_orbax(path, revision, config, name, mesh)
    if theirs is not None:
        params = jax.tree.map(partial(_over, mesh=theirs, axes=axes or {}), params)
    loaded: Any = nnx.merge(nnx.graphdef(model), params)
    if source is not None:
        loaded.source = str(source.path.resolve() if source.path.is_dir() else source.path.absolute())
    return loaded


class _Read(NamedTuple):
    model: nnx.Module  # abstract
    params: Params
    source: Checkpoint | None  # what `save_hf` takes the other files from


def _read_checkpoint(path: str | os.PathLike[str] | None, revision: str | None, dtype: str, mesh: Mesh) -> _Read:
    wanted = resolve_dtype(dtype, platform_of(mesh))
    checkpoint = open_checkpoint(DEFAULT_MODEL if path is None else locate(path, revision=revision, tokenizer=False))
    spec = read_spec(checkpoint, wanted)
    _check_trains(checkpoint)
    model, on_mesh = (transformer.abstract(spec.module.Model, spec.cfg) for _ in range(2))
    expand_model(on_mesh, mesh)
    params = load_params(checkpoint, spec, nnx.state(on_mesh, nnx.Param), mesh)
    return _Read(model, canonical_params(params, mesh), checkpoint)


def _read_orbax(
    path: str | os.PathLike[str] | None, revision: str | None, config: Any, dtype: str, mesh: Mesh
) -> _Read:
    if isinstance(config, str | Path):
        config = locate(config, revision=revision, weights=False, tokenizer=False)
    elif revision is not None:
        raise ValueError(f"revision={revision!r} is of a model on the hub, and config is none; leave it out")
    saved = OrbaxModel.of(None if path is None else Path(path), config, dtype, platform_of(mesh))
    on_mesh = saved.abstract()
    expand_model(on_mesh, mesh)
    params = saved.restore(nnx.state(on_mesh, nnx.Param), mesh)
    return _Read(saved.abstract(), canonical_params(params, mesh), saved.described_by)


def _over(array: jax.Array, mesh: Mesh, axes: Mapping[str, Any]) -> jax.Array:
    """`array`, which is split over the engine's axes, as one that is split alike over those of `mesh`."""
    ours: Any = array.sharding
    theirs = [[one for own in _names(each) for one in _names(axes.get(own, own))] for each in ours.spec]
    spec = PartitionSpec(*(names[0] if len(names) == 1 else tuple(names) or None for names in theirs))
    sharding = NamedSharding(mesh, spec)
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def _names(given: Any) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def _check_trains(checkpoint: Checkpoint) -> None:
    scheme = scheme_of(checkpoint, checkpoint.config())
    if scheme is not None:
        raise ValueError(
            f"{checkpoint.path} has weights that {scheme.name} quantised, which LLM serves, but which do not train; "
            "load the model that they were made of"
        )
