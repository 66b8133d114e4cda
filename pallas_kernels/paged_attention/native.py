"""Ragged paged attention for CPUs in C++: decodes and chunks in one call, K and V written in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Num

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.paged_attention.batch import AnyArray, PagedBatch

DTYPES = ("float32", "bfloat16")


def supports(q: AnyArray, k: AnyArray, v: AnyArray, kv_pool: AnyArray, *others: Any, **options: Any) -> bool:
    """Whether the kernel is built and supports these dtypes: one for all, or a pool of 8 bits."""
    own = q.dtype.name in DTYPES and q.dtype == k.dtype == v.dtype
    return (
        own
        and kv_pool.dtype in (q.dtype, jnp.int8, jnp.float8_e4m3fn)
        and kv_pool.shape[-1] == q.shape[-1]
        and native.is_built()
    )


def ragged_paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv_pool: Num[Array, "blocks 2 kv_heads block_size head_dim"],
    batch: PagedBatch,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    kv_scales: Float32[Array, "2 kv_heads"] | None = None,
    batch_invariant: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], Num[Array, "blocks 2 kv_heads block_size head_dim"]]:
    """See `reference.ragged_paged_attention`. Lengths or blocks out of range are an error, and padding comes out 0.
    `batch_invariant`: each token's result is the same to the bit, whatever tokens it is computed with."""
    results = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(kv_pool.shape, kv_pool.dtype))
    call = native.ffi_call("jaxllm_paged_attention", results, input_output_aliases={3: 1})
    ints = (x.astype(jnp.int32) for x in batch)
    floats = (jnp.zeros(0) if x is None else x.astype(jnp.float32).reshape(-1) for x in (sinks, kv_scales))
    return call(
        q,
        k,
        v,
        kv_pool,
        *ints,
        *floats,
        scale=np.float32(scale),
        causal=causal,
        window=np.int64(sliding_window or 0),
        soft_cap=np.float32(soft_cap or 0),
        batch_invariant=batch_invariant,
    )
