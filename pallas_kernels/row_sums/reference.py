"""Sums in a fixed order of single additions, which XLA keeps."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float


def row_sums(x: Float[Array, "*rows d"]) -> Float[Array, "*rows 1"]:
    """As many partial sums as the root of the axis' length, which are added by halves."""
    size = x.shape[-1]
    lanes = 1 << math.isqrt(max(0, size - 1)).bit_length()
    if missing := -size % lanes:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    total = x[..., :lanes]
    for start in range(lanes, x.shape[-1], lanes):
        total = total + x[..., start : start + lanes]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total
