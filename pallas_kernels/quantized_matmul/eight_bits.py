"""Products whose rows are rounded to eight bits: both operands are then what matrix units multiply fastest."""

import string
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.paged_attention.reference import quantise
from jaxllm.pallas_kernels.quantized_matmul.weight import QuantizedWeight

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def supports(weight: QuantizedWeight, activations: str | None) -> bool:
    """Whether rows may be rounded to what the codes are, and all inputs share a scale."""
    return not weight.is_grouped and activations in LARGEST and weight.codes.dtype == jnp.dtype(activations)


def product(
    x: Float[Array, "..."], weight: QuantizedWeight, *, num_inputs: int, out_dtype: Any = None
) -> Float[Array, "..."]:
    """See `reference.product`. Each row is rounded, to the nearest, by a scale that its largest number needs."""
    num_outputs, name = weight.scales.ndim, weight.codes.dtype.name
    rows = x.reshape(*x.shape[: x.ndim - num_inputs], -1).astype(jnp.float32)
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    scale = jnp.where(largest == 0, 1.0, largest / LARGEST[name])  # a row of zeros: any
    codes = weight.codes.reshape(*weight.codes.shape[:num_outputs], -1)  # one axis to sum over, and the last one
    outputs = string.ascii_lowercase[1:][:num_outputs]
    sums_in = jnp.int32 if name == "int8" else jnp.float32
    rounded = quantise(rows, scale, weight.codes.dtype)
    y = jnp.einsum(f"...a,{outputs}a->...{outputs}", rounded, codes, preferred_element_type=sums_in)
    y = y.astype(jnp.float32) * scale.reshape(*scale.shape[:-1], *(1,) * num_outputs)
    y = y * jnp.broadcast_to(weight.scales.astype(jnp.float32), y.shape)
    y = y if weight.outer is None else y * jnp.broadcast_to(weight.outer, y.shape)
    return y.astype(out_dtype or x.dtype)
