"""KV memory as engines without paging reserve it: one contiguous chunk a sequence, for as long as it runs.

The chunk's size is decided when the sequence starts, in one of the three ways that PagedAttention (arXiv 2309.06180,
section 6.1) compares with, and comes from a buddy allocator, as there.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.paper.trace import TraceRequest

RESERVED: dict[str, Callable[[TraceRequest, int], int]] = {  # tokens, of a sequence of at most so many
    "max": lambda item, max_len: max_len,  # all that it could ever need
    "pow2": lambda item, max_len: min(max_len, item.prompt_len + power_of_two(item.output_len)),
    "oracle": lambda item, max_len: item.prompt_len + item.output_len,  # what it will need, if that were known
}


def power_of_two(n: int) -> int:
    """The least one that is not below `n`."""
    return 1 << (n - 1).bit_length()


class BuddyChunk(NamedTuple):
    start: int
    size: int


class BuddyAllocator:
    """Chunks of `num_slots` slots, each a power of two long and aligned to its size. Free halves of one chunk grow
    together again (Knuth, The Art of Computer Programming, section 2.5)."""

    def __init__(self, num_slots: int):
        self._free: dict[int, set[int]] = {1 << i: set() for i in range(num_slots.bit_length())}  # starts by size
        start = 0
        for size in sorted(self._free, reverse=True):
            if num_slots & size:
                self._free[size].add(start)
                start += size

    def allocate(self, n: int) -> BuddyChunk | None:
        """The smallest chunk of at least `n` slots, the first of its size; None if none is free."""
        size = power_of_two(n)
        fitting = [free for free, starts in self._free.items() if free >= size and starts]
        if not fitting:
            return None
        found = min(fitting)
        start = min(self._free[found])
        self._free[found].remove(start)
        while found > size:  # the upper half stays free
            found //= 2
            self._free[found].add(start + found)
        return BuddyChunk(start, size)

    def release(self, chunk: BuddyChunk) -> None:
        start, size = chunk
        while start ^ size in self._free.get(size, ()):
            self._free[size].remove(start ^ size)
            start, size = min(start, start ^ size), 2 * size
        self._free[size].add(start)

    @property
    def free_chunks(self) -> list[BuddyChunk]:
        return sorted(BuddyChunk(start, size) for size, starts in self._free.items() for start in starts)


@dataclass(slots=True)
class _Sequence:
    item: TraceRequest
    chunk: BuddyChunk
    num_computed: int = 0

    @property
    def num_left(self) -> int:
        """Tokens to compute; the last one of the output never is."""
        return self.item.prompt_len + self.item.output_len - 1 - self.num_computed

    def advance(self, max_tokens: int) -> int:
        """Takes part in a step, with the rest of its prompt or one token. Returns the number of tokens."""
        count = min(max(1, self.item.prompt_len - self.num_computed), self.num_left, max_tokens)
        self.num_computed += count
        return count


class ReservedUsage(NamedTuple):
    """Sums over all steps, each looked at as `memory.Usage` does."""

    filled_slots: int  # that hold a token
    held_slots: int  # of sequences' chunks
    steps: int

    @property
    def wasted(self) -> float:
        return 1 - self.filled_slots / self.held_slots


def simulate(
    items: Sequence[TraceRequest],
    arrivals: Sequence[float],
    reserve: Callable[[TraceRequest], int],
    *,
    num_slots: int,
    max_num_seqs: int,
    max_tokens: int,
) -> ReservedUsage:
    """Runs a trace with continuous batching, first come first served: at most `max_num_seqs` sequences and
    `max_tokens` tokens a step. `reserve` says how many slots a sequence is given; some chunk must be as large."""
    memory, waiting = BuddyAllocator(num_slots), deque(zip(arrivals, items, strict=True))
    running: list[_Sequence] = []
    over: list[_Sequence] = []
    filled = held = step = 0
    while waiting or running:
        left = max_tokens
        for sequence in running:
            left -= sequence.advance(left)  # of those that are over, nothing
        while left and len(running) < max_num_seqs and waiting and waiting[0][0] <= step:
            chunk = memory.allocate(reserve(waiting[0][1]))
            if chunk is None:
                break
            running.append(_Sequence(waiting.popleft()[1], chunk))
            left -= running[-1].advance(left)
        filled += sum(sequence.num_computed for sequence in running)
        held += sum(sequence.chunk.size for sequence in running)
        for sequence in over:  # a step late, when its last token has been read
            memory.release(sequence.chunk)
            running.remove(sequence)
        over = [sequence for sequence in running if not sequence.num_left]
        step += 1
    return ReservedUsage(filled, held, step)
