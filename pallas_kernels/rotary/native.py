"""Rotary position embeddings for CPUs in C++: each head is read and written once."""

from functools import partial

import jax
from jaxtyping import Array, Float, Float32, Int

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.gradients import with_gradient_of
from jaxllm.pallas_kernels.rotary import reference

DTYPES = ("float32", "bfloat16")


def supports(x: Array, sin: Array, cos: Array) -> bool:
    """Whether the kernels are built and support these operands, `x[*t, ..., head_dim]`."""
    axes = sin.ndim - 2
    return x.dtype.name in DTYPES and sin.shape[:-1] == (*x.shape[:axes], 1) and native.is_built()


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


def rotate_qkv(
    qkv: Float[Array, "*t kv_heads members head_dim"],
    sin: Float32[Array, "*t 1 pairs"],
    cos: Float32[Array, "*t 1 pairs"],
    *,
    interleaved: bool = False,
    num_tokens: Int[Array, ""] | None = None,
) -> tuple[Array, Array, Array]:
    """See `reference.rotate_qkv`."""
    options = {"interleaved": interleaved}
    kernel = partial(_rotate_qkv, num_tokens=num_tokens, **options)
    return with_gradient_of(partial(reference.rotate_qkv, **options), kernel, num_tokens)(qkv, sin, cos)


def _rotate_qkv(
    qkv: Array, sin: Array, cos: Array, *, interleaved: bool, num_tokens: Array | None
) -> tuple[Array, Array, Array]:
    *tokens, kv_heads, members, head_dim = qkv.shape
    heads, pairs = (kv_heads * (members - 2), kv_heads, kv_heads), sin.shape[-1]
    flat = qkv.reshape(-1, kv_heads, members, head_dim)
    results = [jax.ShapeDtypeStruct((flat.shape[0], each, head_dim), qkv.dtype) for each in heads]
    used = native.num_rows(num_tokens, tuple(tokens))
    call = native.ffi_call("jaxllm_rotate_qkv", results)
    q, k, v = call(flat, sin.reshape(-1, pairs), cos.reshape(-1, pairs), used, interleaved=interleaved)
    return tuple(each.reshape(*tokens, -1, head_dim) for each in (q, k, v))
