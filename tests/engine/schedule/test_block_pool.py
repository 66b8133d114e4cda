"""The block pool against a model that knows what every block contains."""

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxllm.engine.schedule.block_pool import BlockPool

BLOCK_SIZE = 2
block_tokens = st.tuples(*[st.integers(0, 1)] * BLOCK_SIZE)


def chain(pool, blocks_of_tokens):
    """The keys of consecutive full blocks."""
    return list(accumulate(blocks_of_tokens, pool.key, initial=b""))[1:]


@dataclass
class Sequence:
    blocks: list
    prefixes: list  # of each block: the generation of its keys, and all tokens up to its end
    keys: list


class BlockPoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 10))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.sequences = []
        self.contents = {}  # block -> the prefix that was last written to it
        self.findable = {}  # prefix -> block
        self.released_at = Counter()
        self.clock = 0

    def refs(self):
        return Counter(block for sequence in self.sequences for block in sequence.blocks)

    def check(self):
        self.pool.check()
        refs = self.refs()
        assert self.pool.refs == [refs[block] for block in range(self.pool.num_pages)]
        assert self.pool.num_used == len(refs) == self.pool.num_pages - self.pool.num_free

    def lookup(self, prefixes, keys):
        hits = self.pool.lookup(keys)
        known = [prefix in self.findable for prefix in prefixes] + [False]
        assert hits == [self.findable[prefix] for prefix in prefixes[: known.index(False)]]
        assert [self.contents[block] for block in hits] == prefixes[: len(hits)]
        return hits

    @rule(tokens=st.lists(block_tokens, min_size=1, max_size=4), register=st.booleans())
    def admit(self, tokens, register):
        """As the scheduler does: shares what is cached, allocates and writes the rest, and may offer it."""
        prefixes = [(self.pool.generation, *prefix) for prefix in accumulate((t,) for t in tokens)]
        keys = chain(self.pool, tokens)
        hits = self.lookup(prefixes, keys)
        num_new = len(keys) - len(hits)
        refs = self.refs()
        assert self.pool.count_free(hits) == sum(refs[block] == 0 for block in hits)
        if num_new > self.pool.num_free - self.pool.count_free(hits):
            return
        self.pool.acquire(hits)
        self.sequences.append(Sequence(hits, prefixes, keys))
        blocks = self.allocate(num_new)
        self.contents.update(zip(blocks, prefixes[len(hits) :], strict=True))
        self.sequences[-1] = Sequence(hits + blocks, prefixes, keys)
        if register:
            self.register(self.sequences[-1])
        self.check()

    def allocate(self, n):
        """Blocks without a key go first, then those whose release is longest ago."""
        free = set(range(self.pool.num_pages)) - set(self.refs())
        keyed = sorted(free & set(self.findable.values()), key=self.released_at.__getitem__)
        num_unkeyed = min(n, len(free) - len(keyed))
        blocks = self.pool.allocate(n)
        assert len(set(blocks)) == n and set(blocks[:num_unkeyed]) <= free - set(keyed)
        assert blocks[num_unkeyed:] == keyed[: n - num_unkeyed]
        self.findable = {prefix: block for prefix, block in self.findable.items() if block not in blocks}
        return blocks

    def register(self, sequence):
        for block, prefix, key in zip(sequence.blocks, sequence.prefixes, sequence.keys, strict=True):
            self.pool.register(block, key)
            if prefix not in self.findable and block not in self.findable.values():
                self.findable[prefix] = block

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def register_late(self, data):
        """Again, or with keys that are older than the prefix cache."""
        self.register(data.draw(st.sampled_from(self.sequences)))
        self.check()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        blocks = self.sequences.pop(index).blocks
        self.pool.release(blocks)
        refs = self.refs()
        for block in reversed(blocks):
            self.clock += 1
            if not refs[block]:
                self.released_at[block] = self.clock
        self.check()

    @rule()
    def forget_keys(self):
        self.pool.forget_keys()
        self.findable.clear()
        self.check()


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def cached(pool, *tokens):
    """Blocks that hold `tokens`, findable and released."""
    blocks, keys = pool.allocate(len(tokens)), chain(pool, tokens)
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
    pool.release(blocks)
    return blocks, keys


