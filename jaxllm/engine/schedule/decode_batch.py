"""The sequences that take one token in each step, as columns that stay from step to step."""

from array import array
from collections import Counter, defaultdict, deque

from jaxllm.engine.schedule.sequence import Sequence


class DecodeBatch:
    """A standing batch of decode rows. A step takes its columns as they are; Python looks at a sequence only when
    something happens to it: it enters or leaves, its last block is full, or its next row is its last.

    How far its sequences are follows from `num_steps`: each has computed one token more with every step
    (`Sequence.num_computed`). When the next thing happens to one is known when it enters (`set_due`).
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.num_steps = 0  # that the batch has taken part in
        self.reset()

    def reset(self) -> None:
        """Drops all rows. The sequences are told by who restarts them."""
        self.sequences: list[Sequence] = []
        self.slots = array("i")  # of each sequence
        self.epochs: list[int] = []  # likewise
        self._rows: dict[Sequence, int] = {}
        self._due_steps: dict[Sequence, int] = {}  # before which something happens to it
        self._due: defaultdict[int, list[Sequence]] = defaultdict(list)  # by step; who has left is still there
        self.num_reporting = 0  # sequences whose every token is looked at
        self.stop_ids: frozenset[int] = frozenset()  # of all
        self._stop_ids: Counter[frozenset[int]] = Counter()  # of how many
        self._left: deque[tuple[int, Sequence]] = deque()  # after which step of the batch

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence) -> None:
        """Appends a row for a sequence whose last token is the only one to compute. O(1), as is `remove`."""
        sequence.batch, self._rows[sequence] = self, len(self.sequences)
        sequence.computed_offset -= self.num_steps
        self.sequences.append(sequence)
        self.slots.append(sequence.slot)
        self.epochs.append(sequence.epoch)
        self._count(sequence, 1)
        self.set_due(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence's row out; the last row takes its place."""
        row, last = self._rows[sequence], self.sequences[-1]
        self.sequences[row], self.slots[row], self.epochs[row] = last, self.slots[-1], self.epochs[-1]
        self._rows[last] = row
        for column in (self.sequences, self.slots, self.epochs):
            column.pop()
        sequence.batch = None
        sequence.computed_offset += self.num_steps
        del self._rows[sequence], self._due_steps[sequence]
        self._left.append((self.num_steps, sequence))
        self._count(sequence, -1)
        if not self.sequences:
            self._due.clear()

    def _count(self, sequence: Sequence, by: int) -> None:
        self.num_reporting += by * sequence.reports_tokens
        counts, own = self._stop_ids, sequence.stop_ids
        if own:
            counts[own] += by
            if counts[own] == max(0, by):  # the first with these, or the last
                if by < 0:
                    del counts[own]
                self.stop_ids = frozenset().union(*counts)

    def left_since(self, step: int) -> set[Sequence]:
        """Who has left after this step of the batch's, of which none before is asked for any more."""
        while self._left and self._left[0][0] < step:
            self._left.popleft()
        return {sequence for _, sequence in self._left}

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
        assert self.stop_ids == frozenset().union(*(sequence.stop_ids for sequence in self.sequences))
