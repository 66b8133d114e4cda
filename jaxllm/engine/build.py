"""Builds an engine from a user's model: a directory, a Flax module or a parameter pytree."""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxllm.argument_checks import check_int
from jaxllm.checkpoint.loader import staging_bytes
from jaxllm.checkpoint.placement import check_mesh
from jaxllm.engine import recording
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device import device_memory, memory
from jaxllm.engine.device.command_log import Header
from jaxllm.engine.device.executor import Executor
from jaxllm.engine.device.memory_plan import plan_engine
from jaxllm.engine.device.model_shape import ModelShape, model_shape, with_config
from jaxllm.engine.device.own_settings import with_own_settings
from jaxllm.engine.device.runner import CommandExecutor, Runner
from jaxllm.engine.engine import Engine
from jaxllm.engine.host_memory import give_back
from jaxllm.engine.kv_cache import fixed_scales, scale_command, with_scales
from jaxllm.engine.model_source import ModelSource, Reading, model_source
from jaxllm.engine.pooling import Pooler
from jaxllm.engine.sizing import size_engine, wanted_config
from jaxllm.models.transformer import Params
from jaxllm.pallas_kernels import native
from jaxllm.sharding.mesh import all_devices, make_mesh, platform_of


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


@with_own_settings
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
    kv_cache_bytes: int | None = None,
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
    logprobs_mode: str = "raw",
    batch_invariant: bool = False,
    model_config: Any = None,
    group: HostGroup | None = None,
) -> Engine:
    """An engine with its parameters loaded, its executables still compiling. See `LLM` for the arguments; `group` are
    the hosts that it leads."""
    mesh = choose_mesh(mesh, tensor_parallel_size, spreads=group is not None)
    # Where bits are to be those of other batches, replays or hosts, weights are dense and float32 if nothing is said.
    suits = not batch_invariant and record is None and group is None
    reading = Reading(
        *(load_format, hf_overrides, skip_tokenizer_init, task, quantization, model_config),
        rounds_rows=suits and load_format != "dummy",
        suits_processor=suits and mesh.size == 1,  # XLA's own products serve where a mesh divides them
    )
    if record is not None and (load_format == "dummy" or hf_overrides or task or quantization or model_config):
        raise ValueError(
            "record notes neither load_format='dummy' nor hf_overrides, task, quantization or config; write a "
            "checkpoint that is so"
        )
    source, state, shape = open_model(model, dtype, tokenizer, reading, mesh)
    pooler = Pooler.of(source.cfg, source.pooling)
    wanted = wanted_config(
        *(source, shape, mesh),
        own_len=source.cfg.max_len if shape.generates else pooler.config.max_length,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        gpu_memory_utilization=gpu_memory_utilization,
        preemption=preemption,
        swap_space=swap_space,
        kv_cache_dtype=kv_cache_dtype,
        calculate_kv_scales=calculate_kv_scales,
        seed=seed,
        max_logprobs=max_logprobs,
        logprobs_mode=logprobs_mode,
        batch_invariant=batch_invariant,
    )
    if kv_cache_bytes is not None:
        num_blocks = memory.blocks_in(shape, wanted, mesh, kv_cache_bytes, num_blocks)
    scales = fixed_scales(source, shape, wanted)
    loading = staging_bytes(state) if callable(source.params) else None
    config, claim = _fit(
        *(shape, with_scales(wanted, scales), mesh, num_blocks, group),
        explicit_len=max_model_len is not None,
        loading=loading,
    )
    shape = with_config(shape, source.model, config)
    executor: CommandExecutor = Executor(  # compiles while the parameters load
        *(shape, config, mesh),
        compilation_cache=compilation_cache,
        claim=claim,
        starts_quickly=suits and mesh.size == 1 and native.is_built(),  # XLA's own loops need to be optimised
    )
    try:
        if group is not None:
            executor = group.lead(executor, recording.header_of(source, config, mesh, executor.abstract_params))
        if record is not None:
            executor = recording.record(executor, source, config, record)
        runner = Runner(executor, config, shape.vocab, scale_command(source, config, scales))
        runner.set_params(state if loading is None else source.place(state, mesh), source.name)
        give_back()  # what loading took
    except BaseException as error:
        if group is not None:
            group.fail(error)
        executor.close()
        raise
    known = {"tokenizer": source.tokenizer, "pooler": pooler, "definition": source.definition}
    return Engine(runner, vocab=source.cfg.vocab, eos_ids=source.eos_ids, **known)


def _fit(
    shape: ModelShape,
    wanted: EngineConfig,
    mesh: Mesh,
    num_blocks: int | None,
    group: HostGroup | None,
    *,
    explicit_len: bool,
    loading: int | None,
) -> tuple[EngineConfig, device_memory.Claim]:
    """`wanted` in the size that fits on every member's devices, and what it takes there, claimed before it is taken.
    `loading`: bytes of the host while parameters load; None for those that the caller has brought."""
    has_params, processes_here = loading is None, 1 if group is None else group.processes_here
    with device_memory.sizing():
        device = device_memory.measure(mesh, processes_here=processes_here)
        if group is not None:
            device = group.least_memory(device)
        if num_blocks is not None:
            memory.check_num_blocks(shape, wanted, num_blocks, mesh, device, has_params=has_params)
        config = size_engine(shape, wanted, mesh, num_blocks, device, explicit_len=explicit_len, has_params=has_params)
        claim = plan_engine(
            *(shape, config, mesh, device), loading=loading or 0, has_params=has_params, processes_here=processes_here
        )
    return config, claim


def open_model(
    model: Any, dtype: str, tokenizer: Any, reading: Reading, mesh: Mesh
) -> tuple[ModelSource, Params, ModelShape]:
    """Where the model comes from, its parameters, and its shape. The parameters are on the mesh if the caller has
    brought them; else they are shapes, and `ModelSource.place` loads them."""
    source = model_source(model, dtype, platform_of(mesh), tokenizer, reading)
    source.expand(mesh)
    source = source.in_panels(mesh)
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
