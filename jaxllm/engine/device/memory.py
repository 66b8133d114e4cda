"""How many KV blocks fit: an analytic bound, known before anything is compiled or loaded.

The number of blocks is part of every executable's shape, hence of every compilation cache key. So it depends on the
machine and the model only, never on what happens to be free at the moment, and is rounded to a coarse grid.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.engine.config import EngineConfig, machine_bytes
from jaxllm.engine.device.block_moves import MAX_STAGED_BYTES
from jaxllm.engine.device.executables import Lowering, ModelShape
from jaxllm.errors import OutOfMemoryError
from jaxllm.pallas_kernels.paged_attention import kv_shape

ACCELERATOR_SHARE = 0.92  # of the memory that the runtime may allocate; the rest is fragmentation
CPU_KV_SHARE = 1 / 16  # of the machine's memory, which others use too


def leaf_bytes(leaves: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Bytes that the leaves take on each device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def block_bytes(shape: ModelShape, block_size: int, mesh: Mesh) -> int:
    """Bytes of one block on each device, keys and values of all layers."""
    kv_heads = shape.kv_heads // mesh.shape.get("tensor", 1)
    cells = math.prod(kv_shape(1, block_size, kv_heads, shape.head_dim, platform=mesh.devices.flat[0].platform))
    return cells * jnp.dtype(shape.dtype).itemsize * shape.num_layers


def step_bytes(shape: ModelShape, config: EngineConfig, mesh: Mesh) -> int:
    """A bound on a step's temporary bytes on each device: activations of one layer, over twice, and the logits."""
    tokens, seqs = config.max_num_batched_tokens, config.max_num_seqs
    tensor = mesh.shape.get("tensor", 1)
    widest = max(shape.token_widths)
    # Residuals whole, the wide middle in shards; as many as tests/compile_only finds enough on every chip.
    wide = 4 * shape.token_widths[0] + 5 * widest // tensor
    activations = tokens * wide * max(4, jnp.dtype(shape.dtype).itemsize)  # kernels and norms work in float32
    platform = mesh.devices.flat[0].platform
    block = kv_shape(1, config.block_size, shape.kv_heads // tensor, shape.head_dim, platform=platform)
    gathered = tokens * math.prod(block) * 4  # by the reference, which serves where no kernel does
    logits = seqs * shape.vocab // tensor * 4 * 4  # as they come, scaled, filtered, and the noise
    return activations + gathered + logits + (64 << 20)


def device_bytes(mesh: Mesh) -> int | None:
    """Bytes that the runtime may allocate on each accelerator of the mesh; None on a CPU."""
    stats = mesh.devices.flat[0].memory_stats() or {}
    return stats.get("bytes_limit")


def kv_budget(shape: ModelShape, config: EngineConfig, mesh: Mesh) -> int:
    """Bytes for the KV pool on each device. Raises `OutOfMemoryError` with what is missing."""
    slots = leaf_bytes(jax.tree.leaves(Lowering(shape, config, mesh).small_state()))
    params, temporary = leaf_bytes(shape.leaves), step_bytes(shape, config, mesh) + slots
    limit, share = device_bytes(mesh), config.gpu_memory_utilization
    if limit is None:
        limit = machine_bytes() // mesh.size
        free = int(limit * (share or 1)) - params - temporary
        budget = int(limit * CPU_KV_SHARE) if share is None else free
    else:
        temporary += MAX_STAGED_BYTES
        free = int(limit * (share or ACCELERATOR_SHARE)) - params - temporary
        budget = free
    least = block_bytes(shape, config.block_size, mesh)
    if free < least:
        raise OutOfMemoryError(
            f"the model does not fit: each device needs {params / 1e9:.2f} GB for parameters, {temporary / 1e9:.2f} GB "
            f"for a step and its slots and {least / 1e9:.3f} GB for a KV block, {(least - free) / 1e9:.2f} GB more "
            "than it may use; take more devices (mesh='tensor=N'), a smaller dtype, a higher gpu_memory_utilization, "
            "or lower max_num_batched_tokens"
        )
    return min(budget, free)


def num_blocks(shape: ModelShape, config: EngineConfig, mesh: Mesh) -> int:
    """Blocks that fit beside the parameters and the largest step, no more than all slots could ever use."""
    fit = kv_budget(shape, config, mesh) // block_bytes(shape, config.block_size, mesh)
    return coarse(max(1, min(fit, config.max_num_seqs * config.blocks_per_seq)))


def coarse(n: int) -> int:
    """`n` rounded down to five significant bits."""
    return n >> max(0, n.bit_length() - 5) << max(0, n.bit_length() - 5)
