"""Defines sampling, in jnp: a draw per row, its best tokens, and its normaliser. Nothing is sorted."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

Total = Callable[[Float[Array, "rows vocab"]], Float[Array, " rows"]]  # sums rows


class Rows(NamedTuple):
    """Of each row of logits."""

    top: Float[Array, " rows"]  # the largest; NaN if one is
    normalizer: Float[Array, " rows"]  # the log of the sum of their exponentials


class Draws(NamedTuple):
    tokens: Int[Array, " rows"]  # meaningless unless `top` is finite
    top: Float[Array, " rows"]  # as in `Rows`


class Best(NamedTuple):
    """The `k` best tokens of each row by their scores, best first and the smaller id first among equals; then, in
    `logits` and `ranks` alone, the given tokens."""

    ids: Int[Array, "rows k"]
    scores: Float[Array, "rows k"]
    logits: Float[Array, "rows k_and_tokens"]
    ranks: Int[Array, "rows k_and_tokens"]  # 1 + the number of larger logits; meaningless where a score is -inf


def in_any_order(x: Float[Array, "rows vocab"]) -> Float[Array, " rows"]:
    return jnp.sum(x, axis=-1)


def normalize(logits: Float[Array, "rows vocab"], *, num_rows: Any = None, total: Total | None = None) -> Rows:
    """`total` sums rows; None: XLA does, in any order."""
    del num_rows  # XLA reads padding, too
    top = jnp.max(logits, axis=-1)
    if total is None:
        return Rows(top, jax.nn.logsumexp(logits, axis=-1))
    shift = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))
    return Rows(top, shift + jnp.log(total(jnp.exp(logits - shift[:, None]))))


def draw(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, " rows"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
    keys: UInt32[Array, "rows 2"],
    total: Total = in_any_order,
) -> Draws:
    """A token of each row: the first of the largest where `temperature` is 0, else a draw from the softmax of
    logits / temperature, of which min-p, top-k (0: all) and top-p, one after the other, keep the tokens from
    `threshold` on. Ties at it are kept, all of them.

    The draw is Gumbel-max with the float32 noise that `jax.random.gumbel` makes from the row's Threefry key.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    top = jnp.max(logits, axis=-1)
    is_random = temperature > 0

    def drawn(logits: Array) -> Array:
        scaled = logits - top[:, None]  # so that dividing can't overflow
        scaled = scaled / jnp.where(is_random, temperature, 1.0)[:, None]
        filters = (top_k > 0) | (top_p < 1) | (min_p > 0)
        kept = jax.lax.cond(
            jnp.any(filters & is_random),
            lambda x: jnp.where(x >= threshold(x, top_k, top_p, min_p, total)[:, None], x, -jnp.inf),
            lambda x: x,
            scaled,
        )
        tokens = jnp.argmax(kept + gumbel(keys, logits.shape[1]), axis=-1).astype(jnp.int32)
        return jnp.where(is_random, tokens, greedy)

    return Draws(jax.lax.cond(jnp.any(is_random), drawn, lambda _: greedy, logits), top)


def gumbel(keys: UInt32[Array, "rows 2"], vocab: int) -> Float[Array, "rows vocab"]:
    def of_row(key: Array) -> Array:
        return jax.random.gumbel(jax.random.wrap_key_data(key, impl="threefry2x32"), (vocab,), jnp.float32, mode="low")

    return jax.vmap(of_row)(keys)


def best(
    scores: Float[Array, "rows vocab"],
    logits: Float[Array, "rows vocab"],
    tokens: Int[Array, "rows tokens"],
    *,
    k: int,
    num_rows: Any = None,
    at_once: int | None = None,
) -> Best:
    """The `k` best by `scores`, with logits and ranks in `logits`, and those of the given `tokens`.

    `at_once` is how many XLA finds without a sort, if that is bounded. Tokens of minus infinity may then come twice.
    """
    del num_rows  # XLA reads padding, too
    found, ids = _top_k(scores, k, at_once or k)
    own = jnp.take_along_axis(logits, ids, axis=-1, mode="clip")
    given = jnp.take_along_axis(logits, tokens, axis=-1, mode="clip")
    ranks = _ranks(logits, own, found > -jnp.inf)
    given_ranks = jax.lax.map(lambda column: 1 + _count_larger(logits, column[:, None]), given.T).T
    return Best(ids, found, jnp.concatenate([own, given], axis=1), jnp.concatenate([ranks, given_ranks], axis=1))


