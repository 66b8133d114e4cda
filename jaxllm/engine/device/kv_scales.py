"""The scales of keys and values in a pool of 8-bit numbers: arrays `[2, kv_heads]`, those of keys and of values, one of
them for each cache of keys and values in the order of the layers. They are read only, and no part of the state."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float32, Int

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.commands import Command
from jaxllm.engine.device.model_shape import ModelShape
from jaxllm.models.cache_spec import CacheSpec
from jaxllm.models.context import StepContext
from jaxllm.models.kv_range import range_caches, ranges_of
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.sharding.rules import place, sharding

# What is measured: rows of random tokens. Other texts' keys and values may be larger, which the margin is for; what is
# larger still is clipped.
NUM_ROWS, ROW_LEN = 4, 128
MARGIN = 1.25

AXES = (None, "kv_heads")
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def kv_specs(caches: Sequence[tuple[CacheSpec, ...]]) -> list[CacheSpec]:
    """Those of keys and values."""
    return [spec for of_layer in caches for spec in of_layer if not spec.is_state]


def scale_shapes(model_shape: ModelShape, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """With shardings."""
    split = sharding(AXES, mesh)
    shapes = [(2, spec.shape[0]) for spec in kv_specs(model_shape.caches)]
    return [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split) for shape in shapes]


def place_scales(pairs: Int[np.ndarray, "caches 2"], like: Sequence[jax.ShapeDtypeStruct]) -> list[Array]:
    """On the devices, from the bits of one float32 for each cache's keys and one for its values."""
    scales = np.asarray(pairs).view(np.float32)
    assert len(scales) == len(like), (len(scales), len(like))
    whole = [np.array(np.broadcast_to(pair[:, None], each.shape)) for pair, each in zip(scales, like, strict=True)]
    return place(whole, [each.sharding for each in like])


def scales_command(pairs: Sequence[tuple[float, float]]) -> Command:
    """Gives the engine these scales of each cache's keys and values."""
    return Command("kv_scales", (np.array(pairs, np.float32).view(np.int32),))


def measured_tokens(config: EngineConfig, vocab: int, bos_id: int | None) -> Int[np.ndarray, "rows len"]:
    """Random ids, the same each time; every second row begins like a text, if `bos_id` says how texts begin."""
    row_len = min(ROW_LEN, config.max_model_len, config.max_num_batched_tokens)
    num_rows = max(1, min(NUM_ROWS, config.max_num_batched_tokens // row_len))
    tokens = np.random.default_rng(0).integers(0, vocab, (num_rows, row_len), np.int32)
    if bos_id is not None:
        tokens[::2, 0] = bos_id
    return tokens


def measure_command(tokens: Int[np.ndarray, "rows len"]) -> Command:
    """Has the engine measure its scales with `tokens`."""
    return Command("measure_kv_scales", (tokens,))


def measure(
    leaves: Sequence[Array],
    tokens: Int[Array, "rows len"],
    *,
    model_shape: ModelShape,
    dtype: Any,
    placement: Placement,
) -> list[Float32[Array, "2 kv_heads"]]:
    """Scales with which a pool of `dtype` holds `MARGIN` times the largest keys and values of each head that the model
    makes of `tokens`. A head whose keys are all zero gets 1; of what is not finite comes a scale that is not, with
    which no logits are finite, so that requests fail and say so."""
    num_rows, row_len = tokens.shape
    positions = jnp.tile(jnp.arange(row_len, dtype=jnp.int32), num_rows)
    rows = jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), row_len)
    ctx = StepContext(positions, rows, placement=placement)
    _, caches = model_shape.model(leaves)(tokens.reshape(-1), ctx, range_caches(model_shape.caches, row_len))
    unit = MARGIN / _LARGEST[jnp.dtype(dtype).name]
    return [jnp.where(x == 0, 1.0, x * unit) for x in ranges_of(caches)]
