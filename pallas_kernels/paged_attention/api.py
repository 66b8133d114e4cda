"""Ragged paged attention: the KV layout, the KV write and attention, for every platform.

Callers import from here; only this module chooses by platform.
"""

import functools
import importlib
import logging
from types import ModuleType
from typing import Any

import jax
from jaxtyping import Array, Float, Float32, Int, Num

from jaxllm.pallas_kernels import dispatch
from jaxllm.pallas_kernels.paged_attention.reference import is_quantised

log = logging.getLogger(__name__)

IMPLEMENTATIONS = ("reference", "cpu", "native", "tpu", "gpu")  # modules, imported when chosen: Pallas is slow
# Platform -> implementations; the first one without `supports`, or whose `supports` accepts the call, serves.
PREFERRED = {"cpu": ("native", "cpu"), "tpu": ("tpu",), "gpu": ("gpu",)}

# Logical axes of a layer's pool. Blocks are head-major: the keys of one head are contiguous, so that a block is a
# matrix operand in place (on a CPU ten times faster than token-major blocks).
KV_AXES = (None, None, "kv_heads", None, None)
TPU_LANES = 128  # a row of a TPU's memory tile; the last axis is padded to it


def kv_shape(num_blocks: int, block_size: int, kv_heads: int, head_dim: int, *, platform: str) -> tuple[int, ...]:
    """Shape of one layer's pool `[blocks, k and v, kv_heads, block_size, padded head_dim]` on devices of `platform`,
    `kv_heads` per shard."""
    lanes = TPU_LANES if platform == "tpu" else 1
    return (num_blocks, 2, kv_heads, block_size, -(-head_dim // lanes) * lanes)


def ragged_paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv_pool: Num[Array, "blocks 2 kv_heads block_size padded_head_dim"],
    block_tables: Int[Array, "seqs blocks_per_seq"],
    cu_q_lens: Int[Array, " seqs_plus_1"],
    kv_lens: Int[Array, " seqs"],
    distribution: Int[Array, "2"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    kv_scales: Float32[Array, "2 kv_heads"] | None = None,
    implementation: str = "auto",
    platform: str | None = None,
    **own_options: Any,
) -> tuple[Float[Array, "tokens heads head_dim"], Num[Array, "blocks 2 kv_heads block_size padded_head_dim"]]:
    """Writes the step's K and V into the pool and attends: returns the attention and the new pool.

    `reference.ragged_paged_attention` defines the arguments. `implementation` is a name of `IMPLEMENTATIONS`, or
    "auto" for the preferred one of `platform`, that of the arrays' devices (None: JAX's default). Raises `ValueError`
    for an unknown name, and unless `kv_scales` are given for a quantised pool and for no other. `own_options` are those
    of one implementation, such as `interpret`.
    """
    arrays = (q, k, v, kv_pool, block_tables, cu_q_lens, kv_lens, distribution)
    limits = {"sliding_window": sliding_window, "soft_cap": soft_cap, "sinks": sinks, "kv_scales": kv_scales}
    options = {"scale": scale} | {name: value for name, value in limits.items() if value is not None} | own_options
    if implementation == "auto":
        implementation = preferred(platform or jax.default_backend(), *arrays, **options)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {implementation!r}; have {sorted(IMPLEMENTATIONS)}")
    if is_quantised(kv_pool.dtype) != (kv_scales is not None):
        verb = "needs" if kv_scales is None else "takes no"
        raise ValueError(f"a KV pool of {kv_pool.dtype} {verb} kv_scales")
    fn = _module(implementation).ragged_paged_attention
    dispatch.announce(fn)
    return fn(*arrays, **options)


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
