"""The queue of those that wait for a place on the device, by priority and arrival."""

import heapq

from jaxllm.engine.schedule.sequence import Request, Status, join

Entry = tuple[tuple[int, int], Request]


class WaitingQueue:
    """A heap of leaders: requests that others join on their way (`Request.forks`), or none.

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

    def push(self, leader: Request) -> None:
        heapq.heappush(self._entries, (leader.order, leader))
        self._num_waiting += 1 + len(leader.forks)

    def pop(self) -> Request | None:
        """Takes out the first leader that is still waiting, with its forks; None if nobody waits."""
        while self._entries:
            _, leader = heapq.heappop(self._entries)
            forks = [fork for fork in leader.forks if fork.status is Status.WAITING]
            if leader.status is Status.WAITING:
                leader.forks = forks
                self._num_waiting -= 1 + len(forks)
                return leader
            if forks:  # theirs has ended: they get another
                heapq.heappush(self._entries, ((first := join(forks)).order, first))
        return None

    def forget(self, request: Request) -> None:
        """A waiting request has ended."""
        self._num_waiting -= 1

    def requests(self) -> list[Request]:
        """All that wait. O(waiting), for checks."""
        queued = [request for _, leader in self._entries for request in (leader, *leader.forks)]
        return [request for request in queued if request.status is Status.WAITING]

    def check(self) -> None:
        waiting = self.requests()
        assert self._num_waiting == len(waiting) == len(set(waiting))
