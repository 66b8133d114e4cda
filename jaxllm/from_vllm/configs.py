"""What an engine is, under the names of vLLM's configurations."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    model: str  # its directory or file; "" for an object
    dtype: np.dtype
    max_model_len: int
    vocab_size: int
    seed: int
    max_logprobs: int
    hf_config: SimpleNamespace | None  # the keys of config.json; None for an object
    quantization: None = None

    @property
    def served_model_name(self) -> str:
        return self.model

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    block_size: int  # tokens
    num_gpu_blocks: int
    enable_prefix_caching: bool
    gpu_memory_utilization: float | None
    swap_space: float  # GiB
    cache_dtype: str = "auto"


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    policy: str = "priority"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    tensor_parallel_size: int
    world_size: int  # devices
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    lora_config: None = field(default=None)
    speculative_config: None = field(default=None)


def describe(engine: Any, model: str, hf_config: dict[str, Any] | None, dtype: np.dtype) -> VllmConfig:
    """Of an engine for the model at `model`, whose config.json says `hf_config`."""
    config, mesh = engine.config, engine.runner.executor.mesh
    return VllmConfig(
        model_config=ModelConfig(
            model=model,
            dtype=dtype,
            max_model_len=config.max_model_len,
            vocab_size=engine.vocab,
            seed=config.seed,
            max_logprobs=config.max_logprobs,
            hf_config=None if hf_config is None else SimpleNamespace(**hf_config),
        ),
        cache_config=CacheConfig(
            block_size=config.block_size,
            num_gpu_blocks=config.num_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            gpu_memory_utilization=config.gpu_memory_utilization,
            swap_space=config.swap_bytes / 2**30,
            cache_dtype=config.kv_cache_dtype,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
        ),
        parallel_config=ParallelConfig(tensor_parallel_size=mesh.shape.get("tensor", 1), world_size=mesh.size),
    )
