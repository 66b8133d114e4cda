"""Defines copies of blocks, as a gather and a scatter."""

from jaxtyping import Array, Int, Shaped


def copy_blocks(pool: Shaped[Array, "blocks ..."], moves: Int[Array, "2 n"]) -> Shaped[Array, "blocks ..."]:
    """The pool with blocks `moves[0]` copied to blocks `moves[1]`, which must be distinct; in place if donated.

    All blocks are read before any is written. Distinct ids past the pool are padding.
    """
    contents = pool.at[moves[0]].get(mode="clip")
    return pool.at[moves[1]].set(contents, mode="drop", unique_indices=True)
