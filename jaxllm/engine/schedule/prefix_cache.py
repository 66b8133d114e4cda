"""Finds cached blocks for a prompt's prefix, and makes a sequence's own full blocks findable."""

from collections.abc import Collection

from jaxllm.engine.schedule.block_pool import BlockPool, Key
from jaxllm.engine.schedule.block_table import BlockTable, GroupBlocks, Hit
from jaxllm.engine.schedule.sequence import Sequence
from jaxllm.engine.schedule.sequence_group import fork_len


class PrefixCache:
    """Keys of sequences' full blocks, over a pool that remembers which block has which key.

    A block can be found once the step that writes it was dispatched in an earlier plan, and its tokens are known: a
    prompt's blocks after their chunk was planned, a generated block after its last token is committed.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool):
        self.pool, self.enabled = pool, enabled
        self._writing: dict[Key, Sequence] = {}  # blocks that a running prefill has yet to write

    def find(self, sequence: Sequence, siblings: Collection[Sequence] = ()) -> Hit | None:
        """The cached blocks that a waiting sequence begins with. None: a running prefill is about to write the next.
        Where layers have windows, `siblings` that go on from it must find there what they read."""
        table = sequence.table
        if not (self.enabled and sequence.reads_prefix_cache):
            return Hit(0, [()] * len(table.groups))
        if table.key_generation != self.pool.generation:
            table.keys.clear()
            table.key_generation = self.pool.generation
        self._extend(sequence, sequence.num_tokens)
        num_tokens = sequence.num_skippable
        if siblings and any(each.group.window is not None for each in table.groups):
            num_tokens = min(num_tokens, fork_len([sequence, *siblings]) - 1)
        num_usable = num_tokens // self.pool.block_size
        keys = table.keys[:num_usable]
        found = [self.pool.lookup(keys, each.index) for each in table.groups if each.group.window is None]
        num_blocks = num_known = min(map(len, found), default=num_usable)
        while num_blocks and (gap := self._last_gap(table, num_blocks)) >= 0:
            num_blocks = gap  # whatever is longer lacks it too
        if num_blocks == num_known < num_usable and table.keys[num_blocks] in self._writing:
            return None
        return Hit(num_blocks, [self._read_after(each, table.keys, num_blocks) for each in table.groups])

    def _last_gap(self, table: BlockTable, num_blocks: int) -> int:
        """The last block that nobody has of those which tokens after `num_blocks` blocks read in groups with windows;
        -1 if all are there."""
        gaps = [-1]
        for each in table.groups:
            if each.group.window is not None:
                first = each.group.first_block(num_blocks * self.pool.block_size, self.pool.block_size)
                indices = range(num_blocks - 1, first - 1, -1)
                missing = (i for i in indices if not self.pool.lookup(table.keys[i : i + 1], each.index))
                gaps.append(next(missing, -1))
        return max(gaps)

    def _read_after(self, of_group: GroupBlocks, keys: list[Key], num_blocks: int) -> list[int]:
        """A group's blocks that tokens after `num_blocks` blocks read."""
        first = of_group.group.first_block(num_blocks * self.pool.block_size, self.pool.block_size)
        return self.pool.lookup(keys[first:num_blocks], of_group.index)

    def begin(self, sequence: Sequence) -> None:
        """The sequence was admitted: its prefill will write the blocks that were not cached."""
        for key in sequence.table.keys[sequence.table.num_keyed :]:
            self._writing.setdefault(key, sequence)

    def offer(self, sequence: Sequence, num_tokens: int) -> None:
        """Makes the full blocks among the first `num_tokens` tokens findable, unless the cache was dropped since the
        sequence was admitted: then some of them come from before, from other parameters say."""
        table = sequence.table
        num_keyed, num_full = table.num_keyed, num_tokens // self.pool.block_size
        if num_full == num_keyed or not self.enabled or table.key_generation != self.pool.generation:
            return
        self._extend(sequence, num_tokens)
        table.register(num_full)
        if self._writing:
            for i in range(num_keyed, num_full):
                self._forget(sequence, i)

    def end(self, sequence: Sequence) -> None:
        """The sequence leaves its blocks: others stop waiting for those that it has not written."""
        for i in range(sequence.table.num_keyed, len(sequence.table.keys)):
            self._forget(sequence, i)

    def reset(self) -> None:
        """Nothing is running any more."""
        self._writing.clear()

    def _forget(self, sequence: Sequence, i: int) -> None:
        key = sequence.table.keys[i]
        if self._writing.get(key) is sequence:
            del self._writing[key]

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        block_size, keys = self.pool.block_size, sequence.table.keys
        for i in range(len(keys), num_tokens // block_size):
            tokens = sequence.token_ids(i * block_size, (i + 1) * block_size)
            keys.append(self.pool.key(keys[-1] if keys else self._root(sequence), tokens))

    def _root(self, sequence: Sequence) -> Key:
        """The parent of the first block's key. A salt separates tenants: without it, timing hits reveals nothing."""
        salt = sequence.params.cache_salt
        return b"" if salt is None else self.pool.key(b"", (), salt.encode("utf-8", "surrogatepass"))

    def check(self, running: Collection[Sequence]) -> None:
        assert set(self._writing.values()) <= set(running)
