"""The queue of those that wait for a place on the device, by priority and arrival."""

import heapq

from jaxllm.engine.schedule.sequence import Sequence, Status, join

Entry = tuple[tuple[int, int], Sequence]


class WaitingQueue:
    """A heap of parents: sequences that others join on their way (`Sequence.forks`), or none.

    Nothing here is O(waiting): one that ends while it waits stays until it surfaces.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._entries: list[Entry] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        """Sequences, those that join others included."""
        return self._num_waiting

    def push(self, parent: Sequence) -> None:
        heapq.heappush(self._entries, (parent.order, parent))
        self._num_waiting += 1 + len(parent.forks)

    def pop(self) -> Sequence | None:
        """Takes out the first parent that is still waiting, with its forks; None if nobody waits."""
        while self._entries:
            _, parent = heapq.heappop(self._entries)
            forks = [fork for fork in parent.forks if fork.status is Status.WAITING]
            if parent.status is Status.WAITING:
                parent.forks = forks
                self._num_waiting -= 1 + len(forks)
                return parent
            if forks:  # theirs has ended: they get another
                heapq.heappush(self._entries, ((first := join(forks)).order, first))
        return None

    def forget(self, sequence: Sequence) -> None:
        """A waiting sequence has ended."""
        self._num_waiting -= 1

    def sequences(self) -> list[Sequence]:
        """All that wait. O(waiting), for checks."""
        queued = [sequence for _, parent in self._entries for sequence in (parent, *parent.forks)]
        return [sequence for sequence in queued if sequence.status is Status.WAITING]

    def check(self) -> None:
        waiting = self.sequences()
        assert self._num_waiting == len(waiting) == len(set(waiting))
