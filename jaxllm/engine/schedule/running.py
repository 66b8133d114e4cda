"""The sequences on the device: their slots, and the blocks that they hold."""

from collections import Counter
from collections.abc import Iterable, Iterator

from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.decode_batch import DecodeBatch
from jaxllm.engine.schedule.prefix_cache import PrefixCache
from jaxllm.engine.schedule.sequence import Sequence, Status


class RunningSet:
    """The sequences that have one of `max_num_seqs` slots, in the order in which they are served."""

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache, max_num_seqs: int):
        self.pool, self.prefix_cache, self.max_num_seqs = pool, prefix_cache, max_num_seqs
        self.reset()

    def reset(self) -> None:
        """Removes all sequences, and drops the prefix cache."""
        self.pool.reset()
        self.prefix_cache.reset()
        self.batch = DecodeBatch(self.pool.block_size)
        self.individuals: dict[Sequence, None] = {}  # the others, as an ordered set; each step looks at them one by one
        self.free_slots = list(range(self.max_num_seqs))
        self.awaits_host = False  # whether a host-dependent sequence was in flight when the plan was begun
        self.num_full = self.num_beams = self.num_retrying = 0  # need the full sampler; beams; had a failure

    def __len__(self) -> int:
        return len(self.batch) + len(self.individuals)

    def __iter__(self) -> Iterator[Sequence]:
        """Over all, as they are now: any of them may leave meanwhile."""
        return iter(self.batch.sequences + list(self.individuals))

    def add(self, sequence: Sequence, status: Status) -> None:
        """Gives the sequence a slot; it has its blocks already."""
        sequence.slot, sequence.status = self.free_slots.pop(), status
        self.individuals[sequence] = None
        self.num_full += sequence.needs_full_sampler
        self.num_beams += sequence.is_beam
        self.num_retrying += sequence.num_failures > 0

    def remove(self, sequence: Sequence) -> None:
        """Takes back its slot and blocks, and ends its epoch."""
        if sequence.batch is not None:
            self.leave_batch(sequence)
        del self.individuals[sequence]
        self.num_full -= sequence.needs_full_sampler
        self.num_beams -= sequence.is_beam
        self.num_retrying -= sequence.num_failures > 0
        self.prefix_cache.end(sequence)
        sequence.table.release()
        self.free_slots.append(sequence.slot)
        sequence.leave_device()

    def look_for_host_dependent(self) -> None:
        """Host-dependent sequences sample in the same steps, however they came: none while one is in flight. Those of
        one step after the other would stay in two phases for ever, each with half of the rows."""
        self.awaits_host = any(sequence.host_dependent and sequence.num_in_flight for sequence in self.individuals)

    def enter_batch(self, sequences: Iterable[Sequence]) -> None:
        """Lets those of the sequences, which decode, that are steady do so in the batch from now on."""
        for sequence in sequences:
            if sequence.is_steady:
                del self.individuals[sequence]
                self.batch.add(sequence)

    def leave_batch(self, sequence: Sequence) -> None:
        """Plans the sequence by itself from the next step on."""
        self.batch.remove(sequence)
        self.individuals[sequence] = None

    def move_to_end(self, sequences: Iterable[Sequence]) -> None:
        """These are served after the others from now on."""
        for sequence in sequences:
            del self.individuals[sequence]
            self.individuals[sequence] = None

    def has_room(self, num_blocks: int) -> bool:
        """Whether an admission may take so many blocks: it leaves some for running sequences to grow, or would be
        preempted at once."""
        reserve = len(self) + 1 if len(self) else 0
        return num_blocks + min(reserve, self.pool.num_blocks // 8) <= self.pool.num_free

    @property
    def num_wasted_slots(self) -> int:
        """Tokens' places in held blocks that hold no token yet. O(running)."""
        num_wasted, shared_tails = 0, {}
        for sequence in self:
            table = sequence.table
            num_empty = table.capacity - sequence.num_computed
            if table.shares_tail:  # with others that have filled it as far
                shared_tails[table.ids[-1]] = num_empty
            else:
                num_wasted += num_empty
        return num_wasted + sum(shared_tails.values())

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. O(blocks + running)."""
        self.pool.check()
        held: Counter[int] = Counter()
        for sequence in self:
            assert sequence.status in (Status.RUNNING, Status.HELD, Status.DRAINING)
            assert 0 <= sequence.num_in_flight <= 2
            assert sequence.num_computed <= sequence.num_tokens + sequence.num_in_flight
            assert sequence.num_computed <= sequence.table.capacity
            sequence.table.check()
            held.update(sequence.table.ids)
        assert self.pool.refs == [held[block] for block in range(self.pool.num_blocks)]
        slots = [sequence.slot for sequence in self] + self.free_slots
        assert sorted(slots) == list(range(self.max_num_seqs))
        self.prefix_cache.check(list(self))
        self.batch.check()
        assert all(sequence.batch is None for sequence in self.individuals)
        self._check_wasted_slots()
        assert self.num_full == sum(r.needs_full_sampler for r in self)
        assert self.num_beams == sum(r.is_beam for r in self)
        assert self.num_retrying == sum(r.num_failures > 0 for r in self) <= 1
        self._check_writes()

    def _check_wasted_slots(self) -> None:
        size, filled = self.pool.block_size, {}
        for sequence in self:
            for i, block in enumerate(sequence.table.ids):
                filled[block] = max(filled.get(block, 0), min(size, sequence.num_computed - i * size))
        assert self.num_wasted_slots == sum(size - max(0, tokens) for tokens in filled.values())

    def _check_writes(self) -> None:
        """A block that is written next has one holder, or holders marked `shares_tail`."""
        for sequence in self:
            index = sequence.num_computed // self.pool.block_size
            if sequence.status is Status.RUNNING and index < len(sequence.table):
                assert self.pool.refs[sequence.table.ids[index]] == 1 or sequence.table.shares_tail
