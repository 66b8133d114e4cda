"""Sampling in C++: reads each row a few times from the cache, with as many threads as pay."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.gradients import with_gradient_of
from jaxllm.pallas_kernels.sampling import reference
from jaxllm.pallas_kernels.sampling.reference import Best, Draws, Rows, log_min_p


def supports(logits: Array, *others: Any, **options: Any) -> bool:
    return logits.dtype == jnp.float32 and native.is_built()


def normalize(logits: Float[Array, "rows vocab"], *, num_rows: Int[Array, ""] | None = None) -> Rows:
    """See `reference.normalize`."""
    return with_gradient_of(reference.normalize, partial(_normalize, num_rows=num_rows), num_rows)(logits)


def _normalize(logits: Array, *, num_rows: Array | None) -> Rows:
    column = jax.ShapeDtypeStruct(logits.shape[:1], jnp.float32)
    call = native.ffi_call("jaxllm_normalize", [column, column])
    return Rows(*call(logits, native.num_rows(num_rows, logits.shape[:1])))


def draw(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, " rows"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
    keys: UInt32[Array, "rows 2"],
) -> Draws:
    """See `reference.draw`. Its logarithms are good to a few units in the last place, so that of two tokens nearly as
    good it may draw the other; that apart, the draws are the same."""
    results = [jax.ShapeDtypeStruct(logits.shape[:1], dtype) for dtype in (jnp.int32, jnp.float32)]
    call = native.ffi_call("jaxllm_draw", results)
    partitionable = jax.config.jax_threefry_partitionable
    return Draws(*call(logits, temperature, top_k, top_p, log_min_p(min_p), keys, partitionable=partitionable))


def best(
    scores: Float[Array, "rows vocab"],
    logits: Float[Array, "rows vocab"],
    tokens: Int[Array, "rows tokens"],
    *,
    k: int,
    num_rows: Int[Array, ""] | None = None,
) -> Best:
    """See `reference.best`."""
    rows, columns = logits.shape[0], k + tokens.shape[1]
    shapes = ((k, jnp.int32), (k, jnp.float32), (columns, jnp.float32), (columns, jnp.int32))
    results = [jax.ShapeDtypeStruct((rows, width), dtype) for width, dtype in shapes]
    return Best(*native.ffi_call("jaxllm_best", results)(scores, logits, tokens, native.num_rows(num_rows, (rows,))))
