"""Ragged paged attention: KV layout, KV write and attention, owned together.

Callers import from here; nobody else asks which platform this is.
"""

from typing import Any

import jax

from jaxllm.pallas_kernels import dispatch
from jaxllm.pallas_kernels.paged_attention import cpu, native, reference

IMPLEMENTATIONS = {
    "reference": reference.ragged_paged_attention, "cpu": cpu.ragged_paged_attention,
    "native": native.ragged_paged_attention,
}  # fmt: skip
PREFERRED = {"cpu": "cpu"}  # platform -> implementation

# Logical axes of a layer's pool. Head-major inside a block: a block's keys of one head are contiguous, so
# that a block is a matrix operand as it lies there (on a CPU ten times faster than token-major blocks).
KV_AXES = (None, None, "kv_heads", None, None)


def kv_shape(num_blocks: int, block_size: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Shape of one layer's pool `[blocks, k and v, kv_heads, block_size, head_dim]`, `kv_heads` per shard."""
    return (num_blocks, 2, kv_heads, block_size, head_dim)


def ragged_paged_attention(*args: Any, implementation: str = "auto", platform: str | None = None, **kwargs: Any):
    """Writes the step's K and V into the pool and attends; see `reference.ragged_paged_attention`.

    `platform` is that of the devices the arrays are on.
    """
    preferred = PREFERRED
    if implementation == "auto" and (platform or jax.default_backend()) == "cpu" and native.supports(*args[:4]):
        preferred = {"cpu": "native"}
    return dispatch.choose(IMPLEMENTATIONS, preferred, implementation, platform)(*args, **kwargs)
