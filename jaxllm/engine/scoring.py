"""Contexts with continuations that are scored: the requests that ask for the log-probabilities of given tokens."""

from dataclasses import dataclass

import numpy as np

from jaxllm.engine.prompt_request import PromptRequest
from jaxllm.engine.schedule.sequence import Sequence
from jaxllm.score_outputs import ContinuationScore, LoglikelihoodOutput


@dataclass(eq=False, kw_only=True)
class LoglikelihoodRequest(PromptRequest):
    """One context and its continuations, each of which is a sequence that has `targets`."""

    def update(self) -> LoglikelihoodOutput | None:
        """The output, if it is over."""
        return self.output() if self.finished else None

    def output(self) -> LoglikelihoodOutput:
        errors = [sequence.error for sequence in self.sequences if sequence.error is not None]
        error = self.error or next(iter(errors), None)
        if error is None and not all(map(_is_complete, self.sequences)):
            error = "the request was aborted"
        return LoglikelihoodOutput(
            request_id=self.request_id,
            scores=[] if error is not None else list(map(_score, self.sequences)),
            num_cached_tokens=max(0, self.sequences[0].num_cached),
            finished=self.finished,
            error=error,
            queued_s=self.queued_s,
        )


def _is_complete(sequence: Sequence) -> bool:
    return sequence.targets is not None and sequence.targets.is_complete


def _score(sequence: Sequence) -> ContinuationScore:
    targets = sequence.targets
    assert targets is not None  # every sequence of such a request has some
    logprobs = np.asarray(targets.logprobs, np.float32)
    return ContinuationScore(token_ids=targets.token_ids, token_logprobs=logprobs, is_greedy=targets.is_greedy)
