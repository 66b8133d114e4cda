"""Which blocks hold what layers have cached of a sequence: the only caller of the pool."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxllm.engine.schedule.block_pool import BlockPool, Key
from jaxllm.engine.schedule.cache_groups import CacheGroup


class Copy(NamedTuple):
    """A page's contents go to another page (copy-on-write)."""

    source: int
    target: int


class Hit(NamedTuple):
    """A beginning of a sequence that the prefix cache has."""

    num_blocks: int
    blocks: Sequence[Sequence[int]]  # of each group, those that what follows reads: the last ones

    def all_blocks(self) -> list[int]:
        return [block for blocks in self.blocks for block in blocks]


class GroupBlocks:
    """The blocks of one sequence in one group, in the order of its tokens: from the block `start` on, as those before
    are no longer read."""

    __slots__ = ("group", "ids", "index", "start")

    def __init__(self, index: int, group: CacheGroup):
        self.index, self.group = index, group
        self.ids: list[int] = []  # changed by the table only
        self.start = 0


class BlockTable:
    """The blocks of one sequence, of which each group has one for the same tokens, and their keys in the prefix cache.

    Tables share blocks by reference. A shared block is only read; one that is written next is owned first (`own_tail`).
    A sequence has one table; it outlives its blocks, because the keys are those of the sequence's tokens. If it
    `keeps_first`, the first group's blocks stay, whatever its window: someone reads the token history beside them.
    """

    __slots__ = ("groups", "key_generation", "keys", "num_blocks", "num_keyed", "pool", "shares_tail")

    def __init__(self, pool: BlockPool, *, keeps_first: bool = False):
        self.pool = pool
        groups = [pool.groups[0]._replace(window=None) if keeps_first else pool.groups[0], *pool.groups[1:]]
        self.groups = [GroupBlocks(index, group) for index, group in enumerate(groups)]
        self.num_blocks = 0  # of each group, those that are no longer read included
        self.shares_tail = False  # the last block is written next, and may be another's too
        self.keys: list[Key] = []  # of the sequence's full blocks, as far as computed
        self.key_generation = pool.generation  # when they were
        self.num_keyed = 0  # leading blocks that were offered to the prefix cache

    def __len__(self) -> int:
        return self.num_blocks

    @property
    def ids(self) -> list[int]:
        """The first group's blocks."""
        return self.groups[0].ids

    @property
    def capacity(self) -> int:
        """Tokens that the blocks have places for."""
        return self.num_blocks * self.pool.block_size

    def pages(self, index: int) -> list[int]:
        """Of all groups' blocks of the same tokens, one after the other."""
        if self.pool.pages_per_block == 1:
            (only,) = self.groups
            return only.ids[index - only.start : index - only.start + 1]
        pages = self.pool.pages
        return [page for of_group in self.groups for page in pages(of_group.ids[index - of_group.start])]

    def pages_of(self, of_group: GroupBlocks) -> list[tuple[int, ...]]:
        """Of each of a group's blocks."""
        return [self.pool.pages(block) for block in of_group.ids]

    def share(self, hit: Hit) -> None:
        """Begins with full blocks that the prefix cache has found."""
        assert not self.num_blocks, "a hit is a sequence's beginning"
        for of_group, blocks in zip(self.groups, hit.blocks, strict=True):
            self.pool.acquire(blocks)
            of_group.ids, of_group.start = list(blocks), hit.num_blocks - len(blocks)
        self.num_blocks = self.num_keyed = hit.num_blocks

    def allocate(self, num_blocks: int) -> None:
        """Appends free blocks. The caller has checked that there are pages for them."""
        for of_group in self.groups:
            of_group.ids += self.pool.allocate(num_blocks, of_group.index)
        self.num_blocks += num_blocks

    def append(self) -> bool:
        """Appends a free block; False if there is none."""
        if self.pool.num_free < self.pool.pages_per_block:
            return False
        self.allocate(1)
        self.shares_tail = False
        return True

    def release_behind(self, position: int) -> None:
        """Gives up what tokens from `position` on don't read."""
        for of_group in self.groups:
            num_gone = of_group.group.first_block(position, self.pool.block_size) - of_group.start
            if num_gone > 0:
                self.pool.release(of_group.ids[:num_gone][::-1])
                del of_group.ids[:num_gone]
                of_group.start += num_gone

    @property
    def num_copied(self) -> int:
        """Free pages that `own_tail` needs. The last of a block's holders needs none."""
        if not self.shares_tail:
            return 0
        return sum(each.group.num_pages for each in self.groups if self.pool.refs[each.ids[-1]] > 1)

    def own_tail(self) -> list[Copy]:
        """Makes the last blocks, which are written next, this table's own: replaced by free ones if others hold them.
        Returns the copies that the device has to make. The caller has checked that there are `num_copied` pages."""
        copies: list[Copy] = []
        if not self.shares_tail:
            return copies
        self.shares_tail = False
        for of_group in self.groups:
            shared = of_group.ids[-1]
            if self.pool.refs[shared] == 1:
                self.pool.forget(shared)  # others may have filled it
                continue
            (own,) = self.pool.allocate(1, of_group.index)
            copies += map(Copy, self.pool.pages(shared), self.pool.pages(own))
            of_group.ids[-1] = own
            self.pool.release([shared])
        return copies

    def fork_point(self, num_tokens: int, num_computed: int) -> int:
        """How many of its first `num_tokens` tokens, of `num_computed`, a fork can go on behind: fewer where a state
        has gone on already, and none where what they read is gone."""
        block_size = self.pool.block_size
        if num_tokens < num_computed and self.pool.has_states:
            num_tokens -= num_tokens % block_size
        has_all = all(each.start <= each.group.first_block(num_tokens, block_size) for each in self.groups)
        return num_tokens if has_all else 0

    def fork(self, num_tokens: int, num_computed: int) -> "BlockTable":
        """A table that shares the blocks of the first `num_tokens` tokens, a `fork_point`, of `num_computed` that this
        one has. If they end within a block, the new table writes to it next; this one too, if it has not filled it."""
        num_full, is_inside = divmod(num_tokens, self.pool.block_size)
        table = BlockTable(self.pool)
        table.num_blocks = num_full + (is_inside > 0)
        for mine, others in zip(self.groups, table.groups, strict=True):
            others.group = mine.group
            others.start = min(max(mine.start, mine.group.first_block(num_tokens, self.pool.block_size)), len(table))
            others.ids = mine.ids[others.start - mine.start : max(0, len(table) - mine.start)]
            self.pool.acquire(others.ids)
        table.num_keyed = min(self.num_keyed, num_full)
        table.keys, table.key_generation = self.keys[: table.num_keyed], self.key_generation
        table.shares_tail = is_inside > 0
        self.shares_tail |= is_inside > 0 and len(table) == len(self) and num_computed < self.capacity
        return table

    def shrink(self, num_tokens: int) -> None:
        """Gives up the blocks that hold none of the first `num_tokens` tokens. They are this table's own."""
        num_blocks = -(-num_tokens // self.pool.block_size)
        for each in self.groups:
            self.pool.release(each.ids[num_blocks - each.start :])
            del each.ids[num_blocks - each.start :]
        self.num_blocks = min(self.num_blocks, num_blocks)

    def register(self, num_blocks: int) -> None:
        """Makes the first `num_blocks` blocks findable, which are full and have their keys."""
        for each in self.groups:
            first = max(self.num_keyed, each.start)
            blocks = each.ids[first - each.start : num_blocks - each.start]
            for block, key in zip(blocks, self.keys[first:num_blocks], strict=True):
                self.pool.register(block, key, each.index)
        self.num_keyed = num_blocks

    def release(self) -> None:
        """Gives all blocks up; the keys stay. Those that a longer hit needs more than a shorter one go first: the last
        ones of all tokens, and of a window the first ones."""
        for each in self.groups:
            self.pool.release(each.ids if each.group.window is None else each.ids[::-1])
            each.ids, each.start = [], 0
        self.num_blocks, self.shares_tail, self.num_keyed = 0, False, 0

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. O(blocks of the table)."""
        assert 0 <= self.num_keyed <= self.num_blocks
        for each in self.groups:
            assert each.start + len(each.ids) == self.num_blocks and len(set(each.ids)) == len(each.ids)
            assert all(self.pool.refs[block] > 0 for block in each.ids)
        assert self.num_blocks or not self.shares_tail


class Places(NamedTuple):
    """Where a table's blocks lie among those that are copied to host memory."""

    num_blocks: int
    of_groups: list[tuple[int, list[int]]]  # of each group: the first block's index in the table, and the places


class Outgoing:
    """Collects the blocks of tables that leave together, each block once."""

    def __init__(self, pool: BlockPool):
        self.pool, self.pages = pool, []
        self._place_of: dict[int, int] = {}  # of each block, in `groups`
        self.groups: list[int] = []  # of each place

    def add(self, table: BlockTable) -> Places:
        """Where the table's blocks are. A shared block that is written next comes back once for each of its holders."""
        return Places(len(table), [(each.start, self._add(each, table.shares_tail)) for each in table.groups])

    def _add(self, of_group: GroupBlocks, shares_tail: bool) -> list[int]:
        places = []
        for i, block in enumerate(of_group.ids):
            is_tail = shares_tail and i == len(of_group.ids) - 1
            if is_tail or block not in self._place_of:
                self._place_of[block] = len(self.groups)
                self.groups.append(of_group.index)
                self.pages += self.pool.pages(block)
            places.append(self._place_of[block])
        return places


def restore(tables: Sequence[BlockTable], places: Sequence[Places], groups: Sequence[int]) -> list[int]:
    """Gives tables that have no blocks new ones, for each place one that all tables with this place share; `groups` are
    the places'. Returns the pages of all places, the pool's size for those that no table has. The caller has checked
    that they are free."""
    pool = tables[0].pool
    block_of: dict[int, int] = {}
    for table, of_table in zip(tables, places, strict=True):
        table.num_blocks = of_table.num_blocks
        for each, (start, wanted) in zip(table.groups, of_table.of_groups, strict=True):
            for place in wanted:
                if place in block_of:
                    pool.acquire([block_of[place]])
                else:
                    (block_of[place],) = pool.allocate(1, each.index)
            each.start, each.ids = start, [block_of[place] for place in wanted]
    nobodys = [pool.num_pages] * max(group.num_pages for group in pool.groups)
    return [
        page
        for place, group in enumerate(groups)
        for page in (pool.pages(block_of[place]) if place in block_of else nobodys[: pool.groups[group].num_pages])
    ]
