"""Prompts whose samples are wanted as arrays: nothing of them is decoded, and nothing told before all are over."""

from dataclasses import dataclass

import numpy as np

from jaxllm.engine.prompt_request import PromptRequest
from jaxllm.outputs import FinishReason


@dataclass(kw_only=True, slots=True)
class RolloutOutput:
    """The samples of one prompt."""

    request_id: str
    tokens: list[np.ndarray]  # int32 of each
    logprobs: list[np.ndarray] | None  # float32 of each, if they were asked for
    finish: list[FinishReason]
    versions: list[list[tuple[int, int]]]  # of each: the first token of a span, and the parameters' version
    finished: bool
    error: str | None


@dataclass(eq=False, kw_only=True)
class RolloutRequest(PromptRequest):
    """One prompt and its samples."""

    with_logprobs: bool

    def sampled(self, now: float) -> None:
        """Nobody asks when its first token was drawn."""

    def update(self) -> RolloutOutput | None:
        """The output, if it is over."""
        return self.output() if self.finished else None

    def output(self) -> RolloutOutput:
        sequences = self.sequences
        errors = [sequence.error for sequence in sequences if sequence.error is not None]
        logprobs = None
        if self.with_logprobs:
            logprobs = [np.array(sequence.logprobs, np.float32) for sequence in sequences]
        return RolloutOutput(
            request_id=self.request_id,
            tokens=[np.array(sequence.output_token_ids, np.int32) for sequence in sequences],
            logprobs=logprobs,
            finish=[sequence.finish_reason or "abort" for sequence in sequences],
            versions=[sequence.versions for sequence in sequences],
            finished=self.finished,
            error=self.error or next(iter(errors), None),
        )
