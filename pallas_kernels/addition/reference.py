"""Defines the addition of features."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.rounding import rounded


def add(x: Float[Array, "*t width"], h: Float[Array, "*t width"], *, rounds_once: bool) -> Float[Array, "*t width"]:
    """`x + h` in their dtype; with `rounds_once` in float32, and rounded at the end whatever XLA runs it with."""
    if not rounds_once:
        return x + h
    return rounded(x.astype(jnp.float32) + h.astype(jnp.float32), x.dtype)
