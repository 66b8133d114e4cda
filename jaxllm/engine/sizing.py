"""How large an engine is: what its arguments ask for, and what fits on the devices."""

import dataclasses
import logging
from typing import Any

from jax.sharding import Mesh

from jaxllm.argument_checks import check_int
from jaxllm.engine.batch_invariance import check_arithmetic, check_batch_invariant
from jaxllm.engine.config import BLOCK_SIZE, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, EngineConfig
from jaxllm.engine.device import device_memory, memory
from jaxllm.engine.device.model_shape import ModelShape
from jaxllm.engine.device.packing import min_bucket
from jaxllm.engine.free_padding import has_free_padding
from jaxllm.engine.host_memory import machine_bytes
from jaxllm.engine.kv_cache import check_kv_dtype, check_platform
from jaxllm.engine.model_source import ModelSource
from jaxllm.errors import OutOfMemoryError
from jaxllm.models import transformer
from jaxllm.sampling_checks import LOGPROBS_MODES, MAX_LOGPROBS, LogprobsMode
from jaxllm.sharding.mesh import platform_of
from jaxllm.sharding.rules import num_shards

log = logging.getLogger(__name__)

CPU_SIZES = {"max_num_seqs": 64, "max_num_batched_tokens": 512}  # smaller defaults than elsewhere


def wanted_config(
    source: ModelSource,
    shape: ModelShape,
    mesh: Mesh,
    *,
    own_len: int,
    max_model_len: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    block_size: int | None,
    enable_prefix_caching: bool,
    gpu_memory_utilization: float | None,
    preemption: str,
    swap_space: float | None,
    kv_cache_dtype: str,
    calculate_kv_scales: bool,
    seed: int,
    max_logprobs: int | None,
    logprobs_mode: str,
    batch_invariant: bool,
) -> EngineConfig:
    """What `LLM`'s arguments ask for, with defaults for those that are None, and more blocks than there can be;
    `own_len` is the model's own context. Raises `ValueError` for what the model, mesh or machine can't have."""
    platform = platform_of(mesh)
    sizes = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
    sizes |= CPU_SIZES if platform == "cpu" else {}
    max_num_seqs, max_len = _default(max_num_seqs, sizes["max_num_seqs"]), _default(max_model_len, own_len)
    check_int("max_num_seqs", max_num_seqs, 1, 2**31 - 1)
    check_int("max_model_len", max_len, 1, 2**31 - 1)
    whole_prompts = not getattr(source.cfg, "causal", True)
    least_tokens = max(max_num_seqs, sizes["max_num_batched_tokens"], max_len if whole_prompts else 0)
    wanted = EngineConfig(
        max_model_len=max_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_default(max_num_batched_tokens, least_tokens),
        block_size=_default(block_size, BLOCK_SIZE),
        num_blocks=2**30,  # `size_engine` says how many
        enable_prefix_caching=enable_prefix_caching and not whole_prompts,
        gpu_memory_utilization=gpu_memory_utilization,
        preemption=preemption,
        swap_space=swap_space,
        kv_cache_dtype=check_kv_dtype(kv_cache_dtype, shape.dtype),
        measures_kv_scales=calculate_kv_scales,
        seed=seed,
        max_logprobs=_default(max_logprobs, MAX_LOGPROBS),
        logprobs_mode=_logprobs_mode(logprobs_mode),
        generates=shape.generates,
        batch_invariant=batch_invariant,
        whole_prompts=whole_prompts,
    )
    if batch_invariant:
        check_batch_invariant(shape, wanted, mesh)
        check_arithmetic(mesh)
    _check_len(wanted.max_model_len, source.cfg)
    _check_swap_space(swap_space)
    check_platform(shape, wanted, mesh, source.cfg.heads)
    if platform == "cpu" and gpu_memory_utilization is not None:
        log.warning(
            "gpu_memory_utilization=%g is for accelerators: on a CPU the KV pool takes %.3g %% of the machine's memory "
            "at most, unless num_blocks gives its size",
            *(gpu_memory_utilization, 100 * memory.CPU_KV_SHARE),
        )
    return wanted


def _default(value: int | None, default: int) -> int:
    return default if value is None else value


def _logprobs_mode(name: str) -> LogprobsMode:
    """Also by vLLM's names."""
    mode: Any = {"raw_logprobs": "raw", "processed_logprobs": "sampled"}.get(name, name)
    if mode not in LOGPROBS_MODES:
        raise ValueError(f"logprobs_mode={name!r:.100} must be one of {', '.join(LOGPROBS_MODES)}")
    return mode


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
        wanted,
        min_bucket=min_bucket(platform_of(mesh)),
        free_padding=has_free_padding(shape, mesh),
        num_shards=num_shards("shards", mesh),
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
