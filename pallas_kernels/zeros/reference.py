"""Defines arrays of zeros."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Shaped


def zeros(shape: Sequence[int], dtype: Any) -> Shaped[Array, "..."]:
    """Zeros of this shape."""
    return jnp.zeros(shape, dtype)
