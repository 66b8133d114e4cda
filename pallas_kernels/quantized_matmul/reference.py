"""Defines the product with a quantised weight, in jnp. Scales come after the sums, so that XLA reads the codes as they
are and converts them within the product: of a scaled weight it would make a copy of 16 bits."""

import string
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.quantized_matmul.weight import QuantizedWeight


def product(
    x: Float[Array, "..."],
    weight: QuantizedWeight,
    *,
    num_inputs: int,
    out_dtype: Any = None,
    activations: str | None = None,
    num_tokens: Any = None,
) -> Float[Array, "..."]:
    """`x[..., *inputs]`, summed over its last `num_inputs` axes with `weight`: `[..., *outputs]`.

    Sums are float32, rounded to the dtype of x or, if it is given, to `out_dtype`. `activations` ("int8" or
    "float8_e4m3fn") is what an implementation may round each row of x to, by a scale of its own; this one does not.
    """
    del activations
    codes, letters = weight.codes.astype(x.dtype), string.ascii_lowercase
    num_outputs = codes.ndim - num_inputs - weight.is_grouped
    inputs, outputs = letters[:num_inputs], letters[num_inputs:][:num_outputs]
    rows = x.shape[: x.ndim - num_inputs]
    if weight.is_grouped:
        groups = weight.scales.shape[:num_inputs]
        x = x.reshape(*rows, *groups[:-1], groups[-1], -1)
        products = partial(jnp.einsum, f"...{inputs}z,{inputs}z{outputs}->...{inputs}{outputs}")
        parts = jax.lax.platform_dependent(
            x,
            codes,
            cpu=lambda x, codes: products(x.astype(jnp.float32), codes.astype(jnp.float32)),  # it has no others
            default=partial(products, preferred_element_type=jnp.float32),
        )
        scales = jnp.squeeze(weight.scales, num_inputs).astype(jnp.float32)
        y = jnp.sum(parts * jnp.broadcast_to(scales, parts.shape), axis=range(len(rows), len(rows) + num_inputs))
        if weight.offsets is not None:
            sums = jnp.sum(x, axis=-1, dtype=jnp.float32)
            offsets = jnp.squeeze(weight.offsets, num_inputs)
            y = y + jnp.einsum(  # offsets may be far larger than what remains of them and the codes: no bfloat16 here
                f"...{inputs},{inputs}{outputs}->...{outputs}", sums, offsets, precision="high"
            )
    else:
        y = jnp.einsum(f"...{inputs},{outputs}{inputs}->...{outputs}", x, codes, preferred_element_type=jnp.float32)
        y = y * jnp.broadcast_to(weight.scales.astype(jnp.float32), y.shape)
    y = y if weight.outer is None else y * jnp.broadcast_to(weight.outer, y.shape)
    return y.astype(out_dtype or x.dtype)
