"""What a model makes of given texts: log-probabilities, in nats, of the softmax of its logits as they are."""

import math
from dataclasses import dataclass

import numpy as np

from jaxllm.errors import EngineError


@dataclass(kw_only=True)
class ContinuationScore:
    """The log-probabilities of a continuation's tokens, each given the context and the tokens before it."""

    token_ids: list[int]
    token_logprobs: np.ndarray  # float32 [tokens]
    is_greedy: bool  # whether each token is the most likely one, so that a greedy generation would be this

    @property
    def logprob(self) -> float:
        """Of the whole continuation: their sum."""
        return float(self.token_logprobs.sum(dtype=np.float64))


@dataclass(kw_only=True)
class DocumentScore:
    """The log-probabilities of all tokens of a document; the first is given the token that stands before it."""

    token_ids: list[int]
    token_logprobs: np.ndarray  # float32 [tokens]

    @property
    def logprob(self) -> float:
        """Of the whole document: their sum."""
        return float(self.token_logprobs.sum(dtype=np.float64))

    @property
    def perplexity(self) -> float:
        """exp(- mean log-probability of a token)."""
        return math.exp(-self.logprob / len(self.token_ids))


@dataclass(kw_only=True)
class LoglikelihoodOutput:
    """A context whose continuations were scored, in their order. `error` says why there are no `scores`."""

    request_id: str
    scores: list[ContinuationScore]
    num_cached_tokens: int = 0  # of the context, whose keys and values came from the prefix cache
    finished: bool = True
    error: str | None = None
    queued_s: float = 0.0  # seconds from arrival in the engine to the first step

    @property
    def made(self) -> list[ContinuationScore]:
        """`scores`. Raises `EngineError` with the cause if there are none."""
        if self.error is not None:
            raise EngineError(f"request {self.request_id} failed: {self.error}")
        return self.scores
