"""The candidates of beams, as the host reads them from a step's result."""

from typing import NamedTuple

import numpy as np

from jaxllm.engine.beam.search import Candidates
from jaxllm.engine.logprobs import PackedLogprobs
from jaxllm.sampling_params import MAX_BEAM_WIDTH

NUM_CANDIDATES = 2 * MAX_BEAM_WIDTH  # a beam alone can fill the next ones, though as many of its tokens end it
CANDIDATES_WIDTH = 4 * NUM_CANDIDATES  # of a row: token ids, scores, log-probabilities, ranks


class BeamRow(NamedTuple):
    """What a step says of a beam: how it may go on, and what else is wanted of its next token's position."""

    candidates: Candidates
    others: PackedLogprobs | None  # the most likely and the logprob_ids tokens

    def packed_logprobs(self, logprob: float, rank: int) -> PackedLogprobs:
        """Of a candidate with this log-probability and rank."""
        if self.others is None:
            return PackedLogprobs(logprob, rank)
        return self.others._replace(own=logprob, rank=rank)


def read_candidates(row: np.ndarray, count: int) -> Candidates:
    """At most `count` candidates of one of the device's `candidate_rows`, int32 `[CANDIDATES_WIDTH]`, without those
    that may not be; views of the row."""
    ids, scores, logprobs, ranks = row.reshape(4, NUM_CANDIDATES)[:, :count]
    scores = scores.view(np.float32)
    num = np.count_nonzero(scores > -np.inf)  # they come first
    return Candidates(ids[:num], scores[:num], logprobs.view(np.float32)[:num], ranks[:num])
