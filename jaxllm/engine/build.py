"""From what a user has (a directory, a Flax module, a parameter pytree) to an engine."""

import dataclasses
import logging
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxllm.checkpoint.config import read_config, resolve_dtype
from jaxllm.checkpoint.loader import load_params
from jaxllm.checkpoint.placement import check_mesh, place_params
from jaxllm.default_model import DEFAULT_MODEL
from jaxllm.engine.config import BLOCK_SIZE, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, EngineConfig
from jaxllm.engine.device import memory
from jaxllm.engine.device.executables import ModelShape
from jaxllm.engine.device.runner import Runner
from jaxllm.engine.engine import Engine
from jaxllm.errors import OutOfMemoryError
from jaxllm.models import registry, transformer
from jaxllm.models.transformer import Params
from jaxllm.sharding.mesh import make_mesh
from jaxllm.sharding.rules import sharding
from jaxllm.text.tokenizer import Tokenizer, wrap

log = logging.getLogger(__name__)

CPU_SIZES = {"max_num_seqs": 64, "max_num_batched_tokens": 512}  # smaller defaults than elsewhere


class ModelSource(NamedTuple):
    """A model to serve, before anything of it is on the mesh."""

    cfg: Any
    model: nnx.Module  # of ShapeDtypeStructs
    params: Any  # the caller's pytree, or a function (abstract params, mesh) -> Params that loads them
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer | None


def build_engine(
    model: Any = None,
    *,
    tokenizer: Any = None,
    dtype: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    block_size: int | None = None,
    num_blocks: int | None = None,
    enable_prefix_caching: bool = True,
    mesh: str | Mesh | None = None,
    tensor_parallel_size: int | None = None,
    gpu_memory_utilization: float | None = None,
    preemption: str = "auto",
    swap_space: float | None = None,
    seed: int = 0,
) -> Engine:
    """An engine with its parameters loaded, its executables still compiling. See `LLM` for the arguments."""
    if tensor_parallel_size is not None:
        if mesh is not None:
            raise ValueError(f"mesh and tensor_parallel_size={tensor_parallel_size} exclude each other; give one")
        mesh = f"tensor={tensor_parallel_size}"
    mesh = make_mesh(mesh)
    platform = mesh.devices.flat[0].platform
    source = _source(model, dtype, platform, tokenizer)
    graph, state = nnx.split(source.model)
    check_mesh(state, mesh)
    if not callable(source.params):
        state = place_params(source.params, state, mesh)
    shape = model_shape(source.cfg, graph, state, mesh)
    sizes = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
    sizes |= CPU_SIZES if platform == "cpu" else {}
    max_num_seqs = _default(max_num_seqs, sizes["max_num_seqs"])
    wanted = EngineConfig(
        max_model_len=_default(max_model_len, source.cfg.max_len),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_default(max_num_batched_tokens, max(max_num_seqs, sizes["max_num_batched_tokens"])),
        block_size=_default(block_size, BLOCK_SIZE),
        num_blocks=2**30,  # resolved below
        enable_prefix_caching=enable_prefix_caching,
        gpu_memory_utilization=gpu_memory_utilization,
        preemption=preemption,
        swap_space=swap_space,
        seed=seed,
    )
    _check_len(wanted.max_model_len, source.cfg.max_len)
    config = _sized(wanted, shape, mesh, num_blocks, explicit_len=max_model_len is not None)
    source.model.cfg = dataclasses.replace(source.cfg, max_len=config.max_model_len)  # longrope depends on it
    shape = dataclasses.replace(shape, graph=nnx.graphdef(source.model))
    runner = Runner(shape, config, mesh)  # compiles while the parameters load
    try:
        runner.set_params(source.params(state, mesh) if callable(source.params) else state)
    except BaseException:
        runner.close()
        raise
    return Engine(runner, vocab=source.cfg.vocab, eos_ids=source.eos_ids, tokenizer=source.tokenizer)


def _default(value: int | None, default: int) -> int:
    return default if value is None else value


