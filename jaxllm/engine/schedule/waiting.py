"""The queue of sequences that wait for a slot, by priority and arrival."""

import heapq

from jaxllm.engine.schedule.sequence import Sequence, Status, join

Entry = tuple[tuple[int, int], Sequence]


class WaitingQueue:
    """A heap of parents: sequences with the forks that start from them (`Sequence.forks`), if any.

    A step costs O(log waiting). A sequence that ends while it waits stays in the heap until it surfaces, or until more
    have ended than wait: then all ended ones are dropped at once.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._entries: list[Entry] = []
        self._num_waiting = self._num_ended = 0

    def __len__(self) -> int:
        """The number of sequences, forks included."""
        return self._num_waiting

    def push(self, parent: Sequence) -> None:
        heapq.heappush(self._entries, (parent.order, parent))
        self._num_waiting += 1 + len(parent.forks)

    def pop(self) -> Sequence | None:
        """Removes and returns the first parent that is still waiting, with its forks; None if none is."""
        parent = self.peek()
        if parent is not None:
            heapq.heappop(self._entries)
            self._num_waiting -= 1 + len(parent.forks)
            self._drop_ended()
        return parent

    def peek(self) -> Sequence | None:
        """The parent that `pop` would return."""
        while self._entries:
            _, parent = self._entries[0]
            num_queued = 1 + len(parent.forks)
            if (first := _without_ended(parent)) is parent:
                self._num_ended -= num_queued - 1 - len(parent.forks)
                return parent
            heapq.heappop(self._entries)
            if first is None:
                self._num_ended -= num_queued
            else:
                self._num_ended -= num_queued - 1 - len(first.forks)
                heapq.heappush(self._entries, (first.order, first))
        return None

    def forget(self, sequence: Sequence) -> None:
        """A waiting sequence has ended, and its status says so. O(1) on average."""
        self._num_waiting -= 1
        self._num_ended += 1
        self._drop_ended()

    def _drop_ended(self) -> None:
        if self._num_ended > self._num_waiting:
            parents = [_without_ended(parent) for _, parent in self._entries]
            self._entries = [(parent.order, parent) for parent in parents if parent is not None]
            heapq.heapify(self._entries)
            self._num_ended = 0

    def sequences(self) -> list[Sequence]:
        """All that wait. O(waiting), for checks."""
        return [sequence for sequence in self._queued() if sequence.status is Status.WAITING]

    def _queued(self) -> list[Sequence]:
        return [sequence for _, parent in self._entries for sequence in (parent, *parent.forks)]

    def check(self) -> None:
        waiting = self.sequences()
        assert self._num_waiting == len(waiting) == len(set(waiting))
        assert self._num_ended == len(self._queued()) - len(waiting) <= self._num_waiting


def _without_ended(parent: Sequence) -> Sequence | None:
    """An entry without its ended sequences: the parent; a fork in its place if it has ended; None if all have."""
    forks = [fork for fork in parent.forks if fork.status is Status.WAITING]
    if parent.status is Status.WAITING:
        parent.forks = forks
        return parent
    return join(forks) if forks else None
