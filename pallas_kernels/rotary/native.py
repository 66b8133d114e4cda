"""Rotary position embeddings for CPUs in C++: each head is read and written once."""

from functools import partial

import jax
from jaxtyping import Array, Float, Float32, Int

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.gradients import with_gradient_of
from jaxllm.pallas_kernels.rotary import reference

DTYPES = ("float32", "bfloat16")


def supports(x: Array, sin: Array, cos: Array) -> bool:
    """Whether the kernel is built and supports these operands."""
    return x.dtype.name in DTYPES and sin.shape[:-1] == (*x.shape[:-2], 1) and native.is_built()


def rotate(
    x: Float[Array, "*t heads head_dim"],
    sin: Float32[Array, "*t 1 pairs"],
    cos: Float32[Array, "*t 1 pairs"],
    *,
    interleaved: bool = False,
    num_tokens: Int[Array, ""] | None = None,
) -> Float[Array, "*t heads head_dim"]:
    """See `reference.rotate`."""
    options = {"interleaved": interleaved}
    kernel = partial(_rotate, num_tokens=num_tokens, **options)
    return with_gradient_of(partial(reference.rotate, **options), kernel, num_tokens)(x, sin, cos)


def _rotate(x: Array, sin: Array, cos: Array, *, interleaved: bool, num_tokens: Array | None) -> Array:
    flat, pairs = x.reshape(-1, *x.shape[-2:]), sin.shape[-1]
    call = native.ffi_call("jaxllm_rotate", jax.ShapeDtypeStruct(flat.shape, x.dtype))
    used = native.num_rows(num_tokens, x.shape[:-2])
    return call(flat, sin.reshape(-1, pairs), cos.reshape(-1, pairs), used, interleaved=interleaved).reshape(x.shape)
