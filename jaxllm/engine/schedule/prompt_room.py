"""Which free blocks the prompts of a step may take. Theirs are allocated as their chunks are planned, not at once."""

from collections.abc import Collection

from jaxllm.engine.schedule.plan import NewBlock, Plan
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
        self.begin([])

    def begin(self, prefills: Collection[Sequence]) -> None:
        """A plan is begun, and these have more than one token to compute."""
        self._num_lacking = sum(map(num_lacking, prefills))
        self._num_promised = 0  # of these, to those that have had their turn
        self._num_growing = len(self.running_set) - len(prefills)

    def has(self, num_blocks: int) -> bool:
        """Whether an admission may take so many blocks at once."""
        num_running = len(self.running_set)
        reserve = num_running + 1 if num_running else 0
        return num_blocks + min(reserve, self.pool.num_blocks // 8) <= self.pool.num_free - self._num_lacking

    def has_for_prompt(self, num_blocks: int, num_first: int) -> bool:
        """Whether a prompt may enter that needs so many blocks in all, and `num_first` for its first chunk."""
        if self.has(num_blocks):
            return True
        reserve = self.pool.num_blocks // 8 if len(self.running_set) else 0
        return not self._num_lacking and num_first + reserve <= self.pool.num_free

    def enter(self, sequence: Sequence) -> None:
        """The sequence was admitted, and has its hits."""
        self._num_lacking += num_lacking(sequence)

    def num_tokens(self, sequence: Sequence, *, had_turn: bool = False) -> int:
        """For how many of its next tokens a prompt may have blocks now."""
        num_promised = self._num_promised - (num_lacking(sequence) if had_turn else 0)
        return num_affordable(sequence, self.pool.num_free - num_promised, self._num_growing)

    def allocate(self, plan: Plan, sequence: Sequence, num_tokens: int, *, is_new: bool, had_turn: bool) -> None:
        """Gives a prompt the blocks of its next tokens, as many as `num_tokens` says. One that is new in this plan has
        them in its slot's row, which is installed before the step."""
        table, lacking = sequence.table, num_lacking(sequence)
        num_before = len(table)
        if num_tokens and (copy := table.own_tail()) is not None:
            plan.copies.append(copy)
            num_before -= 1
        stop = sequence.num_computed + num_tokens
        table.allocate(max(0, -(-stop // self.pool.block_size) - len(table)))
        if not is_new:
            blocks = enumerate(table.ids[num_before:], start=num_before)
            plan.new_blocks += [NewBlock(sequence.slot, index, block) for index, block in blocks]
        still_lacking = num_lacking(sequence)
        self._num_lacking += still_lacking - lacking
        self._num_promised += still_lacking - (lacking if had_turn else 0)


def num_lacking(sequence: Sequence) -> int:
    """Blocks that the sequence needs for its known tokens, and does not have."""
    table = sequence.table
    return -(-sequence.num_tokens // table.pool.block_size) - len(table) + table.must_copy


def num_affordable(sequence: Sequence, num_free: int, num_growing: int) -> int:
    """For how many of a prompt's next tokens `num_free` blocks are enough. If they don't complete it, some are left for
    `num_growing` sequences to grow into: an eighth of the pool at most."""
    table, pool = sequence.table, sequence.table.pool
    if num_lacking(sequence) > num_free:
        num_free -= min(num_growing, pool.num_blocks // 8)
    num_in_tail = table.capacity - sequence.num_computed
    if table.must_copy:  # a plan has room for one block of each row beside those of its tokens
        return num_in_tail if num_free > 0 else 0
    return num_in_tail + max(0, num_free) * pool.block_size
