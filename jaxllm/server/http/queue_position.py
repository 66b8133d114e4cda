"""Who waits for the engine: what tells a client how many are before it."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager


class QueuePosition:
    """Of one request in the line, until it has its first token."""

    def __init__(self, line: "ArrivalQueue", order: tuple[int, int]):
        self._line, self._order = line, order

    def leave(self) -> None:
        self._line.places.pop(self._order, None)

    def ahead(self, num_waiting: int) -> int:
        """Requests before it of those `num_waiting` that the engine says have no place in the batch. The others before
        it run, and have no token yet. An estimate, as the engine's number is a moment old."""
        places = self._line.places
        if self._order not in places:
            return 0
        before = sum(order < self._order for order in places)
        return max(0, before - max(0, len(places) - num_waiting))


class ArrivalQueue:
    """Requests without a token, in the engine's order: by priority, and then by arrival."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, int], QueuePosition] = {}
        self._arrivals = itertools.count()

    @contextmanager
    def join(self, priority: int) -> Iterator[QueuePosition]:
        order = (priority, next(self._arrivals))
        place = self.places[order] = QueuePosition(self, order)
        try:
            yield place
        finally:
            place.leave()
