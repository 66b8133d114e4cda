"""The tokens of a sequence that is scored, and what came of those that the device has seen."""

from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Targets:
    """Tokens whose log-probabilities are wanted: the first comes after the last one of a sequence's prompt, each other
    after one of its output tokens, which are known from the beginning. The sequence generates nothing."""

    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)  # nats, of the first ones
    is_greedy: bool = True  # whether each of those is the most likely one

    @property
    def num_known(self) -> int:
        """Of the log-probabilities."""
        return len(self.logprobs)

    @property
    def is_complete(self) -> bool:
        return self.num_known == len(self.token_ids)

    def take(self, logprobs: list[float], *, is_greedy: bool) -> None:
        """Those that come next."""
        self.logprobs += logprobs
        self.is_greedy &= is_greedy
