"""The sequences that take one token in each step, as columns that stay from step to step."""

from array import array
from collections import Counter, defaultdict, deque

import numpy as np

from jaxllm.engine.schedule.sequence import Sequence
from jaxllm.engine.schedule.token_log import TokenLog

_FEW = 8  # stop tokens: to look for one after the other takes less time than `np.isin` does for any


class DecodeBatch:
    """A standing batch of decode rows. A step takes its columns as they are; Python looks at a sequence only when
    something happens to it: it enters or leaves, its last block is full, or its next row is its last.

    How far its sequences are follows from `num_steps`: each has computed one token more with every step
    (`Sequence.num_computed`). When the next thing happens to one is known when it enters (`set_due`). What it has drawn
    lies in a log until someone looks (`deliver`).
    """

    def __init__(self, num_slots: int):
        self.num_steps = 0  # that the batch has taken part in
        self.log = TokenLog(num_slots)
        self._is_slot = np.zeros(num_slots, bool)  # scratch
        self.sequences: list[Sequence] = []
        self.slots = array("i")  # of each sequence
        self.epochs: list[int] = []  # likewise
        self._are_shared = False  # some plan has these columns: they are copied before they change
        self._rows: dict[Sequence, int] = {}
        self._due_steps: dict[Sequence, int] = {}  # before which something happens to it
        self._due: defaultdict[int, list[Sequence]] = defaultdict(list)  # by step; who has left is still there
        self.num_reporting = 0  # sequences whose every token is looked at
        self._stops: Counter[int] = Counter()  # stop tokens, and of how many
        self._kept: Counter[int] = Counter()  # what sequences keep of log-probabilities, and how many do
        self._left: deque[tuple[int, int]] = deque()  # slots of those who left, and after which step of the batch

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence) -> None:
        """Appends a row for a sequence whose last token is the only one to compute. O(1), as is `remove`."""
        self._own_columns()
        sequence.batch, self._rows[sequence] = self, len(self.sequences)
        sequence.computed_offset -= self.num_steps
        sequence.log_step = self.num_steps + 1
        self.sequences.append(sequence)
        self.slots.append(sequence.slot)
        self.epochs.append(sequence.epoch)
        self._count(sequence, 1)
        self.set_due(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence's row out; the last row takes its place."""
        self.deliver(sequence)
        self._own_columns()
        row, last = self._rows[sequence], self.sequences[-1]
        self.sequences[row], self.slots[row], self.epochs[row] = last, self.slots[-1], self.epochs[-1]
        self._rows[last] = row
        for column in (self.sequences, self.slots, self.epochs):
            column.pop()
        sequence.batch = None
        sequence.computed_offset += self.num_steps
        del self._rows[sequence], self._due_steps[sequence]
        self._left.append((self.num_steps, sequence.slot))
        self._count(sequence, -1)
        if not self.sequences:
            self._due.clear()

    def columns(self) -> "tuple[list[Sequence], array[int], list[int]]":
        """Its sequences, slots and epochs as they are now, which nobody changes any more."""
        self._are_shared = True
        return self.sequences, self.slots, self.epochs

    def _own_columns(self) -> None:
        if self._are_shared:
            self.sequences, self.slots, self.epochs = self.sequences.copy(), self.slots[:], self.epochs.copy()
            self._are_shared = False

    def _count(self, sequence: Sequence, by: int) -> None:
        self.num_reporting += by * sequence.reports_tokens
        for counts, keys in ((self._stops, sequence.stop_ids), (self._kept, (sequence.num_logprobs,))):
            for key in keys:
                counts[key] += by
                if not counts[key]:
                    del counts[key]

    @property
    def kept_logprobs(self) -> set[int]:
        """What its sequences keep of log-probabilities, as `Sequence.num_logprobs` has it."""
        return set(self._kept)

    def rows_apart(self, step: int, slots: np.ndarray, tokens: np.ndarray) -> list[int]:
        """Which rows of a step of the batch's, that drew these tokens for these slots, have more to them than a token
        to append. Afterwards no step before it is asked for."""
        while self._left and self._left[0][0] < step:
            self._left.popleft()
        apart = tokens < 0
        if self._left:
            left = [slot for _, slot in self._left]  # or somebody else's by now, who is looked at in vain
            self._is_slot[left] = True
            apart |= self._is_slot[slots]
            self._is_slot[left] = False
        if len(self._stops) > _FEW:
            apart |= np.isin(tokens, list(self._stops))
        else:
            for stop in self._stops:
                apart |= tokens == stop
        return np.flatnonzero(apart).tolist()

    def deliver(self, sequence: Sequence) -> None:
        """Gives a sequence what the log has of it."""
        log, start = self.log, sequence.log_step
        if start < log.end:
            start = max(start, log.first)
            tokens, logprobs = log.read(start, sequence.slot)
            sequence.own_token_ids += tokens
            sequence.own_logprobs += logprobs
            sequence.log_step = log.end

    def deliver_all(self) -> None:
        """Leaves the log empty."""
        if not self.log.is_empty:
            for sequence in self.sequences:
                self.deliver(sequence)
            self.log.clear()

    def num_undelivered(self, sequence: Sequence) -> int:
        """How many tokens the log has of a sequence."""
        return max(0, self.log.end - max(sequence.log_step, self.log.first))

    def note(
        self, step: int, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray | None, apart: list[Sequence]
    ) -> None:
        """Appends a token to each sequence of a step but those `apart`, which get theirs one by one."""
        if not self.log.takes(step, has_logprobs=logprobs is not None):
            self.deliver_all()
        for sequence in apart:
            if sequence.batch is self:
                self.deliver(sequence)
                sequence.log_step = max(sequence.log_step, step + 1)
        self.log.append(step, slots, tokens, logprobs)

    def set_due(self, sequence: Sequence) -> None:
        """Notes the step before which the sequence needs a block, or leaves for its last row."""
        end = min(sequence.table.capacity, sequence.max_total_len - 2)
        self._due_steps[sequence] = due_step = end - sequence.computed_offset
        self._due[due_step].append(sequence)

    def due(self) -> list[Sequence]:
        """The sequences that can't take part in the next step as they are."""
        found = self._due.get(self.num_steps, ())
        return [sequence for sequence in found if self._due_steps.get(sequence) == self.num_steps]

    def advance(self) -> None:
        """All sequences compute a token."""
        self._due.pop(self.num_steps, None)
        self.num_steps += 1

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. O(rows)."""
        assert self.slots.tolist() == [sequence.slot for sequence in self.sequences]
        assert self.epochs == [sequence.epoch for sequence in self.sequences]
        for row, sequence in enumerate(self.sequences):
            assert sequence.batch is self and self._rows[sequence] == row and sequence.is_steady
            assert sequence.num_tokens + sequence.num_in_flight == sequence.num_computed + 1
            due_step = self._due_steps[sequence]
            assert sequence in self._due[due_step] and due_step >= self.num_steps
            num_left = sequence.table.capacity - sequence.num_computed
            num_left = min(num_left, sequence.max_total_len - 2 - sequence.num_computed)
            assert num_left == due_step - self.num_steps
        assert len(self._rows) == len(self._due_steps) == len(self)
        assert self.num_reporting == sum(sequence.reports_tokens for sequence in self.sequences)
        assert self._stops == Counter(token for sequence in self.sequences for token in sequence.stop_ids)
        assert self._kept == Counter(sequence.num_logprobs for sequence in self.sequences)
