"""The order of requests that wait for the engine, from which clients learn how many are before them."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager


class QueuePosition:
    """The position of one request in the queue, until its first token."""

    def __init__(self, queue: "ArrivalQueue", order: tuple[int, int]):
        self._queue, self._order = queue, order

    def leave(self) -> None:
        self._queue.positions.pop(self._order, None)

    def ahead(self, num_waiting: int) -> int:
        """An estimate of the waiting requests before this one. The engine reported `num_waiting` a moment ago; the
        other requests without a token are running."""
        positions = self._queue.positions
        if self._order not in positions:
            return 0
        before = sum(order < self._order for order in positions)
        return max(0, before - max(0, len(positions) - num_waiting))


class ArrivalQueue:
    """Requests without a token, in the engine's order: by priority, and then by arrival."""

    def __init__(self) -> None:
        self.positions: dict[tuple[int, int], QueuePosition] = {}
        self._arrivals = itertools.count()

    @contextmanager
    def join(self, priority: int) -> Iterator[QueuePosition]:
        order = (priority, next(self._arrivals))
        position = self.positions[order] = QueuePosition(self, order)
        try:
            yield position
        finally:
            position.leave()
