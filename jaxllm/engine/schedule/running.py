"""The sequences on the device: their slots, and the blocks that they and their waiting siblings hold."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.block_table import BlockTable, Hit
from jaxllm.engine.schedule.decode_batch import DecodeBatch
from jaxllm.engine.schedule.prefix_cache import PrefixCache
from jaxllm.engine.schedule.retries import Retries
from jaxllm.engine.schedule.sequence import Sequence, Status
from jaxllm.engine.schedule.sequence_group import SequenceGroup

_LATE_BLOCKS = 8  # that a sequence fills before the prefix cache has them, while nobody sees its tokens


class Stem(NamedTuple):
    """What waiting siblings begin with: the blocks of some tokens that one of them has computed."""

    table: BlockTable
    num_tokens: int  # from which they go on
    num_computed: int  # tokens that the blocks hold
    num_cached: int  # prompt tokens that the prefix cache had of it

    def full_blocks(self) -> Hit:
        """What one that goes on shares for good."""
        num_full = self.num_tokens // self.table.pool.block_size
        return Hit(num_full, [each.ids[: max(0, num_full - each.start)] for each in self.table.groups])


class RunningSet:
    """The sequences that have one of `max_num_seqs` slots, in the order in which they are served."""

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache, max_num_seqs: int):
        self.pool, self.prefix_cache, self.max_num_seqs = pool, prefix_cache, max_num_seqs
        self.retries = Retries()
        self.reset()

    def reset(self) -> None:
        """Removes all sequences, and drops the prefix cache. Failures are remembered."""
        self.pool.reset()
        self.prefix_cache.reset()
        self.batch = DecodeBatch(self.max_num_seqs)
        self.stems: dict[SequenceGroup, Stem] = {}  # of groups that wait; they hold blocks, but no slots
        self.individuals: dict[Sequence, None] = {}  # the others, as an ordered set; each step looks at them one by one
        self.free_slots = list(range(self.max_num_seqs))
        self.guests: list[Sequence] = []  # in slots too: of prompts that other shards have, and this one helps with
        self.awaits_host = False  # host-dependent sequences do not sample in this plan, as one is in flight
        self.num_full = self.num_altered = 0  # need the full sampler; of those, whose logits are altered
        self.num_chosen = 0  # whose groups choose their tokens

    def __len__(self) -> int:
        return len(self.batch) + len(self.individuals)

    def __iter__(self) -> Iterator[Sequence]:
        """Over all, as they are now: any of them may leave meanwhile."""
        return iter(self.batch.sequences + list(self.individuals))

    def count_growing(self, num_prefills: int) -> int:
        """Those beside so many prompts that are being computed which take blocks before that is done: held ones wait
        for a prompt themselves. O(individuals)."""
        return len(self) - num_prefills - sum(each.status is Status.HELD for each in self.individuals)

    def add(self, sequence: Sequence, status: Status) -> None:
        """Gives the sequence a slot; it has its blocks already."""
        sequence.slot, sequence.status = self.free_slots.pop(), status
        self.individuals[sequence] = None
        self._count(sequence, 1)

    def receive(self, guest: Sequence) -> None:
        """Gives a guest a slot; it is planned by who has sent it."""
        guest.slot, guest.status = self.free_slots.pop(), Status.RUNNING
        self.guests.append(guest)

    def dismiss(self, guest: Sequence) -> None:
        """Takes back its slot; its blocks stay in the prefix cache."""
        self.guests.remove(guest)
        guest.table.release()
        self.free_slots.append(guest.slot)

    def remove(self, sequence: Sequence) -> None:
        """Takes back its slot and blocks, and ends its epoch."""
        if sequence.batch is not None:
            self.leave_batch(sequence)
        del self.individuals[sequence]
        self._count(sequence, -1)
        self.prefix_cache.end(sequence)
        sequence.table.release()
        self.free_slots.append(sequence.slot)
        sequence.leave_device()

    def _count(self, sequence: Sequence, by: int) -> None:
        self.num_full += by * sequence.traits.needs_full_sampler
        self.num_altered += by * sequence.traits.alters_logits
        self.num_chosen += by * sequence.group.chooses_tokens

    def release_behind(self, sequence: Sequence) -> None:
        """Gives up the blocks that neither the sequence's next token reads nor siblings that wait to go on from it,
        which others may still hit."""
        if not self._may_offer_later(sequence):
            self._offer(sequence)
        if not self.pool.has_windows:
            return
        next_read = sequence.num_computed
        if sequence.fork_len:
            next_read = min(next_read, sequence.fork_len - 1)
        if sequence.propose is not None:  # drafts in flight may be taken back, to the last token that is known
            next_read = min(next_read, sequence.num_tokens - 1)
        sequence.table.release_behind(next_read)

    def _may_offer_later(self, sequence: Sequence) -> bool:
        """Whether the prefix cache can wait for the sequence's last blocks, as nobody has seen what is in them: several
        take less time at once. They come when it leaves the batch, if not before."""
        if sequence.batch is None or sequence.reports_tokens or self.pool.has_windows:
            return False
        table = sequence.table
        is_awaited = len(table.keys) > table.num_keyed  # perhaps: the end of its prompt, which others wait for
        return not is_awaited and table.num_blocks - table.num_keyed < _LATE_BLOCKS

    def _offer(self, sequence: Sequence) -> None:
        self.prefix_cache.offer(sequence, min(sequence.num_computed, sequence.num_tokens))

    def drop_stem(self, group: SequenceGroup) -> None:
        """Those of the group that wait for a slot hold no blocks any more."""
        stem = self.stems.pop(group, None)
        if stem is not None:
            stem.table.release()

    def drop_stems(self) -> None:
        for group in list(self.stems):
            self.drop_stem(group)

    @property
    def has_host_dependent(self) -> bool:
        """Whether one is in flight. O(individuals)."""
        return any(sequence.host_dependent and sequence.num_in_flight for sequence in self.individuals)

    def enter_batch(self, sequences: Iterable[Sequence]) -> None:
        """Lets those of the sequences, which decode, that are steady do so in the batch from now on."""
        for sequence in sequences:
            if sequence.is_steady and sequence not in self.retries:
                del self.individuals[sequence]
                self.batch.add(sequence)

    def leave_batch(self, sequence: Sequence) -> None:
        """Plans the sequence by itself from the next step on."""
        self.batch.remove(sequence)
        self.individuals[sequence] = None
        self._offer(sequence)

    def move_to_end(self, sequences: Iterable[Sequence]) -> None:
        """These are served after the others from now on."""
        for sequence in sequences:
            del self.individuals[sequence]
            self.individuals[sequence] = None

    @property
    def num_wasted_slots(self) -> int:
        """Tokens' places in the first group's held blocks that hold no token yet. O(running)."""
        num_wasted, tails = 0, defaultdict(list)
        for sequence in self:
            num_empty = sequence.table.capacity - sequence.num_computed
            if sequence.table.shares_tail:
                tails[sequence.table.ids[-1]].append(num_empty)
            else:
                num_wasted += num_empty
        for stem in self.stems.values():
            if stem.table.shares_tail:
                tails[stem.table.ids[-1]].append(stem.table.capacity - stem.num_tokens)
        # One of a shared block's holders has filled it furthest: all of it, if it is not that one's tail.
        return num_wasted + sum(min(of) for block, of in tails.items() if len(of) == self.pool.refs[block])

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. O(blocks + running)."""
        self.pool.check()
        held: Counter[int] = Counter()
        for sequence in self:
            assert sequence.status in (Status.RUNNING, Status.HELD, Status.DRAINING)
            assert 0 <= sequence.num_in_flight and (sequence.num_in_flight <= 2 or sequence.propose is not None)
            assert sequence.num_computed <= sequence.num_tokens + sequence.num_in_flight
            num_empty = sequence.table.capacity - sequence.num_computed
            assert 0 <= num_empty <= self.pool.block_size, "blocks are allocated as tokens are computed"
            assert num_empty or not sequence.table.shares_tail
            sequence.table.check()
            for each in sequence.table.groups:
                held.update(each.ids)
        for guest in self.guests:
            guest.table.check()
            held.update(guest.table.ids)
        for group, stem in self.stems.items():
            assert group.waiting, "nobody goes on from it"
            assert 0 <= stem.table.capacity - stem.num_tokens < self.pool.block_size
            stem.table.check()
            for each in stem.table.groups:
                held.update(each.ids)
        assert self.pool.refs == [held[block] for block in range(self.pool.num_pages)]
        slots = [sequence.slot for sequence in (*self, *self.guests)] + self.free_slots
        assert sorted(slots) == list(range(self.max_num_seqs))
        self.prefix_cache.check(list(self))
        self.batch.check()
        assert all(sequence.batch is None for sequence in self.individuals)
        self._check_wasted_slots()
        assert self.num_full == sum(r.params.needs_full_sampler for r in self)
        assert self.num_altered == sum(r.params.alters_logits for r in self)
        assert self.num_chosen == sum(r.group.chooses_tokens for r in self)
        assert sum(r in self.retries for r in self) <= 1
        self._check_writes()

    def _check_wasted_slots(self) -> None:
        size, filled = self.pool.block_size, {}
        holders = [(sequence.table, sequence.num_computed) for sequence in self]
        for table, num_tokens in holders + [(stem.table, stem.num_tokens) for stem in self.stems.values()]:
            for i, block in enumerate(table.ids, start=table.groups[0].start):
                filled[block] = max(filled.get(block, 0), min(size, num_tokens - i * size))
        assert self.num_wasted_slots == sum(size - max(0, tokens) for tokens in filled.values())

    def _check_writes(self) -> None:
        """A block that is written next has one holder, or holders marked `shares_tail`."""
        for sequence in self:
            table, index = sequence.table, sequence.num_computed // self.pool.block_size
            if sequence.status is Status.RUNNING and index < len(table):
                is_own = all(self.pool.refs[each.ids[index - each.start]] == 1 for each in table.groups)
                assert is_own or table.shares_tail
