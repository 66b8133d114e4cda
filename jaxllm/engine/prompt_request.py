"""A prompt of which something else than text is wanted: what the engine's loop asks of any request."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxllm.engine.schedule.sequence import Sequence as ScheduledSequence


@dataclass(eq=False, kw_only=True)
class PromptRequest:
    """Of `Request`'s interface what the engine's loop needs: it has one output, when all its sequences are over."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    lean: bool = False  # the output leaves the prompt out
    sequences: list[ScheduledSequence] = field(default_factory=list)
    arrived_at: float = field(default_factory=time.monotonic)
    queued_s: float = 0.0
    error: str | None = None
    stream: Literal[False] = False
    watches_text: Literal[False] = False

    @property
    def shown(self) -> Sequence[ScheduledSequence]:
        return self.sequences

    @property
    def finished(self) -> bool:
        return all(sequence.end is not None for sequence in self.sequences)

    def scheduled(self) -> None:
        """It is in a step."""
        self.queued_s = self.queued_s or time.monotonic() - self.arrived_at

    def fail(self, error: str) -> None:
        self.error = error
