"""Who is on the device: slots, and the blocks that their sequences hold."""

from collections import Counter

from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.prefix_cache import PrefixCache
from jaxllm.engine.schedule.sequence import Request, Status


class Residents:
    """The sequences that have one of `max_num_seqs` slots, in the order in which they are served."""

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache, max_num_seqs: int):
        self.pool, self.prefix_cache, self.max_num_seqs = pool, prefix_cache, max_num_seqs
        self.reset()

    def reset(self) -> None:
        """Nobody is on the device any more, and nothing is cached."""
        self.pool.reset()
        self.prefix_cache.reset()
        self.running: list[Request] = []
        self.free_slots = list(range(self.max_num_seqs))
        self.num_full = self.num_beams = self.num_suspects = 0  # for the full sampler, of searches, under suspicion

    def enter(self, request: Request, status: Status) -> None:
        """Gives the request a slot; it has its blocks already."""
        request.slot, request.status = self.free_slots.pop(), status
        self.running.append(request)
        self.num_full += request.needs_full_sampler
        self.num_beams += request.group.is_search
        self.num_suspects += request.strikes > 0

    def leave(self, request: Request) -> None:
        """Takes its slot and blocks away, and ends its epoch."""
        self.running.remove(request)
        self.num_full -= request.needs_full_sampler
        self.num_beams -= request.group.is_search
        self.num_suspects -= request.strikes > 0
        self.prefix_cache.end(request)
        self.pool.release(request.block_ids)
        self.free_slots.append(request.slot)
        request.leave_device()

    def has_room(self, num_blocks: int) -> bool:
        """Whether a newcomer may take so many blocks: room is left for those who run to grow, without which it would
        be evicted again at once."""
        reserve = len(self.running) + 1 if self.running else 0
        return num_blocks + min(reserve, self.pool.num_blocks // 8) <= self.pool.num_free

    @property
    def num_wasted_slots(self) -> int:
        """Tokens' places in held blocks that hold no token yet. O(blocks + running)."""
        size, filled = self.pool.block_size, {}
        for request in self.running:
            for i, block in enumerate(request.block_ids):
                filled[block] = max(filled.get(block, 0), min(size, request.num_computed - i * size))
        return sum(size - max(0, tokens) for tokens in filled.values())

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. O(blocks + running)."""
        self.pool.check()
        held: Counter[int] = Counter()
        for request in self.running:
            assert request.status in (Status.RUNNING, Status.HELD, Status.DRAINING)
            assert 0 <= request.num_in_flight <= 2
            assert request.num_computed <= request.num_tokens + request.num_in_flight
            assert request.num_computed <= len(request.block_ids) * self.pool.block_size
            assert len(set(request.block_ids)) == len(request.block_ids)
            held.update(request.block_ids)
        assert self.pool.refs == [held[block] for block in range(self.pool.num_blocks)]
        slots = [request.slot for request in self.running] + self.free_slots
        assert sorted(slots) == list(range(self.max_num_seqs))
        self.prefix_cache.check(self.running)
        assert self.num_full == sum(r.needs_full_sampler for r in self.running)
        assert self.num_beams == sum(r.group.is_search for r in self.running)
        assert self.num_suspects == sum(r.strikes > 0 for r in self.running) <= 1
        self._check_writes()

    def _check_writes(self) -> None:
        """No block that is written next belongs to two, unless both know."""
        for request in self.running:
            index = request.num_computed // self.pool.block_size
            if request.status is Status.RUNNING and index < len(request.block_ids):
                assert self.pool.refs[request.block_ids[index]] == 1 or request.shares_tail
