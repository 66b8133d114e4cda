"""Rotary position embeddings for CPUs in C++: each head is read and written once."""

import jax
from jaxtyping import Array, Float, Float32

from jaxllm.pallas_kernels import native

DTYPES = ("float32", "bfloat16")


def supports(x: Array, sin: Array, cos: Array) -> bool:
    """Whether the kernel is built and supports these operands: flat tokens."""
    return x.dtype.name in DTYPES and x.ndim == 3 and sin.shape == (len(x), 1, sin.shape[-1]) and native.is_built()


def rotate(
    x: Float[Array, "t heads head_dim"],
    sin: Float32[Array, "t 1 pairs"],
    cos: Float32[Array, "t 1 pairs"],
    *,
    interleaved: bool = False,
) -> Float[Array, "t heads head_dim"]:
    """See `reference.rotate`."""
    call = native.ffi_call("jaxllm_rotate", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, sin[:, 0], cos[:, 0], interleaved=interleaved)
