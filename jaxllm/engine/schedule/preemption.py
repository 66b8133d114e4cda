"""Chooses the sequences that give up their blocks when the pool is full, and whether to swap or to recompute them.

All sequences of a group leave the device together, so that the blocks they share are really freed (PagedAttention,
arXiv 2309.06180, section 4.5); the group that is last by priority and arrival goes first.
"""

import itertools
from collections import Counter
from collections.abc import Callable

from jaxllm.engine.schedule.block_table import Outgoing, restore
from jaxllm.engine.schedule.plan import Plan, Swap
from jaxllm.engine.schedule.prompt_room import num_affordable
from jaxllm.engine.schedule.running import RunningSet
from jaxllm.engine.schedule.sequence import Sequence, Status
from jaxllm.engine.schedule.sequence_group import HostCopy, SequenceGroup
from jaxllm.engine.schedule.waiting import WaitingQueue


class Preemption:
    """Preempts sequences, and requeues them in their old places.

    `prefers_swap(number of pages, number of tokens)` chooses; at most `max_host_pages` lie in host memory.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        running_set: RunningSet,
        prefers_swap: Callable[[int, int], bool],
        max_host_pages: int,
    ):
        self.queue, self.running_set, self.pool = queue, running_set, running_set.pool
        self.max_host_pages, self.num_host_pages = max_host_pages, 0
        self.num_swapped = self.num_recomputed = 0  # sequences preempted either way
        self.num_pages_out = self.num_pages_in = 0
        self._prefers_swap = prefers_swap
        self.keys = itertools.count()  # of copies in host memory
        self._released_copies: list[int] = []
        self._draining: list[Sequence] = []

    def reset(self) -> None:
        """The device's state is lost: the copies in host memory are dropped with it."""
        self.num_host_pages = 0
        self._released_copies, self._draining = [], []

    def evict_drained(self, plan: Plan) -> None:
        """Evicts the victims of an earlier plan, once nothing of theirs is in flight."""
        self._draining = [r for r in self._draining if r.status is Status.DRAINING]
        if self._draining and not any(r.num_in_flight for r in self._draining):
            victims, self._draining = self._draining, []
            self._evict(plan, victims)

    def make_room(self, plan: Plan, max_tokens: int) -> None:
        """Preempts until the next step's decodes have their blocks, and the first prompt that is not computed yet has
        one, or until a victim has to drain first."""
        while not self._draining:
            num_wanted, prefills = self._look_at_running()
            num_left, num_growing = self.pool.num_free - num_wanted, self.running_set.count_growing(len(prefills))
            if num_left >= 0 and (not prefills or num_affordable(prefills[0], num_left, num_growing, max_tokens)):
                return
            if self._release_behind_all() or self._drop_stem():
                continue
            victims = self._last_of_all() if num_left < 0 else self._last_behind(prefills)
            if not victims:
                return  # decodes will end, and give blocks back
            self._preempt(plan, victims)

    def _preempt(self, plan: Plan, victims: list[Sequence]) -> None:
        for sequence in victims:
            sequence.group.take_back(sequence)
        if not any(sequence.num_in_flight for sequence in victims):
            self._evict(plan, victims)
            return
        for sequence in victims:  # left out of plans until it is committed
            if sequence.batch is not None:
                self.running_set.leave_batch(sequence)
            sequence.status = Status.DRAINING
        self._draining = victims

    def _release_behind_all(self) -> bool:
        """Gives up what nobody reads any more: beams that wait for others, and those with room in their last block, may
        still hold all of a chunk. False if that is nothing."""
        num_free = self.pool.num_free
        for sequence in self.running_set.individuals:
            if sequence.status in (Status.RUNNING, Status.HELD):
                self.running_set.release_behind(sequence)
        return self.pool.num_free > num_free

    def _drop_stem(self) -> bool:
        """Takes the blocks of sequences that wait while no other group, or none of theirs, is on the device: they
        compute them again. False if there are none."""
        for group in self.running_set.stems:
            if len(group.on_device) in (0, len(self.running_set)):
                self.running_set.drop_stem(group)
                return True
        return False

    def _look_at_running(self) -> tuple[int, list[Sequence]]:
        """Pages that the next decodes need, and the prompts that are not computed yet, the first in front."""
        prefills: list[Sequence] = []
        growing = [s for s in self.running_set.batch.due() if s.num_computed == s.table.capacity]
        sharing = Counter()
        for sequence in self.running_set.individuals:
            if sequence.status is not Status.RUNNING:
                continue
            if sequence.num_tokens - sequence.num_computed > 1:
                prefills.append(sequence)
            elif sequence.can_sample:
                table = sequence.table
                if sequence.num_computed == table.capacity:
                    growing.append(sequence)
                elif table.shares_tail:
                    sharing[table.ids[-1]] += 1
        for sequence in growing + prefills[:1]:  # what they no longer read is free first
            self.running_set.release_behind(sequence)
        wanted = len(growing)
        # The last holder of a block needs no copy.
        wanted += sum(min(count, self.pool.refs[block] - 1) for block, count in sharing.items())
        return wanted * self.pool.pages_per_block, sorted(prefills, key=lambda sequence: sequence.order)

    def _last_behind(self, prefills: list[Sequence]) -> list[Sequence]:
        """Who holds blocks that the first of the prompts needs more: the last one of them, with its group."""
        first, last = prefills[0], prefills[-1]
        if last.group is not first.group:
            return last.group.on_device
        if last is not first and len(first.group.on_device) == len(self.running_set):
            return self._split_off(last)
        return []

    def _last_of_all(self) -> list[Sequence]:
        last = max(self.running_set, key=lambda r: r.order)
        victims = last.group.on_device
        if len(victims) < len(self.running_set):
            return victims
        # The group is alone on the device. Beams fit, or were refused; of samples, the last one waits for the others.
        return self._split_off(last)

    def _split_off(self, last: Sequence) -> list[Sequence]:
        group = last.group
        group.split_off(last)
        if last.fork_len:  # another one computes what they wait for
            last.fork_len = 0
            self.queue.push(group)
        return [last]

    def _evict(self, plan: Plan, victims: list[Sequence]) -> None:
        group = victims[0].group
        sequences = group.returning(victims)
        swaps = self._swap_out(plan, sequences)
        self.running_set.drop_stem(group)
        for sequence in victims:
            self.running_set.remove(sequence)
        if not swaps:
            for sequence in sequences:
                sequence.num_computed = 0
        if swaps:
            self.num_swapped += len(sequences)
        else:
            self.num_recomputed += len(sequences)
        self.queue.add(group, sequences)

    def _swap_out(self, plan: Plan, sequences: list[Sequence]) -> bool:
        """Plans the copy of their blocks to host memory; False if they had better be computed again."""
        group = sequences[0].group
        if any(r.num_tokens - r.num_computed > 1 or r.awaits_prompt_logprobs or not r.generates for r in sequences):
            return False  # mid-prefill: recompute, with what the prefix cache may have
        if self.pool.has_states and group.chooses_tokens:
            return False  # what was taken back is computed again, and a state has gone on
        outgoing = Outgoing(self.pool)
        places = {sequence: outgoing.add(sequence.table) for sequence in sequences}
        num_pages, num_blocks = len(outgoing.pages), sum(len(sequence.table) for sequence in sequences)
        if num_pages > self.pool.num_pages or self.num_host_pages + num_pages > self.max_host_pages:
            return False
        num_blocks -= sum(len(sequence.table.ids) for sequence in sequences) - outgoing.groups.count(0)  # shared ones
        if not self._prefers_swap(num_pages, num_blocks * self.pool.block_size):
            return False
        group.host_copy = HostCopy(next(self.keys), num_pages, outgoing.groups, places)
        plan.swap_outs.append(Swap(group.host_copy.key, outgoing.pages))
        self.num_host_pages += num_pages
        self.num_pages_out += num_pages
        return True

    def swap_in(self, plan: Plan, group: SequenceGroup) -> None:
        """Gives sequences that left together blocks again, and plans the copy back. There is room."""
        copy, group.host_copy = group.host_copy, None
        assert copy is not None
        pages = restore([sequence.table for sequence in copy.places], list(copy.places.values()), copy.groups)
        plan.swap_ins.append(Swap(copy.key, pages))
        self.num_host_pages -= copy.num_pages
        self.num_pages_in += sum(page < self.pool.num_pages for page in pages)  # others are of siblings that ended

    def report_released(self, plan: Plan) -> None:
        """Puts the copies that nobody wants back into the plan, for the device to drop."""
        plan.released_copies, self._released_copies = self._released_copies, []

    def forget(self, sequence: Sequence) -> None:
        """A waiting sequence has ended, and does not want its blocks back."""
        group = sequence.group
        copy = group.host_copy
        if copy is not None and copy.places.pop(sequence, None) is not None and not copy.places:
            group.host_copy = None
            self.num_host_pages -= copy.num_pages
            self._released_copies.append(copy.key)
