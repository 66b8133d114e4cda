"""Which blocks hold a sequence's keys and values: the only caller of the pool."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxllm.engine.schedule.block_pool import BlockPool, Key


class Copy(NamedTuple):
    """A block's contents go to another block (copy-on-write)."""

    source: int
    target: int


class BlockTable:
    """The blocks of one sequence, in the order of its tokens, and their keys in the prefix cache.

    Tables share blocks by reference. A shared block is only read; one that is written next is owned first (`own_tail`).
    A sequence has one table; it outlives its blocks, because the keys are those of the sequence's tokens.
    """

    __slots__ = ("ids", "key_generation", "keys", "num_keyed", "pool", "shares_tail")

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.ids: list[int] = []  # changed here only
        self.shares_tail = False  # the last block is written next, and may be another's too
        self.keys: list[Key] = []  # of the sequence's full blocks, as far as computed
        self.key_generation = pool.generation  # when they were
        self.num_keyed = 0  # leading blocks that were offered to the prefix cache

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def capacity(self) -> int:
        """Tokens that the blocks have places for."""
        return len(self.ids) * self.pool.block_size

    def share(self, blocks: Sequence[int]) -> None:
        """Begins with full blocks that the prefix cache has found."""
        assert not self.ids, "a hit is a sequence's beginning"
        self.pool.acquire(blocks)
        self.ids, self.num_keyed = list(blocks), len(blocks)

    def allocate(self, num_blocks: int) -> None:
        """Appends free blocks. The caller has checked that there are so many."""
        self.ids += self.pool.allocate(num_blocks)

    def append(self) -> int | None:
        """Appends a free block and returns it; None if there is none."""
        if not self.pool.num_free:
            return None
        self.allocate(1)
        self.shares_tail = False
        return self.ids[-1]

    @property
    def must_copy(self) -> bool:
        """Whether `own_tail` needs a free block. The last of a block's holders does not."""
        return self.shares_tail and self.pool.refs[self.ids[-1]] > 1

    def own_tail(self) -> Copy | None:
        """Makes the last block, which is written next, this table's own: replaced by a free one if others hold it.
        Returns the copy that the device has to make. The caller has checked that a block is free, if `must_copy`."""
        if not self.shares_tail:
            return None
        must_copy, self.shares_tail = self.must_copy, False
        shared = self.ids[-1]
        if not must_copy:
            self.pool.forget(shared)  # others may have filled it
            return None
        (self.ids[-1],) = self.pool.allocate(1)
        self.pool.release([shared])
        return Copy(shared, self.ids[-1])

    def fork(self, num_tokens: int, num_computed: int) -> "BlockTable":
        """A table that shares the blocks of the first `num_tokens` tokens, of `num_computed` that this one has. If they
        end within a block, the new table writes to it next; this one too, if it has not filled it."""
        num_full, is_inside = divmod(num_tokens, self.pool.block_size)
        table = BlockTable(self.pool)
        table.ids = self.ids[: num_full + (is_inside > 0)]
        self.pool.acquire(table.ids)
        table.num_keyed = min(self.num_keyed, num_full)
        table.keys, table.key_generation = self.keys[: table.num_keyed], self.key_generation
        table.shares_tail = is_inside > 0
        self.shares_tail |= is_inside > 0 and len(table) == len(self) and num_computed < self.capacity
        return table

    def shrink(self, num_tokens: int) -> None:
        """Gives up the blocks that hold none of the first `num_tokens` tokens. They are this table's own."""
        num_blocks = -(-num_tokens // self.pool.block_size)
        self.pool.release(self.ids[num_blocks:])
        del self.ids[num_blocks:]

    def register(self, num_blocks: int) -> None:
        """Makes the first `num_blocks` blocks findable, which are full and have their keys."""
        for block, key in zip(self.ids[self.num_keyed : num_blocks], self.keys[self.num_keyed :], strict=False):
            self.pool.register(block, key)
        self.num_keyed = num_blocks

    def release(self) -> None:
        """Gives all blocks up; the keys stay."""
        self.pool.release(self.ids)
        self.ids, self.shares_tail, self.num_keyed = [], False, 0

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. O(blocks of the table)."""
        assert len(set(self.ids)) == len(self.ids) and 0 <= self.num_keyed <= len(self.ids)
        assert all(self.pool.refs[block] > 0 for block in self.ids)
        assert self.ids or not self.shares_tail


def restore(tables: Sequence[BlockTable], places: Sequence[Sequence[int]], num_places: int) -> list[int]:
    """Gives tables that have no blocks new ones, for each place one that all tables with this place share. Returns the
    block of each place, the pool's size for those that no table has. The caller has checked that they are free."""
    pool = tables[0].pool
    wanted = sorted({place for of_table in places for place in of_table})
    block_of = dict(zip(wanted, pool.allocate(len(wanted)), strict=True))
    taken: set[int] = set()
    for table, of_table in zip(tables, places, strict=True):
        table.ids = [block_of[place] for place in of_table]
        pool.acquire(block for block in table.ids if block in taken)
        taken.update(table.ids)
    return [block_of.get(place, pool.num_blocks) for place in range(num_places)]
