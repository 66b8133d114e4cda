"""Models with the parameters of a checkpoint, as modules that train."""

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.checkpoint.config import read_spec, resolve_dtype
from jaxllm.checkpoint.formats import Checkpoint, open_checkpoint
from jaxllm.checkpoint.loader import load_params
from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.placement import canonical_params
from jaxllm.checkpoint.quantized.detect import scheme_of
from jaxllm.default_model import DEFAULT_MODEL
from jaxllm.engine.device.own_settings import with_own_settings
from jaxllm.from_vllm.dtypes import dtype_name
from jaxllm.hub.locate import locate
from jaxllm.models import transformer
from jaxllm.sharding.mesh import make_mesh, map_axes, platform_of


@with_own_settings
def load(
    path: str | os.PathLike[str] | None = None,
    dtype: Any = None,
    mesh: str | Mesh | None = None,
    *,
    axes: Mapping[str, Any] | None = None,
    revision: str | None = None,
) -> transformer.Backbone:
    """The model in a directory in Hugging Face format, in a GGUF file or of the hub, with its parameters on `mesh`.

    `path` and `revision` are as `LLM` takes them (None: the model in the package), and so are `mesh` (None: one device)
    and `axes`. Of a `jax.sharding.Mesh` the parameters have its own axes in their shardings, of its types. `dtype` is
    that of all parameters, by name or as an object; None is float32 on a CPU and bfloat16 elsewhere. The parameters
    have the shapes that `cfg` gives them on any mesh, and the module remembers as `source` where it comes from, for
    `save_hf`. Blocks of a GGUF file become numbers of `dtype`.

    Raises what `LLM` raises for models that can't be read, `MeshError`, and `ValueError` for an unknown dtype and for
    weights that are quantised, which don't train.
    """
    theirs = mesh if isinstance(mesh, Mesh) else None
    mesh = make_mesh(mesh) if axes is None else map_axes(mesh, axes)
    wanted = resolve_dtype("auto" if dtype is None else dtype_name(dtype), platform_of(mesh))
    checkpoint = open_checkpoint(DEFAULT_MODEL if path is None else locate(path, revision=revision, tokenizer=False))
    spec = read_spec(checkpoint, wanted)
    _check_trains(checkpoint)
    model, on_mesh = (transformer.abstract(spec.module.Model, spec.cfg) for _ in range(2))
    expand_model(on_mesh, mesh)
    params = canonical_params(load_params(checkpoint, spec, nnx.state(on_mesh, nnx.Param), mesh), mesh)
    if theirs is not None:
        params = jax.tree.map(partial(_over, mesh=theirs, axes=axes or {}), params)
    loaded: Any = nnx.merge(nnx.graphdef(model), params)
    loaded.source = str(checkpoint.path.resolve() if checkpoint.path.is_dir() else checkpoint.path.absolute())
    return loaded


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
