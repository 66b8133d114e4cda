"""Ownership of KV blocks: free list, reference counts and prefix keys. Ids only, no arrays."""

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

Key = bytes


class BlockPool:
    """The allocator of `num_blocks` blocks of `block_size` tokens (PagedAttention, arXiv 2309.06180, section 4).

    A block is free (reference count 0) or held by one or more sequences. A full block may carry a key that names its
    tokens and all before them; a freed block keeps its key, and can be hit, until it is handed out again.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.generation = -1  # of keys: those of an older one must be computed anew
        self._key_of: dict[int, Key] = {}
        self._block_of: dict[Key, int] = {}
        self.reset()

    def reset(self) -> None:
        """Frees every block, and drops the prefix cache."""
        self.refs = [0] * self.num_blocks  # references to each block; others only read them
        self._free = OrderedDict.fromkeys(range(self.num_blocks))  # the next to hand out first
        self.num_shared = 0  # blocks with several references
        self.forget_keys()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, n: int) -> list[int]:
        """`n` blocks with one reference each, the longest unused first. The caller has checked `num_free`."""
        assert n <= len(self._free), f"{n} blocks wanted, {len(self._free)} free"
        blocks = []
        for _ in range(n):
            block, _ = self._free.popitem(last=False)
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
                self.num_cached -= 1
            self.refs[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block, which takes a free one off the free list."""
        for block in blocks:
            if self.refs[block] == 0:
                del self._free[block]
                self.num_cached -= block in self._key_of
            self.num_shared += self.refs[block] == 1
            self.refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each block of a sequence, its tail first: the shared head lives longest."""
        for block in reversed(blocks):
            assert self.refs[block] > 0, f"block {block} is freed twice"
            self.refs[block] -= 1
            self.num_shared -= self.refs[block] == 1
            if self.refs[block] == 0:
                self._free[block] = None
                if block in self._key_of:
                    self.num_cached += 1
                else:  # it can't be hit: reuse it before any that can
                    self._free.move_to_end(block, last=False)

    def key(self, parent: Key, token_ids: Sequence[int], extras: bytes = b"") -> Key:
        """The name of a full block: its tokens after the block named `parent` (empty for the first block)."""
        h = hashlib.blake2b(parent, key=self._secret, digest_size=32)
        h.update(array("q", token_ids).tobytes())
        h.update(extras)
        return h.digest()

    def register(self, block: int, key: Key) -> None:
        """Makes a held, full block findable. The first block of a key stays its block."""
        assert self.refs[block] > 0, f"block {block} is free and can't get a key"
        if key not in self._block_of and block not in self._key_of:
            self._key_of[block] = key
            self._block_of[key] = block

    def forget(self, block: int) -> None:
        """A held block is written again, and can't be found until it is registered again."""
        assert self.refs[block] > 0, f"block {block} is free"
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def lookup(self, keys: Iterable[Key]) -> list[int]:
        """The blocks of the longest known prefix of `keys`."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` lie on the free list, and would leave it if acquired."""
        return sum(self.refs[block] == 0 for block in blocks)

    def forget_keys(self) -> None:
        """Drops the prefix cache, as the blocks' contents no longer match their keys. Keys made before this never match
        keys made after it, so that holders of old contents can't offer them under a new key."""
        self._key_of.clear()
        self._block_of.clear()
        self.num_cached = 0  # free blocks that can be hit
        self._secret = secrets.token_bytes(32)  # keys must not be predictable: a hit leaks that a prompt was seen
        self.generation += 1

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. O(blocks)."""
        assert len(self.refs) == self.num_blocks and min(self.refs, default=0) >= 0
        assert set(self._free) == {b for b, refs in enumerate(self.refs) if refs == 0}
        assert {key: block for block, key in self._key_of.items()} == self._block_of
        assert self.num_shared == sum(refs > 1 for refs in self.refs)
        assert self.num_cached == sum(block in self._key_of for block in self._free)