def _top_k(
    scores: Float[Array, "rows vocab"], k: int, at_once: int
) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """`jax.lax.top_k`, of at most `at_once` at a time, which are then taken out."""
    parts = []
    for size in [at_once] * (k // at_once) + [k % at_once] * (k % at_once > 0):
        parts.append(jax.lax.top_k(scores, size))
        scores = jax.vmap(lambda row, ids: row.at[ids].set(-jnp.inf, unique_indices=True))(scores, parts[-1][1])
    found, ids = (jnp.concatenate(columns, axis=1) for columns in zip(*parts, strict=True))
    return found, ids


def _count_larger(among: Float[Array, "rows ..."], than: Float[Array, "rows ..."]) -> Int[Array, "rows ..."]:
    return jnp.sum(among > than, axis=-1, dtype=jnp.int32)


def _ranks(
    logits: Float[Array, "rows vocab"], own: Float[Array, "rows k"], allowed: Bool[Array, "rows k"]
) -> Int[Array, "rows k"]:
    """1 + the number of larger logits, for each of `own`, the best tokens' logits; undefined where not `allowed`.

    Usually only the best tokens have logits this large, and comparing them with each other is enough. Masks and bias
    can promote other tokens; each of those costs one pass over the vocabulary, in sequence, because XLA would
    materialise a comparison of all at once.
    """
    lowest = jnp.min(jnp.where(allowed, own, jnp.inf), axis=-1, keepdims=True)

    def among_themselves(_: Array) -> Array:
        return _count_larger(own[:, None, :], own[:, :, None])

    def in_vocabulary(logits: Array) -> Array:
        return jax.lax.map(lambda column: _count_larger(logits, column[:, None]), own.T).T

    others = _count_larger(logits, lowest) - _count_larger(own, lowest)
    return 1 + jax.lax.cond(jnp.all(others == 0), among_themselves, in_vocabulary, logits)


def threshold(
    logits: Float[Array, "rows vocab"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
    total: Total = in_any_order,
    *,
    has_loops: bool = True,
) -> Float[Array, " rows"]:
    """The smallest logit that min-p, top-k and top-p, one after the other, keep in each row. `total` sums rows of
    probabilities. Without loops it takes longer to compile, and is part of a GPU's graph."""
    top = jnp.max(logits, axis=-1)
    at_least = top + log_min_p(min_p)
    weights = jnp.exp(logits - top[:, None])

    def kept(limit: Array) -> Array:
        return logits >= jnp.maximum(limit, at_least)[:, None]

    # Top-k: the highest limit that keeps k tokens (or all that min-p left, if they are fewer).
    k = jnp.where(top_k > 0, top_k, logits.shape[1])
    k = jnp.minimum(k, jnp.sum(kept(at_least), axis=-1, dtype=jnp.int32))
    by_k = highest_limit(lambda x: jnp.sum(kept(x), axis=-1, dtype=jnp.int32) >= k, top, has_loops=has_loops)
    at_least = jnp.maximum(at_least, by_k)

    # Top-p: the highest limit that keeps a share p of what is left.
    share = jnp.where(top_p < 1, top_p, 0.0) * total(jnp.where(kept(at_least), weights, 0.0))
    by_p = highest_limit(lambda x: total(jnp.where(kept(x), weights, 0.0)) >= share, top, has_loops=has_loops)
    return jnp.maximum(at_least, jnp.where(top_p < 1, by_p, -jnp.inf))


def log_min_p(min_p: Float[Array, " rows"]) -> Float[Array, " rows"]:
    """How far below the largest logit min-p reaches, in nats."""
    return jnp.where(min_p > 0, jnp.log(jnp.maximum(min_p, 1e-38)), -jnp.inf)


def highest_limit(enough, top: Float[Array, " rows"], *, has_loops: bool = True) -> Float[Array, " rows"]:
    """The highest float32 `x <= top` in each row with `enough(x)`, which holds at -inf and is monotone.

    Bisection over the bits of a float32, mapped to integers of the same order: 32 passes find it exactly.
    """

    def to_float(ordered: Array) -> Array:
        bits = jnp.where(ordered < 0, ordered ^ jnp.int32(0x7FFFFFFF), ordered)
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    bits = jax.lax.bitcast_convert_type(top, jnp.int32)
    high = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    low = jnp.full_like(high, -0x7F800001)  # -inf

    def halve(_, bounds):  # enough(low) holds throughout; the answer is in [low, high]
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # the mean rounded up, without overflow
        ok = enough(to_float(middle))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high), unroll=1 if has_loops else True)
    return to_float(low)
