"""Block tables: who holds which blocks, and that nobody else asks the pool for any."""

import ast
from pathlib import Path

import pytest

import jaxllm.engine
from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.block_table import BlockTable, Copy, Hit, Places, restore

VERBS = {"allocate", "acquire", "release", "register", "forget"}  # of the pool


def make_table(num_blocks=3, pool=None) -> BlockTable:
    table = BlockTable(pool or BlockPool(8, 4))
    table.allocate(num_blocks)
    return table


def check(*tables: BlockTable) -> None:
    """All blocks in use are those of the tables."""
    pool = tables[0].pool
    pool.check()
    for table in tables:
        table.check()
    assert pool.refs == [sum(block in table.ids for table in tables) for block in range(pool.num_pages)]


def pool_calls(source: str) -> set[str]:
    """The verbs of a pool that the source calls: those of anything whose name ends with "pool"."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    called = (call for call in calls if isinstance(call, ast.Attribute) and call.attr in VERBS)
    owners = ((call.attr, getattr(call.value, "attr", getattr(call.value, "id", ""))) for call in called)
    return {verb for verb, owner in owners if owner.endswith("pool")}


def test_nobody_else_calls_the_pool():
    folder = Path(jaxllm.engine.__path__[0])
    found = {path.name: pool_calls(path.read_text()) for path in folder.rglob("*.py")}
    assert found.pop("block_table.py") == VERBS
    assert len(found) > 30 and {name: verbs for name, verbs in found.items() if verbs} == {}


@pytest.mark.parametrize(("num_tokens", "num_shared"), [(1, 1), (4, 1), (5, 2), (8, 2), (12, 3)])
def test_a_fork_shares_the_blocks_of_its_tokens(num_tokens, num_shared):
    table = make_table()
    fork = table.fork(num_tokens, 12)
    assert fork.ids == table.ids[:num_shared]
    assert fork.shares_tail == (num_tokens % 4 > 0)
    check(table, fork)
    fork.release()
    check(table, fork)


def test_a_fork_inside_the_last_block_leaves_both_to_own_it():
    table = make_table(2)
    fork = table.fork(7, 7)
    assert table.shares_tail and fork.num_copied
    shared = table.ids[-1]
    (copy,) = fork.own_tail()
    assert copy == Copy(shared, fork.ids[-1]) and fork.ids[-1] != shared and not fork.shares_tail
    check(table, fork)
    assert not table.num_copied and table.own_tail() == [], "the last holder needs no copy"
    assert table.ids[-1] == shared and not table.shares_tail


def test_a_full_block_that_is_written_again_is_not_found():
    pool = BlockPool(8, 4)
    table = make_table(1, pool)
    table.keys.append(pool.key(b"", (1, 2, 3, 4)))
    table.register(1)
    fork = table.fork(3, 4)
    table.release()
    assert pool.lookup(fork.keys or table.keys) == fork.ids
    assert fork.own_tail() == [] and pool.lookup(table.keys) == []
    check(fork)


def test_a_fork_of_full_blocks_shares_no_tail():
    table = make_table(2)
    fork = table.fork(8, 8)
    assert not table.shares_tail and fork.own_tail() == []
    check(table, fork)


def test_a_fork_before_the_last_block_leaves_the_tail_alone():
    table = make_table(3)
    fork = table.fork(5, 11)
    assert fork.shares_tail and not table.shares_tail


def test_who_has_filled_the_last_block_does_not_write_to_it():
    table = make_table(2)
    fork = table.fork(7, 8)
    assert fork.num_copied and not table.shares_tail


def test_a_new_block_is_nobody_elses():
    table = make_table(2)
    fork = table.fork(7, 7)
    assert table.append() and not table.shares_tail and fork.shares_tail
    check(table, fork)


def test_append_without_a_free_block():
    table = make_table(8)
    assert not table.append() and len(table) == 8 and table.capacity == 32


def test_a_fork_keeps_the_keys_of_what_was_offered():
    pool = BlockPool(8, 2)
    table = make_table(3, pool)
    key = b""
    for tokens in ((1, 2), (3, 4), (5, 6)):
        key = pool.key(key, tokens)
        table.keys.append(key)
    table.register(2)
    fork = table.fork(6, 6)
    assert (fork.keys, fork.num_keyed) == (table.keys[:2], 2)
    assert (table.fork(3, 6).keys, pool.lookup(table.keys)) == (table.keys[:1], table.ids[:2])
    table.release()
    assert len(table.keys) == 3 and table.num_keyed == 0, "the tokens are the same"


def test_hits_are_the_beginning():
    pool = BlockPool(4, 2)
    first = make_table(2, pool)
    second = BlockTable(pool)
    second.share(Hit(2, [first.ids]))
    second.allocate(1)
    assert second.ids[:2] == first.ids and second.num_keyed == 2
    check(first, second)
    with pytest.raises(AssertionError, match="a hit is a sequence's beginning"):
        second.share(Hit(2, [first.ids]))


def test_tables_come_back_with_what_they_shared():
    pool = BlockPool(6, 2)
    tables = [BlockTable(pool) for _ in range(2)]
    places = restore(tables, [Places(2, [(0, [0, 1])]), Places(2, [(0, [0, 3])])], groups=[0] * 4)
    assert tables[0].ids[0] == tables[1].ids[0] and tables[0].ids[1] != tables[1].ids[1]
    assert places == [*tables[0].ids, 6, tables[1].ids[1]], "nobody wants the third"
    check(*tables)
