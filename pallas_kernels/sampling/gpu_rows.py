"""What the sampling kernels for GPUs share: how a program streams its row, searches, and puts a few logits aside."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

LEAST = -(2**31)  # below every float's place in `ordered`
MINUS_INF = -0x7F800001  # the place of minus infinity


class Aside(NamedTuple):
    """What a program puts aside of its row, in order."""

    values: Any  # refs
    ids: Any
    size: int
    interpret: bool

    def put(self, row: Array, position: Array, mask: Array, values: Array, ids: Array) -> None:
        mask = mask & (position < self.size)
        nowhere = self.size + jnp.arange(mask.shape[0], dtype=jnp.int32) if self.interpret else 0
        position = jnp.where(mask, position, nowhere)
        plt.store(self.values.at[row, position], values, mask=mask)
        plt.store(self.ids.at[row, position], ids, mask=mask)

    def finish(self) -> None:
        """Before anything is read again, which other threads have written."""
        if not self.interpret:
            plt.debug_barrier()

    def get(self, row: Array, start: Any, size: int, count: Array, fill: Any) -> tuple[Array, Array]:
        """Values and ids from `start` on, with `fill` past `count`."""
        is_there = start + jnp.arange(size, dtype=jnp.int32) < count
        values = plt.load(self.values.at[row, pl.ds(start, size)])
        ids = plt.load(self.ids.at[row, pl.ds(start, size)])
        return jnp.where(is_there, values, fill), jnp.where(is_there, ids, LEAST)


def stream(ref: Any, row: Array, vocab: int, size: int):
    """How many tiles a row has, and a function for ids and logits of one; -inf where the last overlaps another."""

    def tile(j: Array) -> tuple[Array, Array]:
        start = jnp.minimum(j * size, vocab - size)
        ids = start + jnp.arange(size, dtype=jnp.int32)
        return ids, jnp.where(ids >= j * size, plt.load(ref.at[row, pl.ds(start, size)]), -jnp.inf)

    return pl.cdiv(vocab, size), tile


def loop(count: Any, body: Any, *init: Any) -> Any:
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(count), body, init)


def ordered(x: Array) -> Array:
    """Integers in the order of floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def from_ordered(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(jnp.where(x < 0, x ^ 0x7FFFFFFF, x), jnp.float32)


def middle(low: Array, high: Array) -> Array:
    return (low >> 1) + (high >> 1) + ((low | high) & 1)  # the mean rounded up, without overflow


def highest(enough: Any, low: Array, high: Array) -> Array:
    """The highest integer in [low, high] with `enough`, which holds at `low` and is monotone."""

    def halve(bounds: tuple) -> tuple:
        low, high = bounds
        halfway = middle(low, high)
        ok = enough(halfway)
        return jnp.where(ok, halfway, low), jnp.where(ok, high, halfway - 1)

    return jax.lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, (low, high))[0]
