"""Roundings that are the same to the bit in every program: XLA leaves out those between operations that it happens to
run together. What else it does element by element is the same anywhere, but where it makes one operation of a product
and a sum: `fuses_products`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def rounded(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """float32 x in `dtype`, float32 or bfloat16, and rounded to it even where XLA keeps it in float32."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def fuses_products(device: jax.Device) -> bool:
    """Whether XLA makes one operation, rounded once, of a product and a sum on `device`, which is tried."""
    x = jax.device_put(np.float32(1 + 2**-12), device)
    rest = jax.jit(lambda x: x * x - np.float32(1 + 2**-11))(x)  # 2^-24 if the product is not rounded
    return bool(jax.device_get(rest) != 0)