def _source(model: Any, dtype: str, platform: str, tokenizer: Any) -> ModelSource:
    tokenizer = None if tokenizer is None else wrap(tokenizer)
    if model is None or isinstance(model, str | Path):
        directory = DEFAULT_MODEL if model is None else Path(model)
        spec = read_config(directory, resolve_dtype(dtype, platform))
        abstract = transformer.abstract(spec.module.Model, spec.cfg)
        tokenizer = tokenizer or Tokenizer.from_dir(directory)
        return ModelSource(spec.cfg, abstract, partial(load_params, directory, spec), spec.eos_token_ids, tokenizer)
    if dtype != "auto":
        raise ValueError(f"dtype={dtype!r} is for checkpoints; arrays keep theirs, so leave it 'auto'")
    cfg, params = _module_or_params(model)
    cfg = dataclasses.replace(cfg, dtype=jax.tree.leaves(params)[0].dtype)
    abstract = transformer.abstract(registry.model_for(cfg), cfg)
    eos_ids = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return ModelSource(cfg, abstract, params, eos_ids, tokenizer)


def _module_or_params(model: Any) -> tuple[Any, Any]:
    if isinstance(model, nnx.Module):
        return model.cfg, nnx.state(model, nnx.Param)
    if isinstance(model, tuple) and len(model) == 2 and dataclasses.is_dataclass(model[0]):
        return model
    raise TypeError(
        f"model is a {type(model).__qualname__}; give a directory in Hugging Face format, a Flax module of "
        "jaxllm.models, or a pair (configuration, parameter pytree)"
    )


def model_shape(cfg: Any, graph: nnx.GraphDef, state: Params, mesh: Mesh) -> ModelShape:
    """`state` holds the parameters, or their shapes."""
    platform = mesh.devices.flat[0].platform if mesh.size == 1 else None  # which kernels may multiply them

    def place(variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_value()
        where = sharding(variable.get_metadata("axes"), mesh)
        placed = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=where)
        return variable.replace(placed, platform=platform)

    state = jax.tree.map(place, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    leaves, treedef = jax.tree.flatten(state)
    return ModelShape(
        graph=graph,
        treedef=treedef,
        leaves=tuple(leaves),
        num_layers=cfg.num_layers,
        kv_heads=cfg.kv_heads,
        head_dim=cfg.head_dim,
        vocab=cfg.vocab,
        dtype=cfg.dtype,
        token_widths=(cfg.embed, 2 * cfg.mlp, (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim),
    )


def _check_len(max_model_len: int, limit: int) -> None:
    if max_model_len > limit:
        raise ValueError(
            f"max_model_len={max_model_len} is more than the {limit} tokens that the model was made for "
            f"(max_position_embeddings and rope scaling of its config.json); give at most {limit}. Rope scaling in "
            "config.json is the way to more, where the model has rotary embeddings"
        )


def _sized(
    wanted: EngineConfig, shape: ModelShape, mesh: Mesh, num_blocks: int | None, *, explicit_len: bool
) -> EngineConfig:
    """`wanted` with the number of blocks that fit, and a context no longer than they hold unless it was asked for."""
    blocks = memory.num_blocks(shape, wanted, mesh) if num_blocks is None else num_blocks
    room = blocks * wanted.block_size
    max_model_len = wanted.max_model_len
    if 0 < room < max_model_len:
        if explicit_len and num_blocks is None:
            missing = (max_model_len - room) / wanted.block_size * memory.block_bytes(shape, wanted.block_size, mesh)
            raise OutOfMemoryError(
                f"max_model_len={max_model_len} tokens need {missing / 1e9:.2f} GB more for the KV pool on each "
                f"device, which holds {room} tokens; lower max_model_len, or use more devices or a smaller dtype"
            )
        if not explicit_len:
            log.info("max_model_len is %d of the model's %d tokens: what the KV pool holds", room, max_model_len)
            max_model_len = room
    return dataclasses.replace(wanted, num_blocks=blocks, max_model_len=max_model_len)
