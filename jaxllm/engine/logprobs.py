"""Log-probabilities on the host: read from the device's rows of integers, packed until someone asks for them."""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from jaxllm.outputs import Logprob
from jaxllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS

WIDTH = 2 + 2 * MAX_LOGPROBS  # of a row: the token's own, its rank, the most likely tokens, theirs
WIDTH_WITH_IDS = WIDTH + MAX_LOGPROB_TOKEN_IDS
LEAST = -9999.0  # in place of minus infinity, which JSON can't say


class PackedLogprobs(NamedTuple):
    """The log-probabilities at one token's position, as arrays until someone reads them."""

    own: float  # of the token itself
    rank: int
    ids: np.ndarray = np.empty(0, np.int32)  # the most likely tokens, then those that the request watches
    others: np.ndarray = np.empty(0, np.float32)  # of `ids`


def pack_logprobs(row: np.ndarray, num_top: int, logprob_ids: Sequence[int] = ()) -> PackedLogprobs:
    """Those of a device's row, int32 `[width]`: the token's own, the `num_top` most likely ones, and those of
    `logprob_ids`, for which the row must be `WIDTH_WITH_IDS` wide."""
    top = 2 + MAX_LOGPROBS
    ids = np.concatenate([row[2 : 2 + num_top], np.array(logprob_ids, np.int32)])
    others = np.concatenate([row[top : top + num_top], row[WIDTH : WIDTH + len(logprob_ids)]])
    return PackedLogprobs(float(row[:1].view(np.float32)[0]), int(row[1]), ids, others.view(np.float32))


def own_logprobs(rows: np.ndarray) -> np.ndarray:
    """Of each of a device's rows, int32 `[rows, width]`, the token's own: float32 `[rows]`."""
    return np.ascontiguousarray(rows[:, 0]).view(np.float32)


def pack_own_logprobs(rows: np.ndarray) -> list[PackedLogprobs]:
    """Of each of a device's rows, int32 `[rows, width]`, the token's own alone."""
    own, ranks = own_logprobs(rows).tolist(), rows[:, 1].tolist()
    defaults = map(repeat, PackedLogprobs._field_defaults.values())
    # Without a call of Python's for each: there are thousands in a step's time.
    return list(map(tuple.__new__, repeat(PackedLogprobs), zip(own, ranks, *defaults, strict=False)))


def to_logprobs(
    token: int, packed: PackedLogprobs, num_top: int, token_text: Callable[[int], str | None]
) -> dict[int, Logprob]:
    """The token itself, then the most likely ones, then the logprob_ids; each once."""
    found = {token: Logprob(packed.own, packed.rank, token_text(token))}
    for i, (other, logprob) in enumerate(zip(packed.ids.tolist(), packed.others.tolist(), strict=True)):
        found.setdefault(other, Logprob(logprob, i + 1 if i < num_top else None, token_text(other)))
    return found
