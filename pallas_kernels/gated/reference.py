"""Defines gated activations, in jnp."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.matmul import reference as matmul
from jaxllm.pallas_kernels.rounding import rounded

ACTIVATIONS = {  # by their names in `config.json`
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
}


def gated(
    both: Float[Array, "*t 2 width"], activation: str, *, rounds_once: bool = False, num_tokens: Any = None
) -> Float[Array, "*t width"]:
    """The activation of the first half times the second; with `rounds_once` in float32, and rounded at the end."""
    del num_tokens  # padding costs no kernel of its own
    if rounds_once:
        return rounded(gated(both.astype(jnp.float32), activation), both.dtype)
    return ACTIVATIONS[activation](both[..., 0, :]) * both[..., 1, :]


def gated_product(
    x: Float[Array, "*t d"], weight: Float[Array, "d 2 width"], activation: str
) -> Float[Array, "*t width"]:
    """`gated` of the product."""
    return gated(matmul.einsum("...a,abc->...bc", x, weight), activation)
