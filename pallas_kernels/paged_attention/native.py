"""Ragged paged attention for CPUs in C++: decodes and chunks in one call, K and V written in place."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels import native

DTYPES = ("float32", "bfloat16")


def supports(q: Array, k: Array, v: Array, kv_pool: Array) -> bool:
    """Whether the kernel is there, and made for these dtypes: one for all."""
    return kv_pool.dtype.name in DTYPES and all(x.dtype == kv_pool.dtype for x in (q, k, v)) and native.is_built()


def ragged_paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv_pool: Float[Array, "blocks 2 kv_heads block_size head_dim"],
    block_tables: Int[Array, "seqs blocks_per_seq"],
    cu_q_lens: Int[Array, " seqs_plus_1"],
    kv_lens: Int[Array, " seqs"],
    distribution: Int[Array, "2"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "blocks 2 kv_heads block_size head_dim"]]:
    """See `reference.ragged_paged_attention`. Lengths or blocks out of range are an error, and padding comes out 0."""
    results = (jax.ShapeDtypeStruct(q.shape, v.dtype), jax.ShapeDtypeStruct(kv_pool.shape, kv_pool.dtype))
    call = native.ffi_call("jaxllm_paged_attention", results, input_output_aliases={3: 1})
    ints = (x.astype(jnp.int32) for x in (block_tables, cu_q_lens, kv_lens, distribution))
    return call(
        q, k, v, kv_pool, *ints,
        scale=np.float32(scale), window=np.int64(sliding_window or 0), soft_cap=np.float32(soft_cap or 0),
    )  # fmt: skip
