"""Builds an engine from a user's model: a directory, a Flax module or a parameter pytree."""

import dataclasses
import logging
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxllm.argument_checks import check_int
from jaxllm.checkpoint.loader import staging_bytes
from jaxllm.checkpoint.placement import check_mesh
from jaxllm.engine import recording
from jaxllm.engine.config import BLOCK_SIZE, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, EngineConfig
from jaxllm.engine.device import device_memory, memory
from jaxllm.engine.device.command_log import Header
from jaxllm.engine.device.executables import ModelShape
from jaxllm.engine.device.executor import Executor
from jaxllm.engine.device.memory_plan import plan_engine
from jaxllm.engine.device.packing import min_bucket
from jaxllm.engine.device.runner import CommandExecutor, Runner
from jaxllm.engine.engine import Engine
from jaxllm.engine.host_memory import machine_bytes
from jaxllm.engine.kv_cache import check_kv_dtype, check_platform, fixed_scales, scale_command, with_scales
from jaxllm.engine.model_interface import cache_specs
from jaxllm.engine.model_source import ModelSource, Reading, model_source
from jaxllm.engine.pooling import Pooler, task_of
from jaxllm.errors import OutOfMemoryError
from jaxllm.models import transformer
from jaxllm.models.moe import Experts
from jaxllm.models.transformer import Params
from jaxllm.sampling_checks import MAX_LOGPROBS
from jaxllm.sharding.expand import padded, repeated
from jaxllm.sharding.mesh import all_devices, make_mesh, platform_of
from jaxllm.sharding.rules import num_shards, sharding

log = logging.getLogger(__name__)

CPU_SIZES = {"max_num_seqs": 64, "max_num_batched_tokens": 512}  # smaller defaults than elsewhere


@runtime_checkable
class HostGroup(Protocol):
    """Hosts that an engine leads: see `jaxllm.cluster.leader`."""

    @property
    def processes_here(self) -> int:
        """How many of them are on this machine."""
        ...

    def least_memory(self, own: device_memory.DeviceMemory | None) -> device_memory.DeviceMemory | None: ...
    def lead(self, executor: CommandExecutor, header: Header) -> CommandExecutor: ...
    def fail(self, error: BaseException) -> None: ...


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
    kv_cache_dtype: str = "auto",
    calculate_kv_scales: bool = False,
    seed: int = 0,
    record: str | Path | None = None,
    compilation_cache: bool | str | Path | None = None,
    skip_tokenizer_init: bool = False,
    load_format: str = "auto",
    quantization: str | None = None,
    hf_overrides: dict[str, Any] | None = None,
    task: str | None = None,
    max_logprobs: int | None = None,
    group: HostGroup | None = None,
) -> Engine:
    """An engine with its parameters loaded, its executables still compiling. See `LLM` for the arguments; `group` are
    the hosts that it leads."""
    mesh = choose_mesh(mesh, tensor_parallel_size, spreads=group is not None)
    platform = platform_of(mesh)
    reading = Reading(load_format, hf_overrides, skip_tokenizer_init, task, quantization)
    if record is not None and (load_format == "dummy" or hf_overrides or task or quantization):
        raise ValueError(
            "record notes neither load_format='dummy' nor hf_overrides, task or quantization; write a checkpoint that "
            "is so"
        )
    source, state, shape = open_model(model, dtype, tokenizer, reading, mesh)
    has_params = not callable(source.params)
    sizes = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
    sizes |= CPU_SIZES if platform == "cpu" else {}
    max_num_seqs = _default(max_num_seqs, sizes["max_num_seqs"])
    pooler, whole_prompts = Pooler.of(source.cfg, source.pooling), not getattr(source.cfg, "causal", True)
    own_len = source.cfg.max_len if shape.generates else pooler.config.max_length
    max_len = _default(max_model_len, own_len)
    least_tokens = max(max_num_seqs, sizes["max_num_batched_tokens"], max_len if whole_prompts else 0)
    wanted = EngineConfig(
        max_model_len=max_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_default(max_num_batched_tokens, least_tokens),
        block_size=_default(block_size, BLOCK_SIZE),
        num_blocks=2**30,  # resolved below
        enable_prefix_caching=enable_prefix_caching and not whole_prompts,
        gpu_memory_utilization=gpu_memory_utilization,
        preemption=preemption,
        swap_space=swap_space,
        kv_cache_dtype=check_kv_dtype(kv_cache_dtype, shape.dtype),
        measures_kv_scales=calculate_kv_scales,
        seed=seed,
        max_logprobs=_default(max_logprobs, MAX_LOGPROBS),
        generates=shape.generates,
        whole_prompts=whole_prompts,
    )
    _check_len(wanted.max_model_len, source.cfg)
    _check_swap_space(swap_space)
    check_platform(shape, wanted, mesh, source.cfg.heads)
    scales = fixed_scales(source, shape, wanted)
    wanted = with_scales(wanted, scales)
    if platform == "cpu" and gpu_memory_utilization is not None:
        log.warning(
            "gpu_memory_utilization=%g is for accelerators: on a CPU the KV pool takes %.3g %% of the machine's memory "
            "at most, unless num_blocks gives its size",
            *(gpu_memory_utilization, 100 * memory.CPU_KV_SHARE),
        )
    explicit_len, staged = max_model_len is not None, 0 if has_params else staging_bytes(state)
    with device_memory.sizing():
        processes_here = 1 if group is None else group.processes_here
        device = device_memory.measure(mesh, processes_here=processes_here)
        if group is not None:
            device = group.least_memory(device)
        if num_blocks is not None:
            memory.check_num_blocks(shape, wanted, num_blocks, mesh, device, has_params=has_params)
        config = size_engine(shape, wanted, mesh, num_blocks, device, explicit_len=explicit_len, has_params=has_params)
        claim = plan_engine(
            shape, config, mesh, device, loading=staged, has_params=has_params, processes_here=processes_here
        )
    shape = with_max_len(shape, source.model, config.max_model_len)
    executor: CommandExecutor = Executor(  # compiles while the parameters load
        shape, config, mesh, compilation_cache=compilation_cache, claim=claim
    )
    try:
        if group is not None:
            executor = group.lead(executor, recording.header_of(source, config, mesh, executor.abstract_params))
        if record is not None:
            executor = recording.record(executor, source, config, record)
        runner = Runner(executor, config, shape.vocab, scale_command(source, config, scales))
        runner.set_params(state if has_params else source.place(state, mesh), source.name)
    except BaseException as error:
        if group is not None:
            group.fail(error)
        executor.close()
        raise
    return Engine(runner, vocab=source.cfg.vocab, eos_ids=source.eos_ids, tokenizer=source.tokenizer, pooler=pooler)


