"""How many KV blocks fit: an analytic bound, known before anything is compiled or loaded.

The number of blocks is part of every executable's shape, hence of every compilation cache key. So it stays the same
from start to start: what is measured is rounded to a coarse grid.
"""

import logging
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.argument_checks import check_int
from jaxllm.engine.config import MOST_BLOCKS, EngineConfig
from jaxllm.engine.device.block_moves import MAX_STAGED_BYTES
from jaxllm.engine.device.device_memory import DeviceMemory
from jaxllm.engine.device.lowering import Lowering
from jaxllm.engine.device.model_shape import ModelShape
from jaxllm.errors import OutOfMemoryError
from jaxllm.pallas_kernels.quantized_matmul import stored_bytes
from jaxllm.sharding.mesh import platform_of
from jaxllm.sharding.rules import local_shape, num_shards

log = logging.getLogger(__name__)

CPU_KV_SHARE = 1 / 16  # of the machine's memory, which others use too
_COUNTED = 2**31, 2**32  # bytes: between them Triton's 32-bit offsets of elements of one byte overflow
_IN_USE_GRID = 64 << 20  # bytes; arrays smaller than this beside the model do not change the pool's size


def leaf_bytes(leaves: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Bytes that the leaves take on each device."""
    return sum(stored_bytes(x.sharding.shard_shape(x.shape), x.dtype) for x in leaves)


def block_bytes(shape: ModelShape, config: EngineConfig, mesh: Mesh) -> int:
    """Bytes of one block of all layers on each device: what they cache, and the tokens' ids."""
    layout = shape.cache_layout(config, mesh)
    return (layout.page_bytes(mesh) + 4 * config.block_size) * layout.num_tables


def step_bytes(shape: ModelShape, config: EngineConfig, mesh: Mesh) -> int:
    """A bound on a step's temporary bytes on each device: activations of one layer, over twice, and the logits."""
    tokens, seqs = config.max_num_batched_tokens, config.max_num_seqs
    widest = max(shape.token_widths)
    # Residuals whole, the wide middle in shards; as many as tests/compile_only finds enough on every chip.
    wide = 4 * shape.token_widths[0] + 5 * widest // num_shards("mlp", mesh) + 3 * shape.routed_width
    activations = tokens * wide * max(4, jnp.dtype(shape.dtype).itemsize)  # kernels and norms work in float32
    arrays = shape.cache_layout(config, mesh).arrays
    cell = max(math.prod(local_shape(array.shape, array.axes, mesh)) for array in arrays)
    gathered = tokens * cell * 4  # by the reference, which serves where no kernel does
    logits = 4 * seqs * (shape.logits_width // num_shards("vocab", mesh)) * shape.generates
    return activations + gathered + logit_arrays(platform_of(mesh)) * logits + (64 << 20)


def logit_arrays(platform: str) -> int:
    """As large as the logits, and there at the same time: as they come, altered, and what samplers lay out beside them,
    as tests/compile_only finds."""
    return {"tpu": 8, "gpu": 6}.get(platform, 5)


def beside_pool(shape: ModelShape, config: EngineConfig, mesh: Mesh) -> int:
    """Bytes that each device needs beside parameters and pool: for a step and the slots, and for blocks that move."""
    slots = leaf_bytes(jax.tree.leaves(Lowering(shape, config, mesh).small_state()))
    return step_bytes(shape, config, mesh) + slots + MAX_STAGED_BYTES * (platform_of(mesh) != "cpu")


def kv_budget(
    shape: ModelShape, config: EngineConfig, mesh: Mesh, device: DeviceMemory | None, *, has_params: bool = False
) -> int:
    """Bytes for the KV pool on each device. `has_params`: the parameters lie there already, among what is in use.
    Raises `OutOfMemoryError` with what is missing, and ValueError if the `device` is not known."""
    if device is None:
        raise ValueError(
            f"{mesh.local_devices[0]} does not say how much memory it has (XLA_PYTHON_CLIENT_ALLOCATOR=platform keeps "
            "it from that); give num_blocks"
        )
    params, temporary = leaf_bytes(shape.leaves), beside_pool(shape, config, mesh)
    least = block_bytes(shape, config, mesh)
    if device.is_host:
        usable, others = device.total, 0
        unused = device.free - params * (not has_params) - temporary
        _check_host(device, unused, params * (not has_params), temporary, least)
        most = _cpu_share(int(usable * CPU_KV_SHARE), unused, least)
    else:
        usable = most = device.usable(config.gpu_memory_utilization)
        others = others_bytes(device, params * has_params)
    free = usable - others - params - temporary
    if free < least:
        raise OutOfMemoryError(
            f"the model does not fit: each device needs {params / 1e9:.2f} GB for parameters, {temporary / 1e9:.2f} GB "
            f"for a step and its slots and {least / 1e9:.3f} GB for a KV block, of {usable / 1e9:.2f} GB that the "
            f"engine may use and {others / 1e9:.2f} GB of those that others use: {(least - free) / 1e9:.2f} GB more "
            "than it may use; take more devices (mesh='tensor=N'), a smaller dtype, a higher gpu_memory_utilization, "
            "or lower max_num_seqs and max_num_batched_tokens"
        )
    return min(most, free)


def others_bytes(device: DeviceMemory, own: int) -> int:
    """Of a device, besides its `own` bytes that are in use: arrays of the process's, and what its engines will take."""
    return -(-max(0, device.in_use - own + device.claimed) // _IN_USE_GRID) * _IN_USE_GRID


def _check_host(device: DeviceMemory, unused: int, params: int, temporary: int, least: int) -> None:
    """Raises `OutOfMemoryError` where not even the system's swap space holds what the engine takes at once."""
    if unused + device.swap < least:
        raise OutOfMemoryError(
            f"the model does not fit: each device needs {params / 1e9:.2f} GB for parameters that are still to load, "
            f"{temporary / 1e9:.2f} GB for a step and its slots and {least / 1e9:.3f} GB for a KV block, but of its "
            f"{device.total / 1e9:.2f} GB of the machine's memory {device.free / 1e9:.2f} GB are free, with "
            f"{device.claimed / 1e9:.2f} GB taken off that other engines of this process will take, and "
            f"{device.swap / 1e9:.2f} GB of swap space; free some, take a smaller dtype or a quantization, or lower "
            "max_num_seqs and max_num_batched_tokens"
        )


def _cpu_share(share: int, unused: int, least: int) -> int:
    """Bytes of the KV pool on a CPU: of `share` what is unused now, but a block."""
    most = max(least, min(share, unused))
    if most < share:
        log.warning(
            "the KV pool has %.2g GB at most, not %.2g: no more of the machine's memory is free beside the model",
            *(most / 1e9, share / 1e9),
        )
    return most


def blocks_in(shape: ModelShape, config: EngineConfig, mesh: Mesh, kv_cache_bytes: int, num_blocks: int | None) -> int:
    """How many blocks of each device `kv_cache_bytes` hold. ValueError if it is none, or `num_blocks` are given too."""
    if num_blocks is not None:
        raise ValueError(f"num_blocks={num_blocks} and kv_cache_bytes={kv_cache_bytes} exclude each other; give one")
    each = block_bytes(shape, config, mesh)
    check_int("kv_cache_bytes", kv_cache_bytes, each, each * MOST_BLOCKS)
    return kv_cache_bytes // each


def check_num_blocks(
    shape: ModelShape,
    config: EngineConfig,
    num_blocks: int,
    mesh: Mesh,
    device: DeviceMemory | None,
    *,
    has_params: bool = False,
) -> None:
    """Raises `OutOfMemoryError` for more blocks than each device has memory for, before anything is made of them, if
    that is known; `has_params`: the parameters lie there already."""
    check_int("num_blocks", num_blocks, 1, MOST_BLOCKS)
    if device is None:
        return
    params, each = 0 if has_params else leaf_bytes(shape.leaves), block_bytes(shape, config, mesh)
    most = max(0, device.free - params) // each
    if num_blocks > most:
        raise OutOfMemoryError(
            f"num_blocks={num_blocks} take {num_blocks * each / 1e9:.1f} GB of each device, {each / 1e6:.3g} MB each, "
            f"but of {device.free / 1e9:.1f} GB that are free the parameters take {params / 1e9:.1f}: give at most "
            f"{coarse(most)}, or leave num_blocks out for as many as fit"
        )


def num_blocks(shape: ModelShape, config: EngineConfig, budget: int, mesh: Mesh) -> int:
    """Blocks that fit `budget` bytes, no more than all slots could ever use. Only what memory bounds is rounded, and
    never below one sequence of `max_model_len` tokens that fits."""
    fit = max(1, budget // block_bytes(shape, config, mesh))
    most = config.max_num_seqs * config.count_pages(config.blocks_per_seq, config.max_num_batched_tokens)
    wanted = -(-most // config.pages_per_block)
    if fit >= wanted:
        return wanted
    least = blocks_of_one(config)
    return max(coarse(fit), least if fit >= least else 1)


def check_arrays(shape: ModelShape, config: EngineConfig, num_blocks: int, mesh: Mesh) -> None:
    """ValueError for arrays of 8-bit numbers whose cells the GPU's kernel can't count: see `_COUNTED`."""
    each = _counted_bytes(shape, config, mesh)
    if _COUNTED[0] < num_blocks * each <= _COUNTED[1]:
        raise ValueError(
            f"num_blocks={num_blocks} make arrays of {num_blocks * each / 2**30:.2f} GiB of 8-bit keys and values, of "
            f"which the attention kernel counts the cells up to 2 GiB, and from 4 GiB on: give at most "
            f"{_COUNTED[0] // each} blocks, or more than {_COUNTED[1] // each}"
        )


def countable(shape: ModelShape, config: EngineConfig, num_blocks: int, mesh: Mesh) -> int:
    """`num_blocks`, or the most below that the GPU's kernel can count the cells of."""
    each = _counted_bytes(shape, config, mesh)
    if not _COUNTED[0] < num_blocks * each <= _COUNTED[1]:
        return num_blocks
    most = _COUNTED[0] // each
    log.warning(
        "the KV pool has %d blocks, not the %d that fit: the attention kernel counts the cells of a layer's 8-bit keys "
        "and values up to 2 GiB, and from 4 GiB on",
        *(most, num_blocks),
    )
    return most


def _counted_bytes(shape: ModelShape, config: EngineConfig, mesh: Mesh) -> int:
    """Of a block's pages in the largest array of 8-bit numbers on each GPU; 0 where kernels count all cells."""
    if platform_of(mesh) != "gpu" or config.kv_cache_dtype == "auto":
        return 0
    arrays = shape.cache_layout(config, mesh).arrays
    sizes = [math.prod(local_shape(each.shape, each.axes, mesh)) for each in arrays if each.dtype.itemsize == 1]
    return max(sizes) * config.pages_per_block


def blocks_of_one(config: EngineConfig) -> int:
    """Blocks whose pages hold a sequence of `max_model_len` tokens."""
    return -(-config.count_pages(config.blocks_per_seq) // config.pages_per_block)


def coarse(n: int) -> int:
    """`n` rounded down to five significant bits."""
    return n >> max(0, n.bit_length() - 5) << max(0, n.bit_length() - 5)
