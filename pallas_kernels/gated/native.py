"""Gated activations for CPUs in C++: in float32, rounded once."""

from functools import partial

import jax
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.gated import reference
from jaxllm.pallas_kernels.gradients import with_gradient_of

DTYPES = ("float32", "bfloat16")
KINDS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def supports(both: Array, activation: str) -> bool:
    """Whether the kernel is built and has this activation."""
    return both.dtype.name in DTYPES and activation in KINDS and native.is_built()


def gated(
    both: Float[Array, "*t 2 width"], activation: str, *, num_tokens: Int[Array, ""] | None = None
) -> Float[Array, "*t width"]:
    """See `reference.gated`."""
    kernel = partial(_gated, is_gelu=KINDS[activation] == "gelu_tanh", num_tokens=num_tokens)
    return with_gradient_of(partial(reference.gated, activation=activation), kernel, num_tokens)(both)


def _gated(both: Array, *, is_gelu: bool, num_tokens: Array | None) -> Array:
    flat = both.reshape(-1, *both.shape[-2:])
    result = jax.ShapeDtypeStruct((flat.shape[0], flat.shape[2]), both.dtype)
    made = native.ffi_call("jaxllm_gated", result)(flat, native.num_rows(num_tokens, both.shape[:-2]), is_gelu=is_gelu)
    return made.reshape(*both.shape[:-2], both.shape[-1])
