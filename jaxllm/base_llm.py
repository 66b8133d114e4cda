"""What `LLM` and `AsyncLLM` have in common: how an engine is asked for, and what may be asked of it."""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.argument_checks import flag
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.generation_config import default_sampling_params
from jaxllm.cluster.follow import lead_or_follow
from jaxllm.default_model import DEFAULT_MODEL
from jaxllm.engine import build
from jaxllm.engine.metrics import Metric, read_metrics
from jaxllm.engine.stats import EngineStats
from jaxllm.from_vllm.configs import ModelConfig, VllmConfig, describe
from jaxllm.from_vllm.dtypes import dtype_name, kv_dtype_name, task_name
from jaxllm.from_vllm.engine_arguments import translate_engine_arguments
from jaxllm.from_vllm.missing import MissingMethods
from jaxllm.from_vllm.typed import VllmEngineArguments
from jaxllm.function_model import FunctionShape, as_model
from jaxllm.hub.locate import locate
from jaxllm.models.served import Arithmetic
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.sampling_params import SamplingParams
from jaxllm.sharding.mesh import map_axes


class BaseLLM(MissingMethods):
    """An engine, and the arguments that it is built from."""

    def __init__(
        self,
        model: Any = None,
        params: Any = None,
        *,
        shape: FunctionShape | None = None,
        head: Any = None,
        config: Any = None,
        revision: str | None = None,
        download_dir: str | Path | None = None,
        tokenizer: Any = None,
        skip_tokenizer_init: bool = False,
        dtype: Any = "auto",
        load_format: str = "auto",
        quantization: str | None = None,
        hf_overrides: dict[str, Any] | None = None,
        task: str | None = None,
        generation_config: str | Path = "auto",
        override_generation_config: dict[str, Any] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        enable_prefix_caching: bool | None = None,
        mesh: str | Mesh | None = None,
        axes: Mapping[str, str | Sequence[str]] | None = None,
        tensor_parallel_size: int | None = None,
        gpu_memory_utilization: float | None = None,
        preemption: str = "auto",
        swap_space: int | float | None = None,
        kv_cache_dtype: Any = "auto",
        calculate_kv_scales: bool | None = False,
        max_logprobs: int | None = None,
        logprobs_mode: str | None = None,
        batch_invariant: bool = False,
        seed: int | None = 0,
        record: str | Path | None = None,
        compilation_cache: bool | str | Path | None = None,
        cluster: Any = None,
        **vllm: Unpack[VllmEngineArguments],
    ):
        options: dict[str, Any] = dict(
            tokenizer=tokenizer,
            skip_tokenizer_init=skip_tokenizer_init,
            dtype=dtype_name(dtype),
            load_format=load_format,
            quantization=quantization,
            hf_overrides=hf_overrides,
            task=task_name(task),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_bytes=kv_cache_bytes,
            enable_prefix_caching=flag("enable_prefix_caching", enable_prefix_caching, default=True),
            mesh=mesh if axes is None else map_axes(mesh, axes),
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            preemption=preemption,
            swap_space=float(swap_space) if type(swap_space) is int else swap_space,
            kv_cache_dtype=kv_dtype_name(kv_cache_dtype),
            calculate_kv_scales=flag("calculate_kv_scales", calculate_kv_scales),
            max_logprobs=max_logprobs,
            logprobs_mode="raw" if logprobs_mode is None else logprobs_mode,
            batch_invariant=flag("batch_invariant", batch_invariant),
            seed=random.SystemRandom().getrandbits(63) if seed is None else seed,
            record=record,
            compilation_cache=compilation_cache,
            model_config=config,
        )
        options |= translate_engine_arguments(type(self).__name__, vllm, options)
        default_sampling_params(None, "vllm", override_generation_config)  # checks it
        self._recommended = generation_config, override_generation_config
        wants_tokenizer = tokenizer is None and not skip_tokenizer_init
        model = as_model(model, params, shape, head)
        model = locate(model, revision=revision, download_dir=download_dir, tokenizer=wants_tokenizer)
        if isinstance(config, str | Path):
            options["model_config"] = config = locate(config, weights=False, tokenizer=wants_tokenizer)
        if config is not None and cluster is not None:
            raise ValueError("config= is for an engine on one host; over several, give a directory with config.json")
        group = None if cluster is None else lead_or_follow(cluster, model, options)
        with nullcontext() if group is None else group.building():
            self._engine = build.build_engine(model, **options, group=group)
        path = config if config is not None else DEFAULT_MODEL if model is None else model
        self._checkpoint = open_checkpoint(path) if isinstance(path, str | Path) else None
        self._user_tokenizer, self._hf_overrides = tokenizer, hf_overrides
        if self.get_default_sampling_params().needs_full_sampler:
            self._engine.expect_full_sampler()
        self._start()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} can't be pickled or copied: it holds a device's memory, threads and executables. "
            "Send its arguments and build another one there; outputs and sampling parameters can be pickled"
        )

    def _start(self) -> None:
        """What comes after the engine is built."""
        raise NotImplementedError

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Any:
        """Of an `EngineArgs`."""
        return cls(**{field.name: getattr(engine_args, field.name) for field in dataclasses.fields(engine_args)})

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    def get_tokenizer(self) -> Any:
        """The tokenizer that was passed as an object, or else the model directory's (`jaxllm.text.tokenizer`)."""
        return self.tokenizer if isinstance(self._user_tokenizer, str | Path | None) else self._user_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's files recommend, or `generation_config` and `override_generation_config` say."""
        return default_sampling_params(self._checkpoint, *self._recommended)

    @property
    def vllm_config(self) -> VllmConfig:
        """The engine's sizes, under vLLM's names."""
        dtype = np.dtype(jax.tree.leaves(self._engine.runner.executor.abstract_params)[0].dtype)
        if self._checkpoint is None:
            return describe(self._engine, "", None, dtype)
        hf_config = self._checkpoint.config() | (self._hf_overrides or {})
        return describe(self._engine, str(self._checkpoint.path), hf_config, dtype)

    @property
    def model_config(self) -> ModelConfig:
        """What the engine knows of the model, under vLLM's names."""
        return self.vllm_config.model_config

    @property
    def arithmetic(self) -> Arithmetic:
        """The kernels and the orders of additions of an engine with `batch_invariant`, for
        `jaxllm.models.token_logprobs`. ValueError for other engines, whose sums have no fixed order."""
        config = self._engine.config
        if not config.batch_invariant or config.kv_cache_dtype != "auto":
            raise ValueError(
                "only an engine with batch_invariant=True, and keys and values in the model's dtype, computes a token "
                "in one way, which another program can repeat; build the LLM so"
            )
        placement = Placement(self._engine.runner.executor.mesh, batch_invariant=True)
        return Arithmetic(placement=placement, block_size=config.block_size, max_len=config.max_model_len)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def get_metrics(self) -> list[Metric]:
        """`stats` as vLLM's `Counter`, `Gauge` and `Histogram`: by vLLM's names what it has too, the rest by ours."""
        return read_metrics(self.stats(), self._engine.config, {"model_name": self.model_config.model, "engine": "0"})
