"""Ragged paged attention: KV layout, KV write and attention, owned together.

Callers import from here; nobody else asks which platform this is.
"""

import functools
import importlib
import logging
from types import ModuleType
from typing import Any

import jax

from jaxllm.pallas_kernels import dispatch
from jaxllm.pallas_kernels.paged_attention.reference import is_quantised

log = logging.getLogger(__name__)

IMPLEMENTATIONS = ("reference", "cpu", "native", "tpu", "gpu")  # modules; imported if chosen, as Pallas takes a while
# Platform -> implementations; the first whose `supports`, if it has limits, takes the call.
PREFERRED = {"cpu": ("native", "cpu"), "tpu": ("tpu",), "gpu": ("gpu",)}

# Logical axes of a layer's pool. Head-major inside a block: a block's keys of one head are contiguous, so
# that a block is a matrix operand as it lies there (on a CPU ten times faster than token-major blocks).
KV_AXES = (None, None, "kv_heads", None, None)
TPU_LANES = 128  # a row of a TPU's memory tile, which the last axis fills whether it holds anything or not


def kv_shape(num_blocks: int, block_size: int, kv_heads: int, head_dim: int, *, platform: str) -> tuple[int, ...]:
    """Shape of one layer's pool `[blocks, k and v, kv_heads, block_size, padded head_dim]` on devices of `platform`,
    `kv_heads` per shard."""
    lanes = TPU_LANES if platform == "tpu" else 1
    return (num_blocks, 2, kv_heads, block_size, -(-head_dim // lanes) * lanes)


def ragged_paged_attention(*args: Any, implementation: str = "auto", platform: str | None = None, **kwargs: Any):
    """Writes the step's K and V into the pool and attends; see `reference.ragged_paged_attention`.

    `platform` is that of the devices the arrays are on (None: JAX's default). Raises `ValueError` if there are
    `kv_scales` but a pool that needs none, or the reverse.
    """
    if implementation == "auto":
        implementation = preferred(platform or jax.default_backend(), *args, **kwargs)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {implementation!r}; have {sorted(IMPLEMENTATIONS)}")
    dtype, has_scales = args[3].dtype, kwargs.get("kv_scales") is not None
    if is_quantised(dtype) != has_scales:
        raise ValueError(f"a KV pool of {dtype} {'takes no' if has_scales else 'needs'} kv_scales")
    fn = _module(implementation).ragged_paged_attention
    dispatch.announce(fn)
    return fn(*args, **kwargs)


def preferred(platform: str, *args: Any, **kwargs: Any) -> str:
    """The implementation that takes a call with these arguments on devices of `platform`."""
    names = PREFERRED.get(platform, ())
    for name in names:
        supports = getattr(_module(name), "supports", None)
        if supports is None or supports(*args[:4], block_tables=args[4], **kwargs):
            return name
    if names:
        arrays = {"q": args[0], "kv_pool": args[3], "block_tables": args[4]} | kwargs
        _announce_refusal(platform, ", ".join(f"{name} {_describe(x)}" for name, x in arrays.items()))
    return "reference"


@functools.cache
def _announce_refusal(platform: str, call: str) -> None:
    log.warning("no %s kernel supports %s: the reference serves, which is far slower", platform, call)


def _describe(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else str(x)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{name}")
