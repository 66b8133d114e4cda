"""Rows of experts and their weights, and what their products are, for the tests of the kernels."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.pallas_kernels.quantized_matmul import QuantizedWeight
from tests.pallas_kernels.test_quantized_matmul import TOLERANCE, weight_of

# Rows of each expert; before the first is what `offsets` leaves to nobody, and after the last.
ROUTINGS = {
    "a row each": (0, (1, 0, 1, 1, 0), 0),
    "of one": (0, (0, 0, 23, 0), 0),
    "late and early": (5, (3, 0, 17, 1), 6),
    "many": (2, (0, 61, 9, 150), 35),
    "none": (4, (0, 0, 0), 5),
}
# Inputs and outputs; None for dense, or the dtype of codes, and group, dtype of scales, offsets, outer.
WEIGHTS = {
    "dense": ((64, (32,)), None),
    "dense, gate and up": ((64, (2, 128)), None),
    "int8 by output": ((64, (2, 32)), ("int8", None, "float32", False, True)),
    "float8 by output": ((128, (64,)), ("float8_e4m3fn", None, "float32", False, False)),
    "int4 by group": ((64, (2, 32)), ("int4", 32, "bfloat16", False, False)),
    "uint4 by group": ((64, (32,)), ("uint4", 16, "float16", True, True)),
    "float4 by group": ((96, (2, 32)), ("float4_e2m1fn", 32, "float8_e8m0fnu", False, False)),
    "float4 by small group": ((64, (64,)), ("float4_e2m1fn", 16, "float8_e4m3fn", False, True)),
}


@dataclass(frozen=True)
class Case:
    x: jax.Array  # NaN in rows of nobody
    weight: jax.Array | QuantizedWeight  # NaN, where there is one, of experts without rows
    offsets: jax.Array
    want: np.ndarray
    scale: np.ndarray  # sums of products' magnitudes

    def check(self, got: jax.Array) -> None:
        assert got.dtype == self.x.dtype and got.shape == self.want.shape
        error = np.abs(np.asarray(got, np.float64) - self.want)
        assert (error <= TOLERANCE[self.x.dtype.name] * self.scale).all()


def case(weight: str, routing: str, dtype: str = "float32", seed: int = 0) -> Case:
    (inputs, outputs), form = WEIGHTS[weight]
    return make(inputs, outputs, form, *ROUTINGS[routing], dtype, seed)


def make(inputs, outputs, form, before, lengths, after, dtype="float32", seed=0) -> Case:
    rng, experts = np.random.default_rng(seed), len(lengths)
    total = before + sum(lengths) + after
    x = rng.normal(size=(total, inputs)).astype(np.float32)
    x[:before] = x[total - after :] = np.nan
    x = jnp.asarray(x, dtype)
    is_idle = np.array(lengths) == 0
    if form is None:
        held = jnp.asarray(rng.normal(size=(experts, inputs, *outputs)), dtype)
        dense = np.asarray(held, np.float64)
        held = held.at[is_idle].set(jnp.nan)
    else:
        codes, group, scales, has_offsets, has_outer = form
        each = [weight_of(codes, (inputs,), outputs, group, scales, has_offsets, has_outer, i) for i in range(experts)]
        held = jax.tree.map(lambda *parts: jnp.stack(parts), *each)
        dense = np.stack([np.asarray(weight.dense(1), np.float64) for weight in each])
        scales = jnp.where(is_idle.reshape(-1, *[1] * (held.scales.ndim - 1)), jnp.nan, held.scales.astype(jnp.float32))
        held = held._replace(scales=scales.astype(held.scales.dtype))
    offsets = before + np.cumsum([0, *lengths])
    want, scale = np.zeros((2, total, math.prod(outputs)))
    for expert, weight in enumerate(dense.reshape(experts, inputs, -1)):
        rows = slice(offsets[expert], offsets[expert + 1])
        some = np.asarray(x[rows], np.float64)
        want[rows], scale[rows] = some @ weight, np.abs(some) @ np.abs(weight)
    want, scale = (array.reshape(total, *outputs) for array in (want, scale))
    return Case(x, held, jnp.asarray(offsets, jnp.int32), want, scale)
