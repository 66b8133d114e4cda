"""Several shards of data in one engine: each has slots, blocks and a scheduler of its own, and all take the same steps.

Requests wait in one queue in front of the shards. Each step gives the first of them to the shards that can admit them
in it, so that nobody waits behind a full shard while another has room.
"""

from collections import abc
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.engine.schedule.block_table import BlockTable
from jaxllm.engine.schedule.plan import Plan, ShardedPlan, StepPlan
from jaxllm.engine.schedule.prompt_room import num_lacking
from jaxllm.engine.schedule.retries import quarantine
from jaxllm.engine.schedule.scheduler import Scheduler
from jaxllm.engine.schedule.sequence import End, Sequence, Status
from jaxllm.engine.schedule.sequence_group import GroupRow, SequenceGroup
from jaxllm.engine.schedule.shared_prompt import SharedPrompt
from jaxllm.engine.schedule.waiting import WaitingQueue

if TYPE_CHECKING:
    from jaxllm.engine.logprobs import PackedLogprobs


class Shards:
    """What an engine asks of a scheduler, of several. While it `may_share`, a prompt of more than one step of
    `most_tokens` is computed by all of them, if nobody else waits for a prompt's tokens."""

    def __init__(self, schedulers: abc.Sequence[Scheduler], *, may_share: Callable[[], bool], most_tokens: int):
        self.shards = tuple(schedulers)
        self._may_share, self._most_tokens = may_share, most_tokens
        self._shared: SharedPrompt | None = None
        self.waiting = WaitingQueue()  # groups that no shard has
        self._num_full_waiting = 0  # of their sequences, those that need the full sampler
        self._of_pool = {scheduler.pool: scheduler for scheduler in schedulers}
        first = schedulers[0]
        for other in schedulers[1:]:
            other.running_set.retries = first.running_set.retries  # a step is one of all shards
            other.preemption.keys = first.preemption.keys
        self.forget_keys()

    def of(self, sequence: Sequence) -> Scheduler:
        """The scheduler that has the sequence; of one that waits for a shard, any."""
        return self._of_pool[sequence.table.pool]

    @property
    def running(self) -> list[Sequence]:
        """The sequences on the device."""
        return [sequence for scheduler in self.shards for sequence in scheduler.running]

    @property
    def num_used(self) -> int:
        """Pages that sequences hold."""
        return sum(scheduler.num_used for scheduler in self.shards)

    @property
    def num_unfinished_full(self) -> int:
        return self._num_full_waiting + sum(scheduler.num_unfinished_full for scheduler in self.shards)

    def has_work(self) -> bool:
        return bool(self.waiting) or any(scheduler.has_work() for scheduler in self.shards)

    def least_tokens(self) -> int:
        """See `Scheduler.least_tokens`."""
        head = self.waiting.peek() if self.shards[0].admission.whole_prompts else None
        own = 1 if head is None else head.waiting[0].num_tokens
        return max(own, *(scheduler.least_tokens() for scheduler in self.shards))

    def num_left_tokens(self) -> int:
        """See `Scheduler.num_left_tokens`: of a shard, the most."""
        share = -(-self.waiting.num_tokens // len(self.shards))
        return share + max(scheduler.num_left_tokens() for scheduler in self.shards)

    @property
    def num_sequences(self) -> int:
        """See `Scheduler.num_sequences`: of a shard, the most."""
        share = -(-len(self.waiting) // len(self.shards))
        return share + max(scheduler.num_sequences for scheduler in self.shards)

    def forget_keys(self) -> None:
        """Drops the prefix cache of all shards. They have the same keys from then on."""
        first, *others = (scheduler.pool for scheduler in self.shards)
        first.forget_keys()
        for pool in others:
            pool.forget_keys(first)

    def add(self, group: SequenceGroup) -> None:
        """Queues a request's sequences. They must fit a shard's pool alone."""
        for sequence in group.sequences:
            sequence.table = BlockTable(self.shards[0].pool, keeps_first=sequence.traits.reads_history)
        self._num_full_waiting += group.num_full
        self.waiting.add(group, group.live)

    def finish(self, sequence: Sequence, end: End) -> None:
        """See `Scheduler.finish`."""
        if sequence.status is Status.FINISHED or sequence.group not in self.waiting:
            self.of(sequence).finish(sequence, end)
            if self._shared is not None and self._shared.sequence.status is Status.FINISHED:
                self._stop_sharing()
            return
        for other in sequence.group.finish(sequence, end):
            if other in other.group.waiting:
                self.waiting.take(other)
            self._num_full_waiting -= other.traits.needs_full_sampler
            self.shards[0].running_set.retries.forget(other)
            other.status, other.end = Status.FINISHED, end

    def schedule(self, max_tokens: int) -> ShardedPlan | None:
        """Plans a step of at most `max_tokens` tokens of each shard. None if nothing can run now."""
        self._take_back()
        if self._shared is not None and self._shared.is_over(max_tokens):
            self._stop_sharing()
        if self.waiting:
            self._give(max_tokens)
        awaits_host = any(scheduler.running_set.has_host_dependent for scheduler in self.shards)
        drafts = {
            scheduler: scheduler.draft(self._share_of(scheduler, max_tokens), awaits_host=awaits_host)
            for scheduler in self.shards
        }
        if self._shared is not None:
            self._shared.add_parts(drafts, max_tokens)
        plans = [scheduler.seal(plan) for scheduler, plan in drafts.items()]
        if self._shared is not None:
            self._shared.offer()
        return ShardedPlan([plan or Plan() for plan in plans]) if any(plans) else None

    def _share_of(self, scheduler: Scheduler, max_tokens: int) -> int:
        """What a shard's own sequences may have of a step: a prompt that all compute has half of what decodes leave."""
        return max_tokens if self._shared is None else max_tokens - (max_tokens - len(scheduler.running_set)) // 2

    def _stop_sharing(self) -> None:
        if self._shared is not None:
            self._shared.end()
            self._shared = None

    def _take_back(self) -> None:
        """The first who waits in a shard, and could run in another as well, may do so."""
        for scheduler in self.shards:
            group = scheduler.waiting.peek()
            if group is not None and not scheduler.admission.num_passed and scheduler.may_leave(group):
                waiting = list(group.waiting)
                scheduler.remove(group)
                self._num_full_waiting += group.num_full
                self.waiting.add(group, waiting)

    def _give(self, max_tokens: int) -> None:
        """Gives waiting groups, in their order, to the shards that have room for them in the next step. One for which
        none has may be the first in the line of a shard: it is admitted there as blocks become free."""
        rooms = [_Room(scheduler, max_tokens) for scheduler in self.shards]
        while (group := self.waiting.peek()) is not None:
            open_to = [room for room in rooms if room.is_open_to(group)]
            fitting = [room for room in open_to if room.fits(group)]
            room = _best(fitting or [room for room in open_to if not room.num_given], group)
            if room is None:
                return
            keys = group.waiting[0].table
            self.waiting.remove(group)
            self._num_full_waiting -= group.num_full
            room.take(group, is_last=not fitting)
            table = group.waiting[0].table
            table.keys, table.key_generation = keys.keys, keys.key_generation
            if fitting and self._should_share(group, rooms, max_tokens):
                others = [each.scheduler for each in rooms if each is not room]
                self._shared = SharedPrompt(group, room.scheduler, others)

    def _should_share(self, group: SequenceGroup, rooms: abc.Sequence["_Room"], max_tokens: int) -> bool:
        """Whether all shards compute the prompt: it is longer than a step, all have room for it, and nobody else has
        one, so that without it they would compute padding."""
        first = group.waiting[0]
        if self._shared is not None or self.waiting or first.num_tokens <= max_tokens or max_tokens < self._most_tokens:
            return False
        wants_all = first.awaits_prompt_logprobs or not first.generates
        if wants_all or sum(room.num_given for room in rooms) > 1 or any(map(_Room.has_prompts, rooms)):
            return False
        return self._may_share() and all(room.has_beside(first) for room in rooms)

    def commit(
        self,
        plan: StepPlan,
        sampled: abc.Sequence[int] | np.ndarray,
        logprobs: "abc.Sequence[PackedLogprobs | float | None] | np.ndarray | None" = None,
        candidates: abc.Sequence[GroupRow | None] | None = None,
    ) -> list[Sequence]:
        """See `Committer.commit`."""
        updated, start = [], 0
        for scheduler, own in zip(self.shards, plan.shards, strict=True):
            stop = start + own.num_samples
            kept = None if logprobs is None else logprobs[start:stop]
            rows = None if candidates is None else candidates[start:stop]
            updated += scheduler.commit(own, sampled[start:stop], kept, rows)
            start = stop
        return updated

    def restart(
        self, unfinished: Iterable[Sequence], failed: Iterable[Sequence] = (), cause: str = ""
    ) -> list[Sequence]:
        """See `Scheduler.restart`."""
        self.waiting.clear()
        self._num_full_waiting, self._shared = 0, None
        for scheduler in self.shards:
            scheduler.reset()
        self.forget_keys()
        for group in dict.fromkeys(sequence.group for sequence in unfinished):
            group.restart()
            self.add(group)
        return quarantine(failed, cause, self.shards[0].running_set.retries, self.finish)

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. O(blocks + running + waiting)."""
        self.waiting.check()
        for scheduler in self.shards:
            scheduler.check()
            assert scheduler.pool.generation == self.shards[0].pool.generation
        groups = {sequence.group for sequence in self.waiting.sequences()}
        assert all(not group.on_device and group.host_copy is None for group in groups)
        assert self._num_full_waiting == sum(group.num_full for group in groups)


class _Room:
    """What a shard has for newcomers in the next step, which may have `max_tokens` tokens."""

    def __init__(self, scheduler: Scheduler, max_tokens: int):
        running_set, queue, num_passed = scheduler.running_set, scheduler.waiting, scheduler.admission.num_passed
        self.scheduler, self._max_tokens = scheduler, max_tokens
        self.num_given = 0
        head = queue.peek() if queue.num_queued > num_passed else None
        self._first_behind = None if head is None else head.waiting[0].order  # who waits here goes before those after
        prefills = [s for s in running_set.individuals if s.num_tokens - s.num_computed > 1]
        self._has_prompts = bool(prefills)
        self.num_seqs = len(running_set)
        self._num_slots = len(running_set.free_slots) - num_passed
        self.num_free = scheduler.pool.num_free - sum(num_lacking(each, max_tokens) for each in prefills)
        left = max_tokens - self.num_seqs + len(prefills)
        num_wanted = sum(each.num_tokens - each.num_computed for each in prefills)
        self.num_tokens = max(left - num_wanted, left // 2)  # a long prompt leaves half of a step to the next

    def is_open_to(self, group: SequenceGroup) -> bool:
        """Whether the group would be the next to be admitted here, and may be in the next step."""
        first = group.waiting[0]
        if self._first_behind is not None and self._first_behind < first.order:
            return False
        least = first.num_tokens if self.scheduler.admission.whole_prompts else 1
        return self._num_slots >= group.num_slots(1) and self.num_tokens >= min(least, self._max_tokens)

    def fits(self, group: SequenceGroup) -> bool:
        """Whether there are blocks for its whole prompt, and for who runs here to grow."""
        pool = self.scheduler.pool
        reserve = min((self.num_seqs + 1) * pool.pages_per_block, pool.num_pages // 8) if self.num_seqs else 0
        return num_lacking(group.waiting[0], self._max_tokens) + reserve <= self.num_free

    def has_prompts(self) -> bool:
        """Whether one is being computed, or waits."""
        return self._has_prompts or self.scheduler.waiting.num_queued > self.num_given

    def has_beside(self, sequence: Sequence) -> bool:
        """Whether there is a slot and blocks for a guest, whose home may be here."""
        reserve = max(self.scheduler.pool.num_pages // 8, self.num_seqs + 1)
        num_pages = num_lacking(sequence, self._max_tokens) + reserve
        return bool(self.scheduler.running_set.free_slots) and num_pages <= self.scheduler.pool.num_free

    def take(self, group: SequenceGroup, *, is_last: bool) -> None:
        """Gives the group to the shard; nobody after it, if it `is_last`."""
        self.scheduler.add(group)
        first = group.waiting[0]
        self.num_given += 1
        self.num_seqs += len(group.waiting)
        self._num_slots = 0 if is_last else self._num_slots - group.num_slots(len(group.waiting))
        self.num_free -= num_lacking(first, self._max_tokens)
        self.num_tokens -= first.num_tokens


def _best(rooms: abc.Sequence[_Room], group: SequenceGroup) -> _Room | None:
    """By what the prefix cache has of the prompt, then by free blocks, then by load. A hit does not count where a
    quarter of the slots more are taken than elsewhere: the others will have the prefix too once they compute it."""
    if len(rooms) < 2:
        return rooms[0] if rooms else None
    most = min(room.num_seqs for room in rooms) + rooms[0].scheduler.running_set.max_num_seqs // 4

    def rank(room: _Room) -> tuple[int, int, int]:
        num_hits = _num_hits(room.scheduler, group) if room.num_seqs <= most else 0
        return num_hits, room.num_free, -room.num_seqs

    return max(rooms, key=rank)


def _num_hits(scheduler: Scheduler, group: SequenceGroup) -> int:
    """Blocks of the prompt that the shard has; all of it, if it is computing the next."""
    first = group.waiting[0]
    hit = scheduler.prefix_cache.find(first, group.waiting[1:])
    return -(-first.num_tokens // scheduler.pool.block_size) if hit is None else hit.num_blocks
