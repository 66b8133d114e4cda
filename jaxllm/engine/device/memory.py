"""How many KV blocks fit: an analytic bound, known before anything is compiled or loaded.

The number of blocks is part of every executable's shape, hence of every compilation cache key. So it stays the same
from start to start: what is measured is rounded to a coarse grid.
"""

import logging
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.argument_checks import check_int
from jaxllm.engine.config import GPU_MEMORY_UTILIZATION, MEM_FRACTION_VARIABLES, MOST_BLOCKS, EngineConfig
from jaxllm.engine.device.block_moves import MAX_STAGED_BYTES
from jaxllm.engine.device.executables import ModelShape
from jaxllm.engine.device.lowering import Lowering
from jaxllm.engine.host_memory import free_bytes, machine_bytes
from jaxllm.errors import OutOfMemoryError
from jaxllm.pallas_kernels.quantized_matmul import stored_bytes
from jaxllm.sharding.mesh import platform_of
from jaxllm.sharding.rules import local_shape, num_shards

log = logging.getLogger(__name__)

ALLOCATOR_SHARE = 0.98  # of what the runtime may allocate; the rest is fragmentation
JAX_GPU_FRACTION = 0.75  # of a GPU's memory that JAX may allocate unless the environment says otherwise
CPU_KV_SHARE = 1 / 16  # of the machine's memory, which others use too
_COUNTED = 2**31, 2**32  # bytes: between them Triton's 32-bit offsets of elements of one byte overflow
_IN_USE_GRID = 64 << 20  # bytes; arrays smaller than this beside the model do not change the pool's size


class DeviceMemory(NamedTuple):
    """Bytes of one device."""

    total: int  # that it has
    limit: int  # of those, that the runtime may allocate
    in_use: int  # of those, that are allocated

    def usable(self, share: float | None) -> int:
        """What the process may use: `share` of all (None: the default's), and no more than the runtime may."""
        return min(int(self.total * (share or GPU_MEMORY_UTILIZATION)), int(self.limit * ALLOCATOR_SHARE))


def device_memory(mesh: Mesh) -> DeviceMemory | None:
    """Of the fullest of this process's accelerators on the mesh; None on a CPU."""
    return None if platform_of(mesh) == "cpu" else fullest(mesh.local_devices)


def fullest(devices: Sequence[Any]) -> DeviceMemory:
    """Of the device on which least is free. ValueError if the runtime does not know."""
    found = []
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            raise ValueError(
                f"{device} does not say how much memory it has (XLA_PYTHON_CLIENT_ALLOCATOR=platform keeps it from "
                "that); give num_blocks"
            )
        limit = stats["bytes_limit"]
        total = int(limit / _allocator_fraction()) if device.platform == "gpu" else limit
        found.append(DeviceMemory(total, limit, stats.get("bytes_in_use", 0)))
    return min(found, key=lambda memory: memory.limit - memory.in_use)


def _allocator_fraction() -> float:
    """The share of a GPU's memory that JAX may allocate."""
    given = [os.environ[name] for name in MEM_FRACTION_VARIABLES if os.environ.get(name)]
    return float(given[0]) if given else JAX_GPU_FRACTION


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
    return 8 if platform == "tpu" else 5


def kv_budget(
    shape: ModelShape, config: EngineConfig, mesh: Mesh, device: DeviceMemory | None, *, has_params: bool = False
) -> int:
    """Bytes for the KV pool on each device. `has_params`: the parameters lie there already, among what is in use.
    Raises `OutOfMemoryError` with what is missing."""
    slots = leaf_bytes(jax.tree.leaves(Lowering(shape, config, mesh).small_state()))
    params, temporary = leaf_bytes(shape.leaves), step_bytes(shape, config, mesh) + slots
    least = block_bytes(shape, config, mesh)
    if device is None:
        usable, others = machine_bytes() // mesh.size, 0
        unused = free_bytes() // mesh.size - params * (not has_params) - temporary
        most = _cpu_share(int(usable * CPU_KV_SHARE), unused, least)
    else:
        usable = most = device.usable(config.gpu_memory_utilization)
        others = -(-max(0, device.in_use - params * has_params) // _IN_USE_GRID) * _IN_USE_GRID
        temporary += MAX_STAGED_BYTES
    free = usable - others - params - temporary
    if free < least:
        raise OutOfMemoryError(
            f"the model does not fit: each device needs {params / 1e9:.2f} GB for parameters, {temporary / 1e9:.2f} GB "
            f"for a step and its slots and {least / 1e9:.3f} GB for a KV block, of {usable / 1e9:.2f} GB that the "
            f"engine may use and {others / 1e9:.2f} GB of those that others use: {(least - free) / 1e9:.2f} GB more "
            "than it may use; take more devices (mesh='tensor=N'), a smaller dtype, a higher gpu_memory_utilization, "
            "or lower max_num_seqs and max_num_batched_tokens"
        )
    if device is not None:
        _tell(config, device, params=params, others=others, temporary=temporary, free=free)
    return min(most, free)


def _cpu_share(share: int, unused: int, least: int) -> int:
    """Bytes of the KV pool on a CPU: of `share` what is unused now, but a block."""
    most = max(least, min(share, unused))
    if most < share:
        log.warning(
            "the KV pool has %.2g GB at most, not %.2g: no more of the machine's memory is free beside the model",
            *(most / 1e9, share / 1e9),
        )
    return most


def _tell(config: EngineConfig, device: DeviceMemory, *, params: int, others: int, temporary: int, free: int) -> None:
    parts = device.total, device.usable(config.gpu_memory_utilization), params, free, temporary, others
    log.info(
        "of the %.1f GB of each device the process may use %.1f GB: %.1f GB for parameters, %.1f GB for the KV pool "
        "at most, %.1f GB for a step; others in the process use %.1f GB",
        *(num_bytes / 1e9 for num_bytes in parts),
    )
    wanted = config.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
    if device.limit < int(device.total * wanted):
        log.warning(
            "JAX may allocate %.0f %% of the device, less than gpu_memory_utilization=%g: set %s=%g before JAX starts",
            100 * device.limit / device.total,
            wanted,
            MEM_FRACTION_VARIABLES[0],
            wanted,
        )


def check_num_blocks(
    shape: ModelShape, config: EngineConfig, num_blocks: int, mesh: Mesh, *, has_params: bool = False
) -> None:
    """Raises `OutOfMemoryError` for more blocks than each device has memory for, before anything is made of them;
    `has_params`: the parameters lie there already."""
    check_int("num_blocks", num_blocks, 1, MOST_BLOCKS)
    free = free_bytes() // mesh.size if platform_of(mesh) == "cpu" else free_on(mesh.local_devices)
    if free is None:
        return
    params, each = 0 if has_params else leaf_bytes(shape.leaves), block_bytes(shape, config, mesh)
    most = max(0, free - params) // each
    if num_blocks > most:
        raise OutOfMemoryError(
            f"num_blocks={num_blocks} take {num_blocks * each / 1e9:.1f} GB of each device, {each / 1e6:.3g} MB each, "
            f"but of {free / 1e9:.1f} GB that are free the parameters take {params / 1e9:.1f}: give at most "
            f"{coarse(most)}, or leave num_blocks out for as many as fit"
        )


def free_on(devices: Sequence[Any]) -> int | None:
    """Bytes on the fullest of these accelerators; None where the runtime does not know."""
    stats = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in found for found in stats):
        return None
    return min(found["bytes_limit"] - found.get("bytes_in_use", 0) for found in stats)


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
