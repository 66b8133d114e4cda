"""The sequences that were in steps that failed."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxllm.engine.schedule.sequence import End, Sequence, Status

MAX_FAILURES = 2  # failed steps with a sequence in them after which it is quarantined


class _Failures(NamedTuple):
    count: int
    num_tokens: int  # of the sequence, when the last one came


class Retries:
    """Counts each sequence's failed steps until it gets past the token that they were for. Until then it runs with no
    newcomer beside it, so that a failure names the culprit."""

    def __init__(self):
        self._failures: dict[Sequence, _Failures] = {}

    def __len__(self) -> int:
        return len(self._failures)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._failures

    @property
    def is_one_running(self) -> bool:
        """Whether one of them is on the device. O(their number)."""
        return any(sequence.slot >= 0 for sequence in self._failures)

    def add(self, sequence: Sequence) -> int:
        """One more failed step; how many there were since the sequence last got further."""
        before = self._failures.get(sequence)
        count = 1 + (before.count if before is not None else 0)
        self._failures[sequence] = _Failures(count, sequence.num_tokens)
        return count

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._failures.pop(sequence, None)

    def forget_if_past(self, sequence: Sequence, num_tokens: int) -> None:
        """It has `num_tokens` now: two more than when it failed tell that it got further."""
        failures = self._failures.get(sequence)
        if failures is not None and num_tokens > failures.num_tokens + 1:
            del self._failures[sequence]


def quarantine(
    failed: Iterable[Sequence], cause: str, retries: Retries, finish: Callable[[Sequence, End], None]
) -> list[Sequence]:
    """Counts a failed step for each of these sequences; one with `MAX_FAILURES` is ended, and returned."""
    quarantined = []
    for sequence in dict.fromkeys(row.group.head(row) for row in failed):
        if sequence.status is Status.FINISHED:
            continue
        num_failures = retries.add(sequence)
        if num_failures >= MAX_FAILURES:
            error = f"the step failed {num_failures} times with this sequence in it: {cause}"
            finish(sequence, End("error", error=error))
            quarantined.append(sequence)
    return quarantined
