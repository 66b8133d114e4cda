"""A long prompt that all shards of data compute together: each a part of every step's tokens, and each keeps all of it.

The shard that has the sequence is its home. In the others it is a guest, with a slot and blocks, until what is left is
one step of the home's own: that one samples, as ever. Then guests leave what they have in the prefix caches.
"""

from collections import abc

from jaxllm.engine.schedule.block_table import BlockTable, Hit
from jaxllm.engine.schedule.plan import Plan
from jaxllm.engine.schedule.scheduler import Scheduler
from jaxllm.engine.schedule.sequence import Sequence, Status
from jaxllm.engine.schedule.sequence_group import Samples, SequenceGroup
from jaxllm.sampling_params import SamplingParams


class SharedPrompt:
    """That of the first waiting sequence of `group`, which its `home` is about to admit."""

    def __init__(self, group: SequenceGroup, home: Scheduler, others: abc.Sequence[Scheduler]):
        self.sequence, self.home = group.waiting[0], home
        self._others, self._guests = tuple(others), dict[Scheduler, Sequence]()
        self._epoch, self._is_stuck = self.sequence.epoch, False
        home.admission.lent = group

    def is_over(self, max_tokens: int) -> bool:
        """Whether the home had better go on alone, in steps of `max_tokens`: the rest is one step, or someone is short
        of blocks."""
        first = self.sequence
        is_short = any(each.pool.num_free < _num_growing(each) for each in (self.home, *self._others))
        is_running = first.status is Status.RUNNING and first.epoch == self._epoch
        return self._is_stuck or is_short or not is_running or first.num_tokens - first.num_computed <= max_tokens

    def end(self) -> None:
        """The home goes on alone."""
        self.home.admission.lent = None
        for scheduler, guest in self._guests.items():
            scheduler.running_set.dismiss(guest)
        self._guests.clear()

    def add_parts(self, plans: abc.Mapping[Scheduler, Plan], max_tokens: int) -> None:
        """Gives the prompt what each shard's plan has left of its `max_tokens`: the last part to its home."""
        first = self.sequence
        if first.slot < 0 or not self._guests and not self._enter(plans):
            self._is_stuck = True
            return
        block_size = self.home.pool.block_size
        own = {scheduler: self._guests.get(scheduler, first) for scheduler in (*self._others, self.home)}
        at, parts = first.num_computed, []
        for scheduler in own:
            left = max_tokens - max(plans[scheduler].num_tokens, plans[scheduler].num_samples)
            stop = min(at + max(0, left), first.num_tokens - 1)
            parts.append((at, stop))
            at = stop
        at -= at % block_size  # blocks are written as a whole
        parts = [(min(start, at), min(stop, at)) for start, stop in parts]
        wanted = {scheduler: _num_blocks(sequence.table, at) for scheduler, sequence in own.items()}
        self._is_stuck = at <= first.num_computed or any(
            n * each.pool.pages_per_block + _num_growing(each) > each.pool.num_free for each, n in wanted.items()
        )
        if self._is_stuck:
            return
        for (scheduler, sequence), part in zip(own.items(), parts, strict=True):
            plan, table = plans[scheduler], sequence.table
            num_before = len(table)
            table.allocate(wanted[scheduler])
            if not any(sequence is admitted for admitted, _ in plan.admitted):  # else its slot's row has them
                for index in range(num_before, len(table)):
                    plan.add_block(sequence, index)
            plan.add_part(sequence, *part, at)

    def offer(self) -> None:
        """What the plans compute may be hit by later ones."""
        for scheduler, sequence in ((self.home, self.sequence), *self._guests.items()):
            if sequence.slot >= 0:
                scheduler.prefix_cache.offer(sequence, sequence.num_computed)

    def _enter(self, plans: abc.Mapping[Scheduler, Plan]) -> bool:
        """Installs a guest in each of the other shards; False if one has no room, or less of the prompt than the home
        has found."""
        num_cached = self.sequence.num_computed // self.home.pool.block_size
        hits: dict[Scheduler, Hit] = {}
        for scheduler in self._others:
            guest = self._guest(scheduler)
            hit = scheduler.prefix_cache.find(guest)
            if not scheduler.running_set.free_slots or hit is None or hit.num_blocks < num_cached:
                return False
            hits[scheduler] = Hit(num_cached, [blocks[:num_cached] for blocks in hit.blocks])
            self._guests[scheduler] = guest
        for scheduler, guest in self._guests.items():
            guest.table.share(hits[scheduler])
            guest.num_computed = self.sequence.num_computed
            scheduler.running_set.receive(guest)
            plans[scheduler].install(guest)
        return True

    def _guest(self, scheduler: Scheduler) -> Sequence:
        first = self.sequence
        guest = Sequence(
            prompt_token_ids=first.token_ids(0, first.num_tokens),
            params=SamplingParams(cache_salt=first.params.cache_salt),
            arrival=first.arrival,
            seed=0,
            max_total_len=first.max_total_len,
        )
        guest.request, guest.table = first.request, BlockTable(scheduler.pool)
        guest.table.keys = list(first.table.keys)
        _Guests([guest], first)
        return guest


class _Guests(Samples):
    """Who stands for a sequence of another group."""

    def __init__(self, sequences: list[Sequence], first: Sequence):
        super().__init__(sequences)
        self._first = first

    def head(self, sequence: Sequence) -> Sequence:
        return self._first.group.head(self._first)


def _num_growing(scheduler: Scheduler) -> int:
    """Pages that the next decodes may need."""
    return len(scheduler.running_set) * scheduler.pool.pages_per_block


def _num_blocks(table: BlockTable, num_tokens: int) -> int:
    """That the table lacks for its first tokens."""
    return max(0, -(-num_tokens // table.pool.block_size) - len(table))
