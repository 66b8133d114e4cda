"""What a product with a weight means, in jnp; what XLA makes of it is best where many rows share the weight."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def einsum(equation: str, x: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """`jnp.einsum`, of equations "...C,CO->...O" or "...C,OC->...O": C and O stand for some letters each."""
    return jnp.einsum(equation, x, weight)
