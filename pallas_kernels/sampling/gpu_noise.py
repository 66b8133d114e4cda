"""Gumbel noise inside of a GPU kernel: the bits that jax.random makes, and a logarithm that is good near 1 as well."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

MOST_NOISE = 16.0  # from 23 random bits it is at most 15.95
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
TINY = 1.1754943508222875e-38


class Noise(NamedTuple):
    """Of a row of `vocab` tokens, by its Threefry-2x32 key (Salmon et al., SC 2011) and the tokens' ids."""

    key0: Array  # uint32
    key1: Array
    vocab: int
    partitionable: bool  # which bits jax.random makes

    def gumbel(self, ids: Array) -> Array:
        bits = jax.lax.shift_right_logical(self.bits(ids), jnp.uint32(9)) | jnp.uint32(0x3F800000)
        uniform = jnp.maximum(jax.lax.bitcast_convert_type(bits, jnp.float32) - 1.0, TINY)
        return -log(-log(uniform))

    def bits(self, ids: Array) -> Array:
        if self.partitionable:
            x, y = self._hash(jnp.zeros_like(ids), ids)
            return x ^ y
        half = (self.vocab + 1) // 2
        is_first = ids < half
        first = jnp.where(is_first, ids, ids - half)
        second = jnp.where(first + half < self.vocab, first + half, 0)
        x, y = self._hash(first, second)
        return jnp.where(is_first, x, y)

    def _hash(self, x: Array, y: Array) -> tuple[Array, Array]:
        keys = (self.key0, self.key1, self.key0 ^ self.key1 ^ jnp.uint32(0x1BD11BDA))
        x, y = x.astype(jnp.uint32) + keys[0], y.astype(jnp.uint32) + keys[1]
        for i in range(5):
            for rotation in ROTATIONS[i % 2]:
                x = x + y
                left = jax.lax.shift_left(y, jnp.full_like(y, rotation))
                y = (left | jax.lax.shift_right_logical(y, jnp.full_like(y, 32 - rotation))) ^ x
            x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + jnp.uint32(i + 1)
        return x, y


def log(x: Array) -> Array:
    """ln x to a unit in the last place, for normal float32 x > 0: Cephes' polynomial on [sqrt(1/2), sqrt(2)]. The
    hardware's own is off by 2^-22 near 1, where large noise comes from."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    half = jax.lax.bitcast_convert_type((bits & 0x7FFFFF) | 0x3F000000, jnp.float32)  # mantissa, in [1/2, 1)
    is_small = half < 0.7071067811865476
    exponent = ((bits >> 23) - 126 - is_small.astype(jnp.int32)).astype(jnp.float32)
    m = jnp.where(is_small, half + half, half) - 1.0
    square = m * m
    p = jnp.full_like(m, 7.0376836292e-2)
    for coefficient in (
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    ):
        p = p * m + coefficient
    p = p * m * square - exponent * 2.12194440e-4 - square * 0.5
    return m + p + exponent * 0.693359375
