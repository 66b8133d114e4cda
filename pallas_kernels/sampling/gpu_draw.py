"""The kernel that draws: thresholds and Gumbel-max of one row a program."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from jaxllm.pallas_kernels.sampling.gpu_noise import MOST_NOISE, Noise
from jaxllm.pallas_kernels.sampling.gpu_rows import MINUS_INF, Aside, from_ordered, highest, loop, ordered, stream


def draw_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    at_leasts,
    keys,
    tokens,
    tops,
    values,
    aside_ids,
    *,
    vocab: int,
    size: int,
    partitionable: bool,
    kept: int,
    interpret: bool,
):
    row = pl.program_id(0)
    count, tile = stream(logits, row, vocab, size)
    largest, ids, is_nan = _largest_of_groups(count, tile, size)
    top = jnp.max(largest)
    greedy = jnp.min(jnp.where(largest == top, ids, vocab - 1))
    is_nan = jnp.max(is_nan) > 0
    temperature, k, p = temperatures[row], top_ks[row], top_ps[row]
    is_random = (temperature > 0) & (jnp.abs(top) < jnp.inf) & ~is_nan
    count = count * is_random.astype(jnp.int32)  # of the passes that only a draw needs
    shift, divisor = jnp.where(is_random, top, 0.0), jnp.where(is_random, temperature, 1.0)
    noise = Noise(keys[row, 0], keys[row, 1], vocab, partitionable)

    def scaled(j: Array) -> tuple[Array, Array]:
        ids, x = tile(j)
        return ids, (x - shift) / divisor

    has_k, has_p = (k > 0) & (k < vocab), p < 1
    at_least = at_leasts[row]
    (total,) = loop(
        jnp.where(has_p & ~has_k, count, 0),
        lambda j, sums: (sums[0] + _mass(scaled(j)[1], at_least),),
        jnp.zeros(size, jnp.float32),
    )
    total = jnp.sum(total)
    low = jnp.maximum(at_least, _bound(largest, shift, divisor, k, has_k, size))
    # All that is less likely than this has together no more than the share that top-p drops.
    by_p = jnp.log(jnp.maximum((1 - p) * total / vocab, 1e-38)) - 0.01
    low = jnp.maximum(low, jnp.where(has_p & ~has_k, by_p, -jnp.inf))
    # What is so far below the largest with its noise can't win.
    low = jnp.maximum(low, jnp.where(has_p, -jnp.inf, noise.gumbel(greedy) - MOST_NOISE))

    aside = Aside(values, aside_ids, kept, interpret)
    found, some, some_ids = _put_aside(aside, row, count, scaled, low, size)
    rest = jnp.where(found <= kept, 0, count)  # tiles to be streamed again for every step

    def over(value: Any, limit: Array) -> Array:
        (sums,) = loop(rest, lambda j, sums: (sums[0] + value(scaled(j)[1], limit),), value(some, limit))
        return jnp.sum(sums)

    def count_from(x: Array, limit: Array) -> Array:
        return (x >= limit).astype(jnp.int32)

    low = ordered(low)
    k = jnp.minimum(k, found)
    limit = highest(lambda x: over(count_from, from_ordered(x)) >= k, low, jnp.where(has_k, 0, low))
    share = p * jnp.where(has_k, over(_mass, from_ordered(limit)), total)
    limit = highest(lambda x: over(_mass, from_ordered(x)) >= share, limit, jnp.where(has_p, 0, limit))
    drawn = _winner(noise, some, some_ids, from_ordered(limit), rest, scaled, vocab)
    tokens[row] = jnp.where(is_random, drawn, greedy)
    tops[row] = jnp.where(is_nan, jnp.nan, top)


def _mass(x: Array, limit: Array) -> Array:
    return jnp.where(x >= limit, jnp.exp(x), 0.0)


def _largest_of_groups(count: int, tile: Any, size: int) -> tuple[Array, Array, Array]:
    """For each lane of the tiles: the largest logit, its first id, and 1 if one is NaN."""

    def larger(j: Array, carry: tuple) -> tuple:
        largest, ids, is_nan = carry
        here, x = tile(j)
        is_larger = x > largest
        is_nan = jnp.maximum(is_nan, (x != x).astype(jnp.int32))
        return jnp.where(is_larger, x, largest), jnp.where(is_larger, here, ids), is_nan

    lanes = jnp.arange(size, dtype=jnp.int32)
    return loop(count, larger, jnp.full(size, -jnp.inf, jnp.float32), lanes, jnp.zeros(size, jnp.int32))


def _bound(largest: Array, shift: Array, divisor: Array, k: Array, has_k: Array, size: int) -> Array:
    """At most the k-th largest scaled logit: that of the largest ones of the groups; -inf without top-k."""
    scaled = (largest - shift) / divisor
    low = jnp.int32(MINUS_INF)
    can = has_k & (k <= size)
    return from_ordered(
        highest(lambda x: jnp.sum((scaled >= from_ordered(x)).astype(jnp.int32)) >= k, low, jnp.where(can, 0, low))
    )


def _put_aside(
    aside: Aside, row: Array, count: Array, scaled: Any, low: Array, size: int
) -> tuple[Array, Array, Array]:
    """How many are at least `low`, and they and their ids if they are no more than fit; else only -inf."""
    (found,) = loop(
        count, lambda j, sums: (sums[0] + (scaled(j)[1] >= low).astype(jnp.int32),), jnp.zeros(size, jnp.int32)
    )
    found = jnp.sum(found)

    def put(j: Array, carry: tuple) -> tuple:
        ids, x = scaled(j)
        mask = x >= low
        ones = mask.astype(jnp.int32)
        aside.put(row, carry[0] + jnp.cumsum(ones) - 1, mask, x, ids)
        return (carry[0] + jnp.sum(ones),)

    fits = found <= aside.size
    loop(jnp.where(fits, count, 0), put, jnp.int32(0))
    aside.finish()
    return found, *aside.get(row, 0, aside.size, jnp.where(fits, found, 0), -jnp.inf)


def _winner(noise: Noise, some: Array, some_ids: Array, limit: Array, rest: Array, scaled: Any, vocab: int) -> Array:
    """The token whose logit and noise have the largest sum, among `some` and `rest` tiles."""

    def offer(score: Array, winners: Array, ids: Array, x: Array) -> tuple[Array, Array]:
        noisy = jnp.where(x >= limit, x + noise.gumbel(ids), -jnp.inf)
        is_larger = noisy > score
        return jnp.where(is_larger, noisy, score), jnp.where(is_larger, ids, winners)

    def offer_tile(j: Array, carry: tuple) -> tuple:
        ids, x = scaled(j)
        can_win = jnp.max(x) + MOST_NOISE >= jnp.max(carry[0])
        return jax.lax.cond(can_win, lambda: offer(*carry, ids, x), lambda: carry)

    nobody = jnp.full(some.shape, -jnp.inf, jnp.float32), jnp.full(some.shape, vocab - 1, jnp.int32)
    score, winners = loop(rest, offer_tile, *offer(*nobody, some_ids, some))
    return jnp.min(jnp.where(score == jnp.max(score), winners, vocab - 1))