def open_model(
    model: Any, dtype: str, tokenizer: Any, reading: Reading, mesh: Mesh
) -> tuple[ModelSource, Params, ModelShape]:
    """Where the model comes from, its parameters, and its shape. The parameters are on the mesh if the caller has
    brought them; else they are shapes, and `ModelSource.place` loads them."""
    source = model_source(model, dtype, platform_of(mesh), tokenizer, reading)
    source.expand(mesh)
    graph, state = nnx.split(source.model)
    check_mesh(state, mesh)
    if not callable(source.params):
        state = jax.block_until_ready(source.place(state, mesh))  # what is free on the device is measured next
    return source, state, model_shape(source.cfg, graph, state, mesh)


def choose_mesh(mesh: str | Mesh | None, tensor_parallel_size: int | None, *, spreads: bool = False) -> Mesh:
    """As `LLM` takes them; without either one device, or all if it `spreads`."""
    if tensor_parallel_size is None:
        return make_mesh(f"tensor={len(all_devices())}" if spreads and mesh is None else mesh)
    if mesh is not None:
        raise ValueError(f"mesh and tensor_parallel_size={tensor_parallel_size} exclude each other; give one")
    check_int("tensor_parallel_size", tensor_parallel_size, 1, 2**16)
    return make_mesh(f"tensor={tensor_parallel_size}", f"tensor_parallel_size={tensor_parallel_size}")


def _default(value: int | None, default: int) -> int:
    return default if value is None else value


