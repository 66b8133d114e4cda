"""Log-probabilities on the host: read from the device's rows of integers, packed until someone asks for them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.outputs import Logprob
from jaxllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS

WIDTH = 2 + 2 * MAX_LOGPROBS  # of a row: the token's own, its rank, the most likely tokens, theirs
WIDTH_WITH_IDS = WIDTH + MAX_LOGPROB_TOKEN_IDS
LEAST = -9999.0  # in place of minus infinity, which JSON can't say


class PackedLogprobs(NamedTuple):
    """The log-probabilities at one token's position, as arrays until someone reads them."""

    rank: int
    ids: np.ndarray  # int32: the most likely tokens, then those that the request watches
    logprobs: np.ndarray  # float32: of the token itself, then of `ids`


def pack_logprobs(row: np.ndarray, num_top: int, logprob_ids: Sequence[int] = ()) -> PackedLogprobs:
    """Those of a device's row, int32 `[width]`: the token's own, the `num_top` most likely ones, and those of
    `logprob_ids`, for which the row must be `WIDTH_WITH_IDS` wide."""
    top = 2 + MAX_LOGPROBS
    ids = np.concatenate([row[2 : 2 + num_top], np.array(logprob_ids, np.int32)])
    parts = row[:1], row[top : top + num_top], row[WIDTH : WIDTH + len(logprob_ids)]
    return PackedLogprobs(int(row[1]), ids, np.concatenate(parts).view(np.float32))


def to_logprobs(
    token: int, packed: PackedLogprobs, num_top: int, token_text: Callable[[int], str | None]
) -> dict[int, Logprob]:
    """The token itself, then the most likely ones, then the logprob_ids; each once."""
    own, *others = packed.logprobs.tolist()
    found = {token: Logprob(own, packed.rank, token_text(token))}
    for i, (other, logprob) in enumerate(zip(packed.ids.tolist(), others, strict=True)):
        found.setdefault(other, Logprob(logprob, i + 1 if i < num_top else None, token_text(other)))
    return found