def test_reuse_takes_the_tail_of_the_longest_unused():
    pool = BlockPool(6, BLOCK_SIZE)
    (a0, a1, a2), _ = cached(pool, (1, 1), (1, 2), (1, 3))
    (b0, b1, b2), _ = cached(pool, (2, 1), (2, 2), (2, 3))
    assert pool.allocate(6) == [a2, a1, a0, b2, b1, b0]


def test_acquire_and_release_makes_a_block_the_last_to_go():
    pool = BlockPool(4, BLOCK_SIZE)
    (a0, a1), _ = cached(pool, (1, 1), (1, 2))
    (b0, b1), _ = cached(pool, (2, 1), (2, 2))
    pool.acquire([a0])
    pool.release([a0])
    assert pool.allocate(4) == [a1, b1, b0, a0]


def test_blocks_without_a_key_go_first():
    pool = BlockPool(5, BLOCK_SIZE)
    keyed, _ = cached(pool, (1, 1), (1, 2))
    plain = pool.allocate(3)
    pool.release(plain)
    blocks = pool.allocate(5)
    assert set(blocks[:3]) == set(plain) and blocks[3:] == keyed[::-1]


def test_freed_block_keeps_its_key_until_reused():
    pool = BlockPool(3, BLOCK_SIZE)
    blocks, keys = cached(pool, (1, 1), (1, 2), (1, 3))
    assert pool.num_free == 3 and pool.lookup(keys) == blocks
    pool.allocate(1)
    assert pool.lookup(keys) == blocks[:2]
    pool.allocate(2)
    assert pool.lookup(keys) == []
    pool.check()


def test_first_block_of_a_key_stays_its_block():
    pool = BlockPool(2, BLOCK_SIZE)
    first, second = pool.allocate(2)
    key = pool.key(b"", (1, 2))
    pool.register(first, key)
    pool.register(second, key)
    assert pool.lookup([key]) == [first]
    pool.register(first, pool.key(b"", (3, 4)))
    assert pool.lookup([key]) == [first]
    pool.check()


def test_key_depends_on_tokens_parent_and_extras():
    pool = BlockPool(1, BLOCK_SIZE)
    parent = pool.key(b"", (1, 2))
    keys = [
        parent,
        pool.key(parent, (1, 2)),
        pool.key(b"", (2, 1)),
        pool.key(b"", (1, 2), b"adapter"),
        pool.key(pool.key(b"", (0, 2)), (1, 2)),
    ]
    assert len(set(keys)) == len(keys)
    assert pool.key(b"", [1, 2]) == parent


def test_keys_of_one_pool_say_nothing_about_those_of_another():
    assert BlockPool(1, BLOCK_SIZE).key(b"", (1, 2)) != BlockPool(1, BLOCK_SIZE).key(b"", (1, 2))


def test_no_hit_across_generations():
    pool = BlockPool(4, BLOCK_SIZE)
    blocks, old_keys = cached(pool, (1, 1), (1, 2))
    pool.acquire(blocks)
    pool.forget_keys()
    assert pool.generation == 1 and pool.lookup(old_keys) == []
    for block, key in zip(blocks, old_keys, strict=True):  # who still holds them offers them again
        pool.register(block, key)
    assert pool.lookup(chain(pool, ((1, 1), (1, 2)))) == []
    pool.release(blocks)
    pool.check()
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]


def test_misuse_is_an_assertion_error_that_says_what():
    pool = BlockPool(2, BLOCK_SIZE)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free"):
        pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="block 1 is freed twice"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="block 0 is free"):
        pool.register(0, pool.key(b"", (1, 2)))
    pool.check()
