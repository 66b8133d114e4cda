"""Which free blocks the prompts of a step may take. Theirs are allocated as their chunks are planned, not at once."""

from collections import abc
from collections.abc import Collection

from jaxllm.engine.schedule.block_table import Hit
from jaxllm.engine.schedule.plan import Plan
from jaxllm.engine.schedule.running import RunningSet
from jaxllm.engine.schedule.sequence import Sequence


class PromptRoom:
    """Prompts are finished in the order in which they began: each leaves those before it the blocks that they lack.

    One may enter if there is room for all of it beside what the others lack, and for the running sequences to grow.
    While no other prompt is being computed, so that a step has tokens to spare, room for its first chunk is enough,
    beside an eighth of the pool: it goes on as blocks become free. So no two long prompts wait for each other.

    Decodes take blocks before prompts do. The first prompt that they leave none takes those of the last one
    (`Preemption.make_room`), or waits until a decode ends. As the first sequence of all is never preempted for others,
    it comes to its end, and nothing livelocks.
    """

    def __init__(self, running_set: RunningSet):
        self.running_set, self.pool = running_set, running_set.pool
        self.begin([], 1)

    def begin(self, prefills: Collection[Sequence], max_tokens: int) -> None:
        """A plan of at most `max_tokens` tokens is begun, and these have more than one to compute."""
        self._max_tokens = max_tokens
        self._num_lacking = sum(map(self._count_lacking, prefills))
        self._num_promised = 0  # of these, to those that have had their turn
        self._num_growing = self.running_set.count_growing(len(prefills))

    def _count_lacking(self, sequence: Sequence) -> int:
        return num_lacking(sequence, self._max_tokens)

    def has(self, num_pages: int) -> bool:
        """Whether an admission may take so many pages at once."""
        num_running = len(self.running_set)
        reserve = (num_running + 1) * self.pool.pages_per_block if num_running else 0
        return num_pages + min(reserve, self.pool.num_pages // 8) <= self.pool.num_free - self._num_lacking

    def has_for_prompt(self, sequence: Sequence, hit: Hit, num_tokens: int) -> bool:
        """Whether a prompt may enter that begins with `hit`, and may have `num_tokens` more in this plan."""
        num_free_hits = self.pool.count_free(hit.all_blocks())
        held = [len(blocks) for blocks in hit.blocks]
        num_pages = num_wanted(sequence, hit.num_blocks, held, sequence.num_tokens, self._max_tokens)
        if self.has(num_pages + num_free_hits):
            return True
        if not len(self.running_set) and not self.running_set.stems:
            num_tokens = 1  # however little there is, nobody will give more
        stop = min(hit.num_blocks * self.pool.block_size + num_tokens, sequence.num_tokens)
        num_first = num_wanted(sequence, hit.num_blocks, held, stop, self._max_tokens)
        reserve = self.pool.num_pages // 8 if len(self.running_set) else 0
        return not self._num_lacking and num_first + num_free_hits + reserve <= self.pool.num_free

    def has_all(self, sequence: Sequence) -> bool:
        """Whether a prompt may enter that is computed at once. Those that run so need no more than they have."""
        return self._count_lacking(sequence) <= self.pool.num_free

    def enter(self, sequence: Sequence) -> None:
        """The sequence was admitted, and has its hits."""
        self._num_lacking += self._count_lacking(sequence)

    def num_tokens(self, sequence: Sequence, *, had_turn: bool = False) -> int:
        """For how many of its next tokens a prompt may have blocks now."""
        num_promised = self._num_promised - (self._count_lacking(sequence) if had_turn else 0)
        num_promised = max(0, num_promised)  # a window's blocks are lacking again once its chunk is planned
        return num_affordable(sequence, self.pool.num_free - num_promised, self._num_growing, self._max_tokens)

    def allocate(self, plan: Plan, sequence: Sequence, num_tokens: int, *, is_new: bool, had_turn: bool) -> None:
        """Gives a prompt the blocks of its next tokens, as many as `num_tokens` says. One that is new in this plan has
        them in its slot's row, which is installed before the step."""
        table, lacking = sequence.table, self._count_lacking(sequence)
        num_before = len(table)
        if num_tokens and table.shares_tail:
            plan.copies += table.own_tail()
            num_before -= 1
        table.allocate(max(0, -(-(sequence.num_computed + num_tokens) // self.pool.block_size) - len(table)))
        if not is_new:
            for index in range(num_before, len(table)):
                plan.add_block(sequence, index)
        still_lacking = self._count_lacking(sequence)
        self._num_lacking += still_lacking - lacking
        self._num_promised += still_lacking - (lacking if had_turn else 0)


def num_lacking(sequence: Sequence, max_tokens: int) -> int:
    """Pages that the sequence needs for its known tokens, in steps of at most `max_tokens`, and does not have."""
    table = sequence.table
    block_size, done = table.pool.block_size, sequence.num_computed
    held = [len(table) - max(each.start, each.group.first_block(done, block_size)) for each in table.groups]
    return num_wanted(sequence, len(table), held, sequence.num_tokens, max_tokens) + table.num_copied


def num_wanted(sequence: Sequence, num_blocks: int, held: abc.Sequence[int], num_tokens: int, max_tokens: int) -> int:
    """Pages that a sequence with `num_blocks` blocks, of which it has `held` in each group, needs for its first
    `num_tokens` tokens at once. Of a window, no more than a step reads."""
    block_size = sequence.table.pool.block_size
    num_more = max(0, -(-num_tokens // block_size) - num_blocks)
    num_pages = 0
    for each, num_held in zip(sequence.table.groups, held, strict=True):
        most = each.group.most_blocks(max_tokens, block_size)
        num_pages += each.group.num_pages * (num_more if most is None else max(0, min(num_more, most - num_held)))
    return num_pages


def num_affordable(sequence: Sequence, num_free: int, num_growing: int, max_tokens: int) -> int:
    """For how many of a prompt's next tokens `num_free` pages are enough. If they don't complete it, some are left for
    `num_growing` sequences to grow into: an eighth of the pool at most."""
    table, pool = sequence.table, sequence.table.pool
    if num_lacking(sequence, max_tokens) > num_free:
        num_free -= min(num_growing * pool.pages_per_block, pool.num_pages // 8)
    num_in_tail = table.capacity - sequence.num_computed
    if table.num_copied:  # a plan has room for one block of each row beside those of its tokens
        return num_in_tail if num_free >= table.num_copied else 0
    return num_in_tail + max(0, num_free // pool.pages_per_block) * pool.block_size
