"""What the decode batch's last steps have drawn, as columns, until someone looks at a sequence's tokens."""

import numpy as np


class TokenLog:
    """Of successive steps of the batch, `most_steps` at most, a row each, with a column for each of `num_slots` slots.
    Filling a row costs a step a few microseconds, however many sequences it has."""

    def __init__(self, num_slots: int, *, most_steps: int = 64):
        self.first = self.end = 0  # the first step that is here, and the one after the last
        self._most_steps = most_steps
        self._tokens = np.empty((most_steps, num_slots), np.int32)
        self._logprobs: np.ndarray | None = None  # of each token, float32; from when the first comes
        self._has_logprobs = False

    @property
    def is_empty(self) -> bool:
        return self.first == self.end

    def takes(self, step: int, *, has_logprobs: bool) -> bool:
        """Whether it can go on with this step, which has log-probabilities or none. An empty one can."""
        has_room = self.end - self.first < self._most_steps
        return self.is_empty or step == self.end and has_room and has_logprobs == self._has_logprobs

    def append(self, step: int, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray | None) -> None:
        """The step's `tokens`, and their log-probabilities if they are kept, by slot."""
        if self.is_empty:
            self.first = self.end = step
            self._has_logprobs = logprobs is not None
        row = self.end - self.first
        self._tokens[row][slots] = tokens  # a row first, as numpy takes both at once in twice the time
        if logprobs is not None:
            if self._logprobs is None:
                self._logprobs = np.empty(self._tokens.shape, np.float32)
            self._logprobs[row][slots] = logprobs
        self.end += 1

    def read(self, step: int, slot: int) -> tuple[list[int], list[float]]:
        """A slot's tokens from `step` on, and their log-probabilities if there are some."""
        rows = slice(step - self.first, self.end - self.first)
        tokens = self._tokens[rows, slot].tolist()
        if self._logprobs is None or not self._has_logprobs:
            return tokens, []
        return tokens, self._logprobs[rows, slot].tolist()

    def clear(self) -> None:
        """Forgets all, which has been read."""
        self.first = self.end