def model_shape(cfg: Any, graph: nnx.GraphDef, state: Params, mesh: Mesh) -> ModelShape:
    """The shape of a model on `mesh`; `state` holds its parameters, or their shapes."""

    def place(variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_value()
        where = sharding(variable.get_metadata("axes"), mesh)
        placed = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=where)
        return variable.replace(placed)

    state = jax.tree.map(place, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    leaves, treedef = jax.tree.flatten(state)
    kv_heads = repeated(cfg.kv_heads, mesh)
    group = -(-cfg.heads // kv_heads)  # query heads of each
    mixtures = [spec for spec in _feed_forwards(cfg) if isinstance(spec, Experts)]
    top_k = max((spec.routing.top_k for spec in mixtures), default=0)
    mlp = max((spec.mlp for spec in mixtures), default=0)
    return ModelShape(
        graph=graph,
        treedef=treedef,
        leaves=tuple(leaves),
        caches=cache_specs(nnx.merge(graph, state), cfg, mesh),
        vocab=cfg.vocab,
        logits_width=padded(cfg.vocab, mesh),
        dtype=cfg.dtype,
        token_widths=(cfg.embed, 2 * cfg.mlp, (group + 2) * kv_heads * cfg.head_dim, 2 * top_k * mlp),
        routed_width=top_k * cfg.embed,
        generates=task_of(cfg) == "generate",
        has_head=task_of(cfg) == "classify",
    )


def _feed_forwards(cfg: Any) -> list[Any]:
    """Of the layers, where a caller's own configuration says them."""
    return [getattr(spec, "feed_forward", None) for spec in getattr(cfg, "layers", ())]


def _check_len(max_model_len: int, cfg: Any) -> None:
    if max_model_len > cfg.max_len:
        reason = getattr(cfg, "LIMIT", transformer.Config.LIMIT)
        raise ValueError(
            f"max_model_len={max_model_len} is more than the {cfg.max_len} tokens that the model was made for "
            f"({reason}); give at most {cfg.max_len}. Rope scaling in config.json is the way to more, where the model "
            "has rotary embeddings"
        )


def _check_swap_space(swap_space: float | None) -> None:
    have = machine_bytes() / 2**30
    if swap_space is not None and swap_space > have:
        raise ValueError(
            f"swap_space={swap_space:g} GiB is more than the machine's memory, {have:.1f} GiB, of which it is taken; "
            "give less, or leave it out for 4 GiB at most"
        )


def size_engine(
    shape: ModelShape,
    wanted: EngineConfig,
    mesh: Mesh,
    num_blocks: int | None,
    device: device_memory.DeviceMemory | None,
    *,
    explicit_len: bool,
    has_params: bool = False,
) -> EngineConfig:
    """`wanted` with the number of blocks that fit, and a context no longer than they hold unless it was asked for.

    `device` is what each device of the mesh has (None: not known); members of a group give the same, as the number of
    blocks is part of every executable (see `device_memory.least`). `has_params`: the parameters lie there already.
    """
    block_size, max_model_len = wanted.block_size, wanted.max_model_len
    wanted = dataclasses.replace(
        wanted, min_bucket=min_bucket(platform_of(mesh)), num_shards=num_shards("shards", mesh)
    )
    wanted = dataclasses.replace(wanted, groups=shape.cache_layout(wanted, mesh).groups)
    if num_blocks is None:
        budget = memory.kv_budget(shape, wanted, mesh, device, has_params=has_params)
        blocks = memory.countable(shape, wanted, memory.num_blocks(shape, wanted, budget, mesh), mesh)
    else:
        memory.check_arrays(shape, wanted, num_blocks, mesh)
        blocks = num_blocks
    room = dataclasses.replace(wanted, num_blocks=blocks, max_model_len=2).longest_len() if blocks > 0 else 0
    if 0 < room < max_model_len:
        block_bytes = memory.block_bytes(shape, wanted, mesh)
        if explicit_len and num_blocks is None:
            missing = memory.blocks_of_one(wanted) * block_bytes - budget
            raise OutOfMemoryError(
                f"max_model_len={max_model_len} tokens need {missing / 1e9:.3g} GB more for the KV pool on each "
                f"device: what is free holds {room} tokens; lower max_model_len, or use more devices or a smaller dtype"
            )
        if not explicit_len:
            log.warning(
                "max_model_len is %d tokens, not the model's %d: the KV pool has %d blocks of %d tokens, %.3g GB",
                *(room, max_model_len, blocks, block_size, blocks * block_bytes / 1e9),
            )
            max_model_len = room
            shorter = dataclasses.replace(wanted, max_model_len=room)  # some windows may be longer than that
            wanted = dataclasses.replace(shorter, groups=shape.cache_layout(shorter, mesh).groups)
    return dataclasses.replace(wanted, num_blocks=blocks, max_model_len=max_model_len)


def with_max_len(shape: ModelShape, model: Any, max_len: int) -> ModelShape:
    """`shape` with the graph of `model` for a context of `max_len` tokens, which some ropes depend on."""
    model.cfg = dataclasses.replace(model.cfg, max_len=max_len)
    return dataclasses.replace(shape, graph=nnx.graphdef(model))
