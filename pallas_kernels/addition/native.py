"""The addition of features for CPUs in C++, which leaves padding out, and code that XLA has not optimised."""

import math

import jax
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.rms_norm.native import DTYPES


def supports(x: Array, h: Array, num_tokens: Array | None) -> bool:
    """Whether the kernel is built and supports these dtypes. Where nothing pads, XLA adds on the way of something
    else."""
    same = x.dtype == h.dtype and x.shape == h.shape
    return num_tokens is not None and same and x.dtype.name in DTYPES and native.is_built()


def add(
    x: Float[Array, "*t width"], h: Float[Array, "*t width"], *, num_tokens: Int[Array, ""]
) -> Float[Array, "*t width"]:
    """See `reference.add`: in float32, rounded once."""
    flat = (math.prod(x.shape[:-1]), x.shape[-1])
    call = native.ffi_call("jaxllm_add", jax.ShapeDtypeStruct(flat, x.dtype))
    return call(x.reshape(flat), h.reshape(flat), native.num_rows(num_tokens, x.shape[:-1])).reshape(x.shape)
