"""What a recording says of the engine that it is of."""

import hashlib
import json
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jaxllm
from jaxllm.checkpoint.placement import canonical, named
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.command_log import Header
from jaxllm.engine.device.recorder import Recorder, create
from jaxllm.engine.device.runner import CommandExecutor
from jaxllm.engine.model_source import ModelSource
from jaxllm.models.transformer import Params
from jaxllm.sharding.mesh import platform_of


def record(executor: CommandExecutor, source: ModelSource, config: EngineConfig, path: str | Path) -> CommandExecutor:
    """`executor`, whose commands go to a new file. ValueError if there is one already."""
    header = header_of(source, config, executor.mesh, executor.abstract_params)
    return cast(CommandExecutor, Recorder(executor, create(path), header))  # with all that the executor has


def header_of(source: ModelSource, config: EngineConfig, mesh: Mesh, params: Params) -> Header:
    """The header for an executor of these sizes; `params` may be shapes."""
    return Header(
        jaxllm=jaxllm.__version__,
        jax=jax.__version__,
        platform=platform_of(mesh),
        model=source.name,
        config_digest="" if source.checkpoint is None else _digest(source.checkpoint.config_bytes()),
        params_digest=params_digest(params),
        dtype=str(jnp.dtype(source.cfg.dtype)),
        mesh=",".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
        config=config,
    )


def params_digest(params: Params) -> str:
    """Of the parameters' names, canonical shapes and dtypes."""
    shapes = {name: canonical(variable) for name, variable in named(params).items()}
    described = [[name, list(shape.shape), str(shape.dtype)] for name, shape in shapes.items()]
    return _digest(json.dumps(described).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
