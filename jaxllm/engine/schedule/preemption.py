"""Chooses the sequences that give up their blocks when the pool is full, and whether to swap or to recompute them.

All sequences of a group leave the device together, so that the blocks they share are really freed (PagedAttention,
arXiv 2309.06180, section 4.5); the group that is last by priority and arrival goes first.
"""

import itertools
from collections import Counter
from collections.abc import Callable

from jaxllm.engine.schedule.block_table import restore
from jaxllm.engine.schedule.plan import Plan, Swap
from jaxllm.engine.schedule.running import RunningSet
from jaxllm.engine.schedule.sequence import HostCopy, Sequence, Status, join
from jaxllm.engine.schedule.waiting import WaitingQueue


class Preemption:
    """Preempts sequences, and requeues them in their old places.

    `prefers_swap(number of blocks, number of tokens)` chooses; at most `max_host_blocks` lie in host memory.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        running_set: RunningSet,
        prefers_swap: Callable[[int, int], bool],
        max_host_blocks: int,
    ):
        self.queue, self.running_set, self.pool = queue, running_set, running_set.pool
        self.max_host_blocks, self.num_host_blocks = max_host_blocks, 0
        self.num_swapped = self.num_recomputed = 0  # sequences preempted either way
        self.num_blocks_out = self.num_blocks_in = 0
        self._prefers_swap = prefers_swap
        self._keys = itertools.count()
        self._released_copies: list[int] = []
        self._draining: list[Sequence] = []

    def reset(self) -> None:
        """The device's state is lost: the copies in host memory are dropped with it."""
        self.num_host_blocks = 0
        self._released_copies, self._draining = [], []

    def evict_drained(self, plan: Plan) -> None:
        """Evicts the victims of an earlier plan, once nothing of theirs is in flight."""
        self._draining = [r for r in self._draining if r.status is Status.DRAINING]
        if self._draining and not any(r.num_in_flight for r in self._draining):
            victims, self._draining = self._draining, []
            self._evict(plan, victims)

    def make_room(self, plan: Plan) -> None:
        """Preempts until the blocks that the next step writes are free, or until a victim has to drain first."""
        while not self._draining and self._num_missing() > 0:
            victims = self._choose_victims()
            if any(r.num_in_flight for r in victims):  # left out of plans until it is committed
                for sequence in victims:
                    if sequence.batch is not None:
                        self.running_set.leave_batch(sequence)
                    sequence.status = Status.DRAINING
                self._draining = victims
            else:
                self._evict(plan, victims)

    def _num_missing(self) -> int:
        """Blocks that the next decodes need beyond the free ones."""
        due = self.running_set.batch.due()
        wanted = sum(sequence.num_computed == sequence.table.capacity for sequence in due)
        sharing = Counter()
        for sequence in self.running_set.individuals:
            known = sequence.num_tokens + sequence.num_in_flight
            if sequence.status is Status.RUNNING and sequence.can_sample and known - sequence.num_computed == 1:
                table = sequence.table
                if sequence.num_computed == table.capacity:
                    wanted += 1
                elif table.shares_tail:
                    sharing[table.ids[-1]] += 1
        # The last holder of a block needs no copy.
        wanted += sum(min(count, self.pool.refs[block] - 1) for block, count in sharing.items())
        return wanted - self.pool.num_free

    def _choose_victims(self) -> list[Sequence]:
        last = max(self.running_set, key=lambda r: r.order)
        victims = last.group.on_device
        if len(victims) < len(self.running_set):
            return victims
        # The group is alone on the device. Beams fit, or were refused; of samples, the last one waits for the others.
        last.group.split_off(last)
        return [last]

    def _evict(self, plan: Plan, victims: list[Sequence]) -> None:
        sequences = victims[0].group.returning(victims)
        swaps = self._swap_out(plan, sequences)
        for sequence in victims:
            self.running_set.remove(sequence)
        for sequence in sequences:
            if swaps:
                # A beam that waited for the others computes its last token again.
                sequence.num_computed = min(sequence.num_computed, sequence.num_tokens - 1)
            else:
                sequence.forget_computed()
        if swaps:
            self.num_swapped += len(sequences)
        else:
            self.num_recomputed += len(sequences)
        self.queue.push(join(sequences))

    def _swap_out(self, plan: Plan, sequences: list[Sequence]) -> bool:
        """Plans the copy of their blocks to host memory; False if they had better be computed again."""
        if any(r.forks or r.num_tokens - r.num_computed > 1 or r.awaits_prompt_logprobs for r in sequences):
            return False  # mid-prefill: recompute, with what the prefix cache may have
        blocks: list[int] = []
        places: dict[int, int] = {}
        for sequence in sequences:
            sequence.host_blocks = []
            table = sequence.table
            for i, block in enumerate(table.ids):
                is_tail = table.shares_tail and i == len(table) - 1
                if is_tail or block not in places:  # a shared block that is written next comes back once for each
                    places[block] = len(blocks)
                    blocks.append(block)
                sequence.host_blocks.append(places[block])
        if len(blocks) > self.pool.num_blocks or self.num_host_blocks + len(blocks) > self.max_host_blocks:
            return False
        if not self._prefers_swap(len(blocks), len(blocks) * self.pool.block_size):
            return False
        copy = HostCopy(next(self._keys), len(blocks), len(sequences))
        for sequence in sequences:
            sequence.host_copy = copy
        plan.swap_outs.append(Swap(copy.key, blocks))
        self.num_host_blocks += len(blocks)
        self.num_blocks_out += len(blocks)
        return True

    def swap_in(self, plan: Plan, sequences: list[Sequence]) -> None:
        """Gives sequences that left together blocks again, and plans the copy back. There is room."""
        copy = sequences[0].host_copy
        tables, places = [s.table for s in sequences], [s.host_blocks for s in sequences]
        blocks = restore(tables, places, copy.num_blocks)
        for sequence in sequences:
            sequence.host_copy = None
        plan.swap_ins.append(Swap(copy.key, blocks))
        self.num_host_blocks -= copy.num_blocks
        self.num_blocks_in += sum(block < self.pool.num_blocks for block in blocks)  # others are of siblings that ended

    def report_released(self, plan: Plan) -> None:
        """Puts the copies that nobody wants back into the plan, for the device to drop."""
        plan.released_copies, self._released_copies = self._released_copies, []

    def forget(self, sequence: Sequence) -> None:
        """A waiting sequence has ended: release its host copy."""
        copy, sequence.host_copy = sequence.host_copy, None
        if copy is not None:
            copy.num_users -= 1
            if not copy.num_users:
                self.num_host_blocks -= copy.num_blocks
                self._released_copies.append(copy.key)
