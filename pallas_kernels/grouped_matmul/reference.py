"""Defines the products of groups of rows with a weight each, in jnp: tile by tile of one group's rows, so that nothing
is computed for experts that have none, nor kept for the gradient but the rows."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.pallas_kernels.matmul import reference as dense
from jaxllm.pallas_kernels.quantized_matmul import QuantizedWeight
from jaxllm.pallas_kernels.quantized_matmul import reference as quantized

_TILES = (8, 128)  # least and most rows


def product(
    x: Float[Array, "rows ..."],
    weight: Float[Array, "experts ..."] | QuantizedWeight,
    offsets: Int[Array, " experts_plus_1"],
    *,
    num_inputs: int = 1,
    out_dtype: Any = None,
) -> Float[Array, "rows ..."]:
    """The rows `offsets[e]:offsets[e + 1]` of `x[rows, *inputs]`, each times `weight[e]`: `[rows, *outputs]`.

    `weight` is dense, `[experts, *inputs, *outputs]`, or quantised, with experts before the axes of each of its parts.
    `offsets` never fall; rows before the first and from the last on are nobody's, and zeros in the result. Sums are
    float32, rounded to the dtype of x or, if it is given, to `out_dtype`.
    """
    num_rows, experts = len(x), len(offsets) - 1
    if not num_rows:
        return _of_expert(x, weight, jnp.zeros((), jnp.int32), num_inputs, out_dtype)
    rows = min(max(_TILES[0], 1 << (num_rows // experts).bit_length()), _TILES[1])
    tiles = -(-jnp.diff(offsets) // rows)  # of each expert
    ends = jnp.cumsum(tiles)
    index = jnp.arange(-(-num_rows // rows) + experts, dtype=jnp.int32)
    expert = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    expert = jnp.minimum(expert, experts - 1)  # of tiles past the last
    first = offsets[expert] + (index - (ends - tiles)[expert]) * rows
    taken = jnp.minimum(first[:, None] + jnp.arange(rows, dtype=first.dtype)[None, :], num_rows - 1)

    @jax.checkpoint  # its residuals would be a copy of the weight for each tile
    def multiply(x: Array, weight: Any, expert: Array, taken: Array) -> Array:
        return _of_expert(x[taken], weight, expert, num_inputs, out_dtype)

    _, y = jax.lax.scan(lambda _, tile: (None, multiply(x, weight, *tile)), None, (expert, taken))
    row = jnp.arange(num_rows, dtype=jnp.int32)
    owner = jnp.searchsorted(offsets, row, side="right", method="compare_all").astype(jnp.int32) - 1
    owner = jnp.clip(owner, 0, experts - 1)
    inner = row - offsets[owner]
    y = y[((ends - tiles)[owner] + inner // rows), inner % rows]
    return jnp.where(jnp.expand_dims(is_owned(num_rows, offsets), range(1, y.ndim)), y, jnp.zeros((), y.dtype))


def is_owned(num_rows: int, offsets: Int[Array, " experts_plus_1"]) -> Bool[Array, " rows"]:
    """Whether each row is an expert's."""
    row = jnp.arange(num_rows, dtype=jnp.int32)
    return (row >= offsets[0]) & (row < offsets[-1])


def _of_expert(x: Array, weight: Any, expert: Array, num_inputs: int, out_dtype: Any) -> Array:
    one = jax.tree.map(partial(jax.lax.dynamic_index_in_dim, index=expert, keepdims=False), weight)
    if isinstance(one, QuantizedWeight):
        return quantized.product(x, one, num_inputs=num_inputs, out_dtype=out_dtype)
    outputs = one.shape[num_inputs:]
    y = dense.einsum("...a,ab->...b", x.reshape(len(x), -1), one.reshape(-1, math.prod(outputs)), out_dtype)
    return y.reshape(len(x), *outputs)
