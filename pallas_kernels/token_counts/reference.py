"""Defines the counts, as scatters: a token of each row's history after the other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

CHUNK = 512  # tokens of each row that are counted at a time


def count_tokens(
    history: Int[Array, "pages block_size"],
    block_table: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    prompt_lens: Int[Array, " rows"],
    *,
    vocab: int,
) -> tuple[Bool[Array, "rows vocab"], Int[Array, "rows vocab"]]:
    """Whether each token is among the first `lengths` ones of a row, and how often after the first `prompt_lens`.

    A row's tokens lie in the blocks of `history` that its `block_table` names, in their order. The longest row says how
    long it takes; of rows with length 0 nothing is counted.
    """
    rows = jnp.arange(len(lengths), dtype=jnp.int32)[:, None]

    def add(found: tuple[Array, Array], ids: Array, is_output: Array) -> tuple[Array, Array]:
        is_known, counts = found
        counts = counts.at[rows, ids].add(is_output.astype(jnp.int32), mode="drop")
        return is_known.at[rows, ids].set(True, mode="drop"), counts

    shape = len(lengths), vocab
    none = jnp.zeros(shape, jnp.bool_), jnp.zeros(shape, jnp.int32)
    return over_chunks(add, none, history, block_table, lengths, prompt_lens, vocab=vocab)


def over_chunks(
    add: Callable[[Any, Array, Array], Any],
    found: Any,
    history: Int[Array, "pages block_size"],
    block_table: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    prompt_lens: Int[Array, " rows"],
    *,
    vocab: int,
) -> Any:
    """`add(found, ids, is_output)` after each other for all chunks: ids int32 `[rows, CHUNK]`, `vocab` past a row's
    end, and whether each is of the output."""

    def body(i: Array, found: Any) -> Any:
        positions = i * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)[None, :]
        ids = tokens_at(jnp.broadcast_to(positions, (len(lengths), CHUNK)), block_table, history)
        ids = jnp.where(positions < lengths[:, None], ids, vocab)
        return add(found, ids, positions >= prompt_lens[:, None])

    return jax.lax.fori_loop(0, -(-jnp.max(lengths) // CHUNK), body, found)


def tokens_at(
    positions: Int[Array, "rows n"], block_table: Int[Array, "rows width"], history: Int[Array, "pages block_size"]
) -> Int[Array, "rows n"]:
    """The tokens at these positions of each row; anything where it has none."""
    index, cell = positions // history.shape[1], positions % history.shape[1]
    blocks = jnp.take_along_axis(block_table, index, axis=1, mode="clip")
    return history.at[blocks, cell].get(mode="clip")
