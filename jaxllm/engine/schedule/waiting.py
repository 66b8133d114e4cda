"""The queue of groups whose sequences wait for a slot, by priority and arrival."""

import heapq
import itertools
from collections.abc import Iterable

from jaxllm.engine.schedule.sequence import Sequence
from jaxllm.engine.schedule.sequence_group import SequenceGroup

Entry = tuple[tuple[int, int], int, SequenceGroup]


class WaitingQueue:
    """A heap of groups by the first of their waiting sequences (`SequenceGroup.waiting`, which this alone writes).

    A group whose sequences wait for a sibling's prefill is parked: it has no entry until it is queued again. A step
    costs O(log waiting). An entry that is out of date stays in the heap until it surfaces, or until there are more of
    them than others: then all go at once.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._entry_of: dict[SequenceGroup, Entry | None] = {}  # of each group with waiting sequences; None: parked
        self._num_waiting = self._num_outdated = 0
        self._num_prompt_tokens = 0  # of the groups that are not parked, each prompt once
        self._returning: set[Sequence] = set()  # those that have run before
        self._count = itertools.count()

    def clear(self) -> None:
        for group in self._entry_of:
            group.waiting = []
        self._entries, self._entry_of = [], {}
        self._num_waiting = self._num_outdated = self._num_prompt_tokens = 0
        self._returning = set()

    def __len__(self) -> int:
        """The number of sequences, those of parked groups included."""
        return self._num_waiting

    def __contains__(self, group: SequenceGroup) -> bool:
        return group in self._entry_of

    @property
    def num_queued(self) -> int:
        """Groups that are not parked."""
        return len(self._entries) - self._num_outdated

    @property
    def num_tokens(self) -> int:
        """Tokens that those which wait have to compute, about: of each group that is not parked the prompt, and one of
        each other sequence."""
        return self._num_prompt_tokens + self._num_waiting - self.num_queued

    @property
    def num_returning(self) -> int:
        """How many of them have run before, and were preempted."""
        return len(self._returning)

    def add(self, group: SequenceGroup, sequences: Iterable[Sequence]) -> None:
        """These wait from now on, with their siblings that do; the group is queued."""
        sequences = list(sequences)
        self._returning.update(sequence for sequence in sequences if sequence.num_cached >= 0)
        before = len(group.waiting)
        group.waiting = sorted([*group.waiting, *sequences], key=lambda sequence: sequence.order)
        self._num_waiting += len(group.waiting) - before
        self.push(group)

    def push(self, group: SequenceGroup) -> None:
        """Queues a group in the place of its first waiting sequence, if it has any."""
        if not group.waiting:
            return
        order, old = group.waiting[0].order, self._entry_of.get(group)
        if old is not None:
            if old[0] == order:
                return
            self._num_outdated += 1
        else:
            self._num_prompt_tokens += _prompt_len(group)
        entry = self._entry_of[group] = order, next(self._count), group
        heapq.heappush(self._entries, entry)
        self._tidy()

    def pop(self) -> SequenceGroup | None:
        """Parks the first group and returns it; None if none is queued."""
        group = self.peek()
        if group is not None:
            heapq.heappop(self._entries)
            self._park(group)
            self._tidy()
        return group

    def peek(self) -> SequenceGroup | None:
        """The group that `pop` would return."""
        while self._entries:
            entry = self._entries[0]
            order, _, group = entry
            is_valid = self._entry_of.get(group) is entry
            if is_valid and order == group.waiting[0].order:
                return group
            heapq.heappop(self._entries)
            if is_valid:  # its first one has ended
                self._park(group)
                self.push(group)
            else:
                self._num_outdated -= 1
        return None

    def _park(self, group: SequenceGroup) -> None:
        self._entry_of[group] = None
        self._num_prompt_tokens -= _prompt_len(group)

    def take(self, sequence: Sequence) -> None:
        """The sequence has got a slot, or has ended. O(siblings that wait) on average."""
        group = sequence.group
        if len(group.waiting) == 1:
            if self._entry_of[group] is not None:
                self._park(group)
                self._num_outdated += 1
            del self._entry_of[group]
        group.waiting.remove(sequence)
        self._returning.discard(sequence)
        self._num_waiting -= 1
        if not group.waiting:
            self._tidy()

    def remove(self, group: SequenceGroup) -> None:
        """Its sequences wait elsewhere from now on."""
        for sequence in group.waiting.copy():
            self.take(sequence)

    def _tidy(self) -> None:
        """O(1) on average."""
        if 2 * self._num_outdated > len(self._entries):
            self._entries = [entry for entry in self._entry_of.values() if entry is not None]
            heapq.heapify(self._entries)
            self._num_outdated = 0

    def queued(self) -> list[SequenceGroup]:
        """The groups that are not parked. O(waiting), for checks, as is `sequences`."""
        return [group for group, entry in self._entry_of.items() if entry is not None]

    def sequences(self) -> list[Sequence]:
        """All that wait."""
        return [sequence for group in self._entry_of for sequence in group.waiting]

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds."""
        waiting = self.sequences()
        assert self._num_waiting == len(waiting) == len(set(waiting))
        assert self._returning <= set(waiting)
        assert self._num_prompt_tokens == sum(map(_prompt_len, self.queued()))
        assert all(sequence.slot < 0 and sequence.group.waiting for sequence in waiting)
        assert self._num_outdated == len(self._entries) - len(self.queued()) <= len(self._entries) / 2
        for group in self._entry_of:
            orders = [sequence.order for sequence in group.waiting]
            assert orders == sorted(orders)
        for group, entry in self._entry_of.items():
            if entry is None:
                assert any(sequence.fork_len for sequence in group.on_device), "it waits for nobody"
            else:
                assert entry in self._entries and entry[0] <= group.waiting[0].order


def _prompt_len(group: SequenceGroup) -> int:
    """Of a group that waits."""
    return len(group.waiting[0].prompt_token_ids)
