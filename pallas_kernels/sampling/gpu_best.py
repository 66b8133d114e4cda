"""The kernel that finds the best tokens of a row, in order, and ranks."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from jaxllm.pallas_kernels.sampling.gpu_rows import LEAST, Aside, from_ordered, highest, loop, middle, ordered, stream

PART = 256  # logits compared with every one of the best at once, when those of a row are not its largest


def best_kernel(
    scores,
    logits,
    tokens,
    ids,
    found,
    own,
    ranks,
    given_logits,
    given_ranks,
    values,
    aside_ids,
    *,
    vocab: int,
    size: int,
    k: int,
    kept: int,
    interpret: bool,
):
    row = pl.program_id(0)
    aside = Aside(values, aside_ids, kept, interpret)
    there = _put_best_aside(aside, row, *stream(scores, row, vocab, size), k, size)
    places, best_ids = _in_order(aside, row, there, ids.shape[1])
    column = jnp.arange(ids.shape[1], dtype=jnp.int32)
    best_scores = from_ordered(places)
    own_logits = plt.load(logits.at[row, best_ids])
    is_one = column < k
    lowest = jnp.min(jnp.where(is_one & (best_scores > -jnp.inf), own_logits, jnp.inf))

    given = [logits[row, jnp.clip(tokens[row, i], 0, vocab - 1)] for i in range(tokens.shape[1])]
    count, tile = stream(logits, row, vocab, size)
    limits = (lowest, *given)

    def compare(j: Array, sums: tuple) -> tuple:
        _, x = tile(j)
        return tuple(total + (x > limit).astype(jnp.int32) for total, limit in zip(sums, limits, strict=True))

    larger, *given_larger = (jnp.sum(x) for x in loop(count, compare, *[jnp.zeros(size, jnp.int32)] * len(limits)))
    among_best = ((own_logits[None, :] > own_logits[:, None]) & is_one[None, :]).astype(jnp.int32)
    others = larger - jnp.sum((is_one & (own_logits > lowest)).astype(jnp.int32))
    in_vocabulary = _count_larger(logits, row, vocab, own_logits, others > 0)
    ids[row, :], found[row, :], own[row, :] = best_ids, best_scores, own_logits
    ranks[row, :] = 1 + jnp.where(others > 0, in_vocabulary, jnp.sum(among_best, axis=1))
    for i, (logit, total) in enumerate(zip(given, given_larger, strict=True)):
        given_logits[row, i], given_ranks[row, i] = logit, 1 + total


def _put_best_aside(aside: Aside, row: Array, count: int, tile: Any, k: int, size: int) -> Array:
    """Puts the places of the k best and a few more scores aside, in the order of ids; how many they are."""

    def places(j: Array) -> tuple[Array, Array]:
        ids, x = tile(j)
        return ids, jnp.where(ids >= j * size, ordered(x), LEAST)

    def count_from(limit: Array) -> Array:
        (sums,) = loop(
            count, lambda j, sums: (sums[0] + (places(j)[1] >= limit).astype(jnp.int32),), jnp.zeros(size, jnp.int32)
        )
        return jnp.sum(sums)

    (groups,) = loop(count, lambda j, most: (jnp.maximum(most[0], places(j)[1]),), jnp.full(size, LEAST, jnp.int32))
    high = jnp.max(groups)
    low = highest(lambda x: jnp.sum((groups >= x).astype(jnp.int32)) >= k, jnp.int32(LEAST), high)

    def halve(state: tuple) -> tuple:
        low, high, found = state
        halfway = middle(low, high)
        here = count_from(halfway)
        ok = here >= k
        return jnp.where(ok, halfway, low), jnp.where(ok, high, halfway - 1), jnp.where(ok, here, found)

    low, _, found = jax.lax.while_loop(
        lambda state: (state[2] > aside.size) & (state[0] < state[1]), halve, (low, high, count_from(low))
    )
    fits = found <= aside.size  # or `low` is the k-th, of so many ties that only the first of them fit
    (above,) = loop(
        count * (~fits).astype(jnp.int32),
        lambda j, sums: (sums[0] + (places(j)[1] > low).astype(jnp.int32),),
        jnp.zeros(size, jnp.int32),
    )

    def put(j: Array, carry: tuple) -> tuple:
        ids, place = places(j)
        first = (place > low) | (fits & (place == low))
        tied = (place == low) & ~fits
        both = first.astype(jnp.int32) + (tied.astype(jnp.int32) << 16)  # two sums in one
        sums = jnp.cumsum(both)
        position = jnp.where(first, carry[0] + (sums & 0xFFFF), carry[1] + (sums >> 16)) - 1
        aside.put(row, position, first | tied, place, ids)
        total = jnp.sum(both)
        return carry[0] + (total & 0xFFFF), carry[1] + (total >> 16)

    loop(count, put, jnp.int32(0), jnp.sum(above))
    aside.finish()
    return jnp.minimum(found, aside.size)


def _in_order(aside: Aside, row: Array, there: Array, width: int) -> tuple[Array, Array]:
    """The first places and ids of what was put aside, the largest first, and the smaller id first among equals."""
    places, ids = aside.get(row, 0, aside.size, there, LEAST)

    def before(j: Array, carry: tuple) -> tuple:
        others, other_ids = aside.get(row, j * 32, 32, there, LEAST)
        is_before = (others[None, :] > places[:, None]) | (
            (others[None, :] == places[:, None]) & (other_ids[None, :] < ids[:, None])
        )
        return (carry[0] + jnp.sum(is_before.astype(jnp.int32), axis=1),)

    (order,) = loop(aside.size // 32, before, jnp.zeros(aside.size, jnp.int32))
    lanes = jnp.arange(aside.size, dtype=jnp.int32)
    column = jnp.arange(width, dtype=jnp.int32)
    picked = (order[None, :] == column[:, None]) & (lanes < there)[None, :]
    return tuple(jnp.sum(jnp.where(picked, x[None, :], 0), axis=1) for x in (places, ids))


def _count_larger(logits: Any, row: Array, vocab: int, own: Array, is_needed: Array) -> Array:
    """How many of the row are larger than each of `own`."""
    size = min(PART, pl.next_power_of_2(vocab + 1) // 2)
    count, tile = stream(logits, row, vocab, size)
    (sums,) = loop(
        count * is_needed.astype(jnp.int32),
        lambda j, sums: (sums[0] + (tile(j)[1][None, :] > own[:, None]).astype(jnp.int32),),
        jnp.zeros((own.shape[0], size), jnp.int32),
    )
    return jnp.sum(sums, axis=1)
