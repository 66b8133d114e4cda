"""Ownership of KV blocks: free pages, reference counts and prefix keys. Ids only, no arrays."""

import hashlib
import secrets
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from jaxllm.engine.schedule.cache_groups import EVERYTHING, CacheGroup

Key = bytes


class BlockPool:
    """The allocator of `num_blocks` blocks of `block_size` tokens (PagedAttention, arXiv 2309.06180, section 4), which
    `groups` of layers share: in pages of equal size, of which a group's block takes as many as it says. `num_blocks`
    counts blocks of all groups together. A block goes by the id of its first page.

    A block is free (reference count 0) or held by one or more sequences. A full block may carry a key that names its
    tokens and all before them; a freed block keeps its key, and can be hit, until its pages are handed out again.
    """

    def __init__(self, num_blocks: int, block_size: int, groups: Sequence[CacheGroup] = EVERYTHING):
        self.block_size, self.groups = block_size, tuple(groups)
        self.pages_per_block = sum(group.num_pages for group in groups)
        self.num_pages = num_blocks * self.pages_per_block
        self.has_states = any(group.is_state for group in groups)
        self.has_windows = any(group.window is not None for group in groups)
        self.generation = -1  # of keys: those of an older one must be computed anew
        self.reset()

    def reset(self) -> None:
        """Frees every block, and drops the prefix cache."""
        self.refs = [0] * self.num_pages  # references to each block; others only read them
        self._free = deque(range(self.num_pages))  # pages of no block, the next to hand out first
        self._unused: OrderedDict[int, None] = OrderedDict()  # free blocks that can be hit, the longest unused first
        self._pages_of: dict[int, tuple[int, ...]] = {}  # of each block of several pages
        self._keys: dict[int, tuple[int, Key]] = {}  # of each block that has one: its group and key
        self._blocks: list[dict[Key, int]] = [{} for _ in self.groups]
        self.num_shared = 0  # blocks with several references
        self.num_cached = 0  # pages of free blocks that can be hit
        self.forget_keys()

    @property
    def num_free(self) -> int:
        """Free pages, those among them that can be hit."""
        return len(self._free) + self.num_cached

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def pages(self, block: int) -> tuple[int, ...]:
        """All pages of a block."""
        return self._pages_of.get(block) or (block,)

    def allocate(self, n: int, group: int = 0) -> list[int]:
        """`n` blocks of a group with one reference each, the longest unused pages first. The caller has checked
        `num_free`."""
        size = self.groups[group].num_pages
        assert n * size <= self.num_free, f"{n * size} pages wanted, {self.num_free} free"
        free = self._free
        while len(free) < n * size:
            block, _ = self._unused.popitem(last=False)
            self._drop_key(block)
            free.extend(self._give_pages(block))
        blocks = []
        for _ in range(n):
            block = free.popleft()
            if size > 1:
                self._pages_of[block] = (block, *(free.popleft() for _ in range(size - 1)))
            self.refs[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block, of which free ones can be hit."""
        for block in blocks:
            if self.refs[block] == 0:
                del self._unused[block]
                self.num_cached -= len(self.pages(block))
            self.num_shared += self.refs[block] == 1
            self.refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each block, the last one first: it is reused first."""
        for block in reversed(blocks):
            assert self.refs[block] > 0, f"block {block} is freed twice"
            self.refs[block] -= 1
            self.num_shared -= self.refs[block] == 1
            if self.refs[block] == 0:
                if block in self._keys:
                    self._unused[block] = None
                    self.num_cached += len(self.pages(block))
                else:  # it can't be hit: reuse it before any that can
                    self._free.extendleft(self._give_pages(block))

    def _give_pages(self, block: int) -> tuple[int, ...]:
        return self._pages_of.pop(block, None) or (block,)

    def _drop_key(self, block: int) -> None:
        group, key = self._keys.pop(block)
        del self._blocks[group][key]
        self.num_cached -= len(self.pages(block))

    def key(self, parent: Key, token_ids: Sequence[int], extras: bytes = b"") -> Key:
        """The name of a full block: its tokens after the block named `parent` (empty for the first block)."""
        named = parent + array("q", token_ids).tobytes() + extras
        return hashlib.blake2b(named, key=self._secret, digest_size=32).digest()

    def register(self, block: int, key: Key, group: int = 0) -> None:
        """Makes a held, full block of a group findable. The first block of a key stays its block."""
        assert self.refs[block] > 0, f"block {block} is free and can't get a key"
        if key not in self._blocks[group] and block not in self._keys:
            self._keys[block] = group, key
            self._blocks[group][key] = block

    def forget(self, block: int) -> None:
        """A held block is written again, and can't be found until it is registered again."""
        assert self.refs[block] > 0, f"block {block} is free"
        if block in self._keys:
            group, key = self._keys.pop(block)
            del self._blocks[group][key]

    def lookup(self, keys: Iterable[Key], group: int = 0) -> list[int]:
        """A group's blocks of the longest known prefix of `keys`."""
        blocks, known = [], self._blocks[group]
        for key in keys:
            block = known.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many pages of `blocks` are free, and would no longer be if acquired."""
        return sum(len(self.pages(block)) for block in blocks if self.refs[block] == 0)

    def forget_keys(self, like: "BlockPool | None" = None) -> None:
        """Drops the prefix cache, as the blocks' contents no longer match their keys. Keys made before this never match
        keys made after it, so that holders of old contents can't offer them under a new key. From then on keys are
        those of the pool `like`, if that is given."""
        self._keys.clear()
        for known in self._blocks:
            known.clear()
        for block in self._unused:
            self._free.extend(self._give_pages(block))
        self._unused.clear()
        self.num_cached = 0
        self._secret = secrets.token_bytes(32)  # keys must not be predictable: a hit leaks that a prompt was seen
        self.generation += 1
        if like is not None:
            self._secret, self.generation = like._secret, like.generation

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. O(blocks)."""
        assert len(self.refs) == self.num_pages and min(self.refs, default=0) >= 0
        held = [block for block, refs in enumerate(self.refs) if refs]
        pages = [*self._free, *(page for block in [*held, *self._unused] for page in self.pages(block))]
        assert sorted(pages) == list(range(self.num_pages)), "each page is free, or of one block"
        assert self._pages_of.keys() <= {*held, *self._unused} and self._unused.keys() <= self._keys.keys()
        assert all(pages[0] == block for block, pages in self._pages_of.items())
        named = [(block, (group, key)) for group, known in enumerate(self._blocks) for key, block in known.items()]
        assert dict(named) == self._keys and len(named) == len(self._keys)
        assert self.num_shared == sum(refs > 1 for refs in self.refs)
        assert self.num_cached == sum(len(self.pages(block)) for block in self._unused)
