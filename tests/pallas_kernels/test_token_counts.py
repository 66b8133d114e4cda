"""Counts of tokens against numpy, for every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels.token_counts import api
from jaxllm.pallas_kernels.token_counts.reference import CHUNK

BLOCK_SIZE = 8


def cases(lengths, prompt_lens, vocab, *, few=0):
    """A history of blocks in any order, full of rubbish where no row has a token; and each row's tokens. With `few`,
    they are the first and last so many ids."""
    rng = np.random.default_rng(0)
    per_row = -(-max(*lengths, 1) // BLOCK_SIZE)
    ids = [*range(few), *range(vocab - few, vocab)] if few else range(vocab)
    history = rng.choice(np.array(ids, np.int32), (len(lengths) * per_row + 3, BLOCK_SIZE)).astype(np.int32)
    table = rng.permutation(len(history)).astype(np.int32)[: len(lengths) * per_row].reshape(len(lengths), per_row)
    tokens = [history[row].reshape(-1)[:length] for row, length in zip(table, lengths, strict=True)]
    given = history, table, np.array(lengths, np.int32), np.array(prompt_lens, np.int32)
    return jax.tree.map(jnp.asarray, given), tokens


@pytest.mark.parametrize("implementation", api.OP.implementations)
@pytest.mark.parametrize("few", [0, 1, 3])
@pytest.mark.parametrize(
    ("lengths", "prompt_lens", "vocab"),
    [
        ([0, 1, 5, 40], [3, 1, 2, 0], 24),
        ([CHUNK, CHUNK + 1, 3 * CHUNK - 1], [CHUNK, 7, 2 * CHUNK], 700),
        ([2 * CHUNK, 1], [2 * CHUNK, 0], 1024),  # as many of a prompt as a chunk has, the same ones
        ([0, 0], [1, 1], 512),
        ([9], [1], 513),
    ],
)
def test_counts_are_those_of_numpy(implementation, few, lengths, prompt_lens, vocab):
    given, tokens = cases(lengths, prompt_lens, vocab, few=few)
    is_known, counts = jax.jit(api.count_tokens, static_argnames=("vocab", "implementation"))(
        *given, vocab=vocab, implementation=implementation
    )
    assert (is_known.dtype, counts.dtype) == (jnp.bool_, jnp.int32)
    for row, (ids, prompt_len) in enumerate(zip(tokens, prompt_lens, strict=True)):
        np.testing.assert_array_equal(np.flatnonzero(is_known[row]), np.unique(ids))
        np.testing.assert_array_equal(counts[row], np.bincount(ids[prompt_len:], minlength=vocab))
