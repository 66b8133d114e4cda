"""Models whose parameters Orbax has saved. Such a directory says nothing of its model: the caller does."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx
from jax.sharding import Mesh

from jaxllm.argument_checks import a_type
from jaxllm.checkpoint.config import read_spec, resolve_dtype
from jaxllm.checkpoint.formats import Checkpoint, GivenConfig, open_checkpoint
from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.orbax_files import is_orbax
from jaxllm.checkpoint.orbax_tree import restore_params
from jaxllm.models import registry, transformer
from jaxllm.models.transformer import Params


class OrbaxModel(NamedTuple):
    """The parameters in a directory, and what is known of their model."""

    path: Path
    cfg: Any
    eos_ids: tuple[int, ...] | None = None  # None: the configuration does not say
    described_by: Checkpoint | None = None  # a directory that has the configuration

    @classmethod
    def of(cls, model: Any, config: Any, dtype: str, platform: str) -> "OrbaxModel":
        """`config` is a Config of `jaxllm.models`, a directory in Hugging Face format, or the content of a
        `config.json`; `dtype` is as in `resolve_dtype`, but "auto" leaves a Config its own. `ValueError` or `TypeError`
        for what is neither."""
        if not (isinstance(model, str | Path) and is_orbax(Path(model))):
            raise ValueError(
                f"config= is for a directory that Orbax has written, which {model!s:.200} is not; leave it out, or "
                "give a pair (configuration, parameter pytree) as the model"
            )
        path = Path(model)
        if isinstance(config, dict | str | Path):
            described = GivenConfig(config) if isinstance(config, dict) else open_checkpoint(config)
            spec = read_spec(described, resolve_dtype(dtype, platform))
            return cls(path, spec.cfg, spec.eos_token_ids, None if isinstance(config, dict) else described)
        if not dataclasses.is_dataclass(config) or isinstance(config, type):
            raise TypeError(
                f"config is {a_type(config)}; give a Config of jaxllm.models, a directory in Hugging Face format, or "
                "what its config.json holds as a dict"
            )
        if dtype == "auto":
            return cls(path, config)
        return cls(path, dataclasses.replace(config, dtype=resolve_dtype(dtype, platform)))

    def abstract(self) -> Any:
        """The model without arrays."""
        return transformer.abstract(registry.model_for(self.cfg), self.cfg)

    def restore(self, params: Params, mesh: Mesh) -> Params:
        """Its parameters on `mesh`, in the state that the abstract `params` describe; see `restore_params`."""
        dense = self.abstract()
        expand_model(dense, mesh)
        return restore_params(self.path, nnx.state(dense, nnx.Param), params, mesh)
