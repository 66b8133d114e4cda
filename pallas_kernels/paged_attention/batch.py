"""The index arrays of a step, which every implementation of ragged paged attention takes as one argument."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

AnyArray = Array | jax.ShapeDtypeStruct  # or what one will be like


class TokenPositions(NamedTuple):
    """Of each flat token; 0 and 0 for padding."""

    row: Int[Array, " tokens"]  # its sequence
    position: Int[Array, " tokens"]
    is_real: Bool[Array, " tokens"]  # rather than padding


class PagedBatch(NamedTuple):
    """The sequences of a step's flat tokens.

    The tokens of sequence `s` are rows `cu_q_lens[s]:cu_q_lens[s + 1]`, its last `q_len` positions; `kv_lens` counts
    its tokens, these included. Those past `distribution[1]` are padding, whose tokens write nothing and come out
    unspecified.
    """

    block_tables: Int[Array, "seqs blocks_per_seq"]
    cu_q_lens: Int[Array, " seqs_plus_1"]
    kv_lens: Int[Array, " seqs"]
    distribution: Int[Array, "2"]  # leading sequences that have one token each, all sequences

    def token_positions(self, tokens: int) -> TokenPositions:
        """Of `tokens` flat tokens."""
        index = jnp.arange(tokens, dtype=jnp.int32)
        row = jnp.searchsorted(self.cu_q_lens, index, side="right", method="compare_all").astype(jnp.int32) - 1
        is_real = index < self.cu_q_lens[self.distribution[1]]
        row = jnp.where(is_real, row, 0)
        start = self.kv_lens - jnp.diff(self.cu_q_lens)
        return TokenPositions(row, jnp.where(is_real, start[row] + index - self.cu_q_lens[row], 0), is_real)
