"""Defines root mean square normalisation, in jnp."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from jaxllm.pallas_kernels.rounding import rounded
from jaxllm.pallas_kernels.row_sums import row_sums


def rms_norm(
    x: Float[Array, "*t width"],
    added: Float[Array, "*t width"] | None,
    scale: Float[Array, " width"],
    *,
    eps: float,
    unit_offset: bool = False,
    scales_first: bool = False,
    fixed_order: bool = False,
    num_tokens: Any = None,
    placement: Placement = UNPLACED,
) -> tuple[Float[Array, "*t width"], Float[Array, "*t width"]]:
    """`x + added` (x, if that is None), and what it is over its root mean square, in float32, times `scale`.

    With `scales_first` the scale is applied before the result is rounded to the dtype of x. With `unit_offset` it is
    stored as its difference from one. With `fixed_order` a row is the same to the bit for any number of rows.
    """
    del num_tokens  # padding costs no kernel of its own
    if added is not None:
        x = rounded(x.astype(jnp.float32) + added.astype(jnp.float32), x.dtype) if fixed_order else x + added
    x32 = x.astype(jnp.float32)
    squares = jnp.square(x32)
    if fixed_order:
        mean = row_sums(squares, placement=placement) / x.shape[-1]
    else:
        mean = jnp.mean(squares, axis=-1, keepdims=True)
    y = x32 * jax.lax.rsqrt(mean + eps)
    if scales_first:
        y = y * jnp.broadcast_to(scale.astype(jnp.float32) + float(unit_offset), y.shape)
        return x, rounded(y, x.dtype) if fixed_order else y.astype(x.dtype)
    if fixed_order:
        scale = jnp.broadcast_to(scale.astype(x.dtype).astype(jnp.float32), y.shape)
        return x, rounded(rounded(y, x.dtype).astype(jnp.float32) * scale, x.dtype)
    return x, y.astype(x.dtype) * jnp.broadcast_to(scale.astype(x.dtype), y.shape)
