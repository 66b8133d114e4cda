"""Keys and values in 8 bits: which dtypes a pool may have, whether the platform serves them, where scales come from."""

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.checkpoint.quantized.kv_scales import Scales
from jaxllm.engine.config import KV_CACHE_DTYPES, EngineConfig
from jaxllm.engine.device.commands import Command
from jaxllm.engine.device.kv_scales import kv_specs, measure_command, measured_tokens, scales_command
from jaxllm.engine.device.model_shape import ModelShape
from jaxllm.engine.model_source import ModelSource
from jaxllm.models.cache_spec import CacheSpec
from jaxllm.pallas_kernels.dispatch import Placement, compute_capability
from jaxllm.pallas_kernels.paged_attention import has_kernel
from jaxllm.sharding.mesh import platform_of
from jaxllm.sharding.rules import local_shape

log = logging.getLogger(__name__)

_OTHERS = {
    "fp8_e5m2": "has two bits of mantissa; give 'fp8', which is e4m3, or 'int8'",
    "fp8_per_token_head": "has a scale for each token; a head has one: give 'fp8'",
    "int8_per_token_head": "has a scale for each token; a head has one: give 'int8'",
}


def check_kv_dtype(given: Any, dtype: Any) -> str:
    """The name in `KV_CACHE_DTYPES` of what a user gives for a model of `dtype`. ValueError for what is not there."""
    if given == jnp.dtype(dtype).name:
        return "auto"
    if given in KV_CACHE_DTYPES:
        return given
    why = _OTHERS.get(given, "is not supported; give 'int8' or 'fp8'")
    if given in ("bfloat16", "float16", "float32"):
        why = (
            f"is not the model's dtype, which is {jnp.dtype(dtype).name}: attention reads keys of its own dtype or of "
            "8 bits. Give dtype too, or 'int8' or 'fp8'"
        )
    raise ValueError(f"kv_cache_dtype={given!r:.100} {why}, or leave it 'auto'")


def check_platform(shape: ModelShape, config: EngineConfig, mesh: Mesh, heads: int) -> None:
    """ValueError if keys and values in 8 bits would cost the kernel that serves a model of so many query heads."""
    if config.kv_cache_dtype == "auto":
        return
    specs = kv_specs(shape.caches)
    if not specs:
        raise ValueError(f"kv_cache_dtype={config.kv_cache_dtype!r}: the model caches no keys and values; leave it out")
    for spec in dict.fromkeys(specs):
        if is_served(spec, shape.kv_dtype(config), shape, config, mesh, heads):
            continue
        if is_served(spec, shape.dtype, shape, config, mesh, heads):
            raise ValueError(f"kv_cache_dtype={config.kv_cache_dtype!r} {_why_not(config, mesh)}")


def is_served(spec: CacheSpec, kv_dtype: Any, shape: ModelShape, config: EngineConfig, mesh: Mesh, heads: int) -> bool:
    """Whether a kernel attends to such keys and values, with so many query heads."""
    platform = platform_of(mesh)
    (kv_heads, head_dim), like = spec.shape, jax.ShapeDtypeStruct
    pool = like((1, *local_shape(spec.block_shape(config.block_size, platform), spec.axes, mesh)), kv_dtype)
    own_heads = pool.shape[2]
    q = like((1, own_heads * -(-heads // kv_heads), head_dim), shape.dtype)
    k = like((1, own_heads, head_dim), shape.dtype)
    return has_kernel(q, k, k, pool, placement=Placement(mesh, config.batch_invariant))


def _why_not(config: EngineConfig, mesh: Mesh) -> str:
    platform, other = platform_of(mesh), "int8" if config.kv_cache_dtype == "fp8" else "fp8"
    if platform == "gpu" and config.kv_cache_dtype == "fp8" and compute_capability() < 89:
        return "needs a GPU of compute capability 8.9 or more, as H100: an A100 reads no float8; give 'int8'"
    if platform == "tpu" and config.block_size < 32:
        return f"needs blocks of at least 32 tokens on a TPU, not block_size={config.block_size}; give block_size=32"
    return f"is not supported by the attention kernel of a {platform} for this model; give {other!r} or 'auto'"


def fixed_scales(source: ModelSource, shape: ModelShape, config: EngineConfig) -> Scales | None:
    """Of each cache of keys and values: the checkpoint's, or 1 for float8. None where they are measured, as it was
    asked for, or the checkpoint has none for int8."""
    kind = config.kv_cache_dtype
    if kind == "auto" or config.measures_kv_scales:
        return None
    stored = source.kv_scales(kind)
    if stored is None and kind == "int8":
        return None
    text = "1, as the model's files have none" if stored is None else "the checkpoint's"
    log.info("keys and values are kept in %s, with scales that are %s", kind, text)
    each = [(1.0, 1.0)] * len(shape.caches) if stored is None else stored
    return [each[layer] for layer, specs in enumerate(shape.caches) for spec in specs if not spec.is_state]


def with_scales(config: EngineConfig, scales: Scales | None) -> EngineConfig:
    """That of an engine with these `fixed_scales`."""
    return dataclasses.replace(config, measures_kv_scales=config.kv_cache_dtype != "auto" and scales is None)


def scale_command(source: ModelSource, config: EngineConfig, scales: Scales | None) -> Command | None:
    """What gives the engine its scales, or has it measure them. None for a pool in the model's dtype."""
    if config.measures_kv_scales:
        return measure_command(measured_tokens(config, source.cfg.vocab, _bos_id(source)))
    return None if scales is None else scales_command(scales)


def _bos_id(source: ModelSource) -> int | None:
    """The token that texts begin with, if the model's files say."""
    given = None if source.checkpoint is None else source.checkpoint.config().get("bos_token_id")
    if given is None and source.tokenizer is not None:
        given = source.tokenizer.bos_token_id
    return given if type(given) is int and 0 <= given < source.cfg.vocab else None
