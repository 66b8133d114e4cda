"""Gated activations for CPUs in C++: in float32, rounded once."""

import jax
from jaxtyping import Array, Float

from jaxllm.pallas_kernels import native

DTYPES = ("float32", "bfloat16")
KINDS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def supports(both: Array, activation: str) -> bool:
    """Whether the kernel is built and has this activation of flat tokens."""
    return both.dtype.name in DTYPES and both.ndim == 3 and activation in KINDS and native.is_built()


def gated(both: Float[Array, "t 2 width"], activation: str) -> Float[Array, "t width"]:
    """See `reference.gated`."""
    result = jax.ShapeDtypeStruct((both.shape[0], both.shape[2]), both.dtype)
    return native.ffi_call("jaxllm_gated", result)(both, is_gelu=KINDS[activation] == "gelu_tanh")
