"""A weight of few bits, as all implementations have it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


def stored_bytes(shape: Sequence[int], dtype: Any) -> int:
    """That an array takes on a device, where two values of four bits share a byte."""
    dtype = jnp.dtype(dtype)
    kind = (
        jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else None
    )
    bits = 8 * dtype.itemsize if kind is None else kind(dtype).bits
    return -(-math.prod(shape) * bits // 8)


class QuantizedWeight(NamedTuple):
    """`(codes * scales + offsets) * outer`, in one of two layouts.

    By output: codes `[*outputs, *inputs]`, scales `[*outputs]`, no offsets. A dot product with a code of 8 bits sums
    over its last axes, as GPUs want it.
    By group, of neighbours on the innermost axis of the inputs, whose size is then the number of groups: codes
    `[*inputs, group, *outputs]`, scales `[*inputs, 1, *outputs]`, offsets likewise.
    """

    codes: Array  # int8, int4, uint4, float8_e4m3fn or float4_e2m1fn
    scales: Float[Array, "..."]  # float32, bfloat16 or float16; of groups also float8_e4m3fn or float8_e8m0fnu
    offsets: Float[Array, "..."] | None = None  # as scales, in float32
    outer: Float[Array, "*outputs"] | None = None  # float32

    @property
    def is_grouped(self) -> bool:
        return self.scales.ndim == self.codes.ndim

    def dense(self, num_inputs: int) -> Float[Array, "..."]:
        """The values that it stands for, float32 `[*inputs, *outputs]`: each rounded once."""
        values = self.codes.astype(jnp.float32)
        scales = self.scales.astype(jnp.float32)
        if self.is_grouped:
            values = values * scales
            if self.offsets is not None:
                values = values + self.offsets
            shape = values.shape
            values = values.reshape(*shape[: num_inputs - 1], -1, *shape[num_inputs + 1 :])
        else:
            num_outputs = self.scales.ndim
            values = values * scales.reshape(*scales.shape, *(1,) * num_inputs)
            values = jnp.moveaxis(values, range(num_outputs), range(num_inputs, num_inputs + num_outputs))
        return values if self.outer is None else values * jnp.broadcast_to(self.outer, values.shape)
