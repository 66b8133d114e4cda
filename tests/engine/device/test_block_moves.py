"""Block moves against a shadow in numpy of every block's bits, with steps that overwrite blocks in between."""

import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from jaxllm.engine.device import block_moves
from jaxllm.engine.device.block_moves import (
    BlockMoves,
    copy_blocks,
    copy_sizes,
    encode_moves,
    host_bytes,
    jobs,
    measure_bandwidth,
    read_blocks,
    write_blocks,
)
from jaxllm.engine.device.compile_plan import CompilePlan
from jaxllm.engine.schedule.block_table import Copy
from jaxllm.engine.schedule.plan import Plan, Swap
from jaxllm.pallas_kernels.paged_attention import KV_AXES, kv_shape
from jaxllm.sharding.mesh import make_mesh
from jaxllm.sharding.rules import sharding

NUM_BLOCKS, NUM_LAYERS, MAX_SEQS = 40, 2, 8
SHAPE = kv_shape(NUM_BLOCKS, 2, 4, 2, platform="cpu")
POOL_BYTES = NUM_LAYERS * int(np.prod(SHAPE)) * 4
BITS = {"float32": np.uint32, "bfloat16": np.uint16}


def executables_of(plan):
    def executable(name):
        plan.wait([name])
        return plan[name]

    return executable


class Device:
    """Pools on a mesh, the executables that move their blocks, and a stand-in for a step."""

    def __init__(self, mesh="tensor=1", dtype="float32"):
        mesh, self.bits = make_mesh(mesh), BITS[dtype]
        self.place, self.dtype = sharding(KV_AXES, mesh), jnp.dtype(dtype)
        self.pools = [jax.ShapeDtypeStruct(SHAPE, dtype, sharding=self.place)] * NUM_LAYERS
        self.compiled = CompilePlan(jobs(self.pools, MAX_SEQS))
        self.compiled.wait(list(jobs(self.pools, MAX_SEQS)))
        self.executable = executables_of(self.compiled)
        self.peek = jax.jit(lambda pools: [jax.lax.bitcast_convert_type(pool, self.bits) for pool in pools])

        def overwrite(pools, block, values):
            return [pool.at[block].set(values) for pool in pools]

        self.overwrite = jax.jit(overwrite, donate_argnums=0, out_shardings=[self.place] * NUM_LAYERS)

    def random(self, rng, *shape):
        """Finite values and a NaN; in float32 any bits, for the CPU's bfloat16 may pass through float32."""
        if self.bits is np.uint32:
            values = rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
        else:
            values = rng.normal(size=shape).astype(self.dtype)
        values[..., 0] = np.nan
        return values


@pytest.fixture(scope="module")
def device():
    device = Device()
    yield device
    device.compiled.close()


class Shadowed:
    """Pools and what they should hold, changed together."""

    def __init__(self, device, seed=0):
        self.device, self.rng = device, np.random.default_rng(seed)
        self.moves = BlockMoves(device.executable)
        self.shadow = [device.random(self.rng, *SHAPE) for _ in range(NUM_LAYERS)]
        self.pools = [jax.device_put(values.copy(), device.place) for values in self.shadow]
        self.shadow = np.stack([values.view(device.bits) for values in self.shadow])
        self.kept = {}

    def run(self, **moves):
        plan = Plan(**moves)
        self.apply(plan)
        for key, blocks in plan.swap_outs:
            self.kept[key] = self.shadow[:, blocks]
        for key, blocks in plan.swap_ins:
            contents = self.kept.pop(key)
            for i, block in enumerate(blocks):
                if block < NUM_BLOCKS:
                    self.shadow[:, block] = contents[:, i]
        if plan.copies:
            sources, targets = zip(*plan.copies, strict=True)
            self.shadow[:, targets] = self.shadow[:, sources]
        for key in plan.released_copies:
            del self.kept[key]
        assert self.moves.num_kept == len(self.kept)

    def apply(self, plan):
        for command in encode_moves(plan, NUM_BLOCKS, MAX_SEQS):
            self.pools = self.moves.apply(self.pools, command)

    def step(self, blocks):
        """Overwrites blocks, and awaits nothing."""
        for block in blocks:
            values = self.device.random(self.rng, *SHAPE[1:])
            self.pools = self.device.overwrite(self.pools, np.int32(block), values)
            self.shadow[:, block] = values.view(self.device.bits)

    def check(self):
        for pool, expected in zip(self.device.peek(self.pools), self.shadow, strict=True):
            np.testing.assert_array_equal(np.asarray(pool), expected)

    def blocks(self, n):
        return self.rng.permutation(NUM_BLOCKS)[:n].tolist()


class BlockMovesMachine(RuleBasedStateMachine):
    def __init__(self, device):
        super().__init__()
        self.device, self.world, self.next_key = device, None, 0

    @initialize(seed=st.integers(0, 2**32 - 1))
    def start(self, seed):
        self.world = Shadowed(self.device, seed)

    @rule(
        out_sizes=st.lists(st.integers(0, 24), max_size=2),
        num_in=st.integers(0, 2),
        num_released=st.integers(0, 1),
        num_copies=st.integers(0, MAX_SEQS),
        num_written=st.integers(0, 6),
        settles=st.booleans(),
        looks=st.booleans(),
    )
    def round(self, out_sizes, num_in, num_released, num_copies, num_written, settles, looks):
        """Any moves that a plan may ask for, and a step; what was swapped out is the first to be written again."""
        world, rng = self.world, self.world.rng
        keys = rng.permutation(list(world.kept)).astype(int).tolist()
        swap_outs = [Swap(self.next_key + i, world.blocks(n)) for i, n in enumerate(out_sizes)]
        self.next_key += len(swap_outs)
        freed = [block for swap in swap_outs for block in swap.pages]
        free = list(dict.fromkeys(freed + world.blocks(NUM_BLOCKS)))
        swap_ins, returned = [], set()
        for key in keys[:num_in]:
            n = world.kept[key].shape[1]
            if n <= len(free) // 2:
                blocks, free = free[:n], free[n:]
                returned.update(blocks)
                if n > 1 and rng.random() < 0.3:
                    blocks[rng.integers(n)] = blocks[0] = NUM_BLOCKS  # that nobody wants back
                swap_ins.append(Swap(key, blocks))
        sources = rng.choice([block for block in range(NUM_BLOCKS) if block not in returned], num_copies).tolist()
        copies = [Copy(source, target) for source, target in zip(sources, free, strict=False)]
        released = keys[num_in : num_in + num_released]
        world.run(swap_outs=swap_outs, swap_ins=swap_ins, copies=copies, released_copies=released)
        world.step(freed[:num_written] + world.blocks(num_written // 2))
        if settles:
            world.moves.settle()
        if looks:
            world.check()

    def teardown(self):
        if self.world is not None:
            for key in list(self.world.kept):
                self.world.check()
                self.world.run(swap_ins=[Swap(key, self.world.blocks(self.world.kept[key].shape[1]))])
            self.world.check()


def test_random_plans(device):
    sizes = settings(max_examples=50, stateful_step_count=12, deadline=None)
    run_state_machine_as_test(partial(BlockMovesMachine, device), settings=sizes)


def test_chains_within_one_round(device):
    """Blocks that a swap-out frees are written by swap-ins and copies of the same plan, and copies form a ring."""
    world = Shadowed(device)
    first, rest = world.blocks(23), list(range(NUM_BLOCKS))
    world.run(swap_outs=[Swap(1, first)])
    world.step(first)
    world.run(
        swap_outs=[Swap(2, first)],
        swap_ins=[Swap(1, first[3:] + [b for b in rest if b not in first][:3])],
        copies=[Copy(first[0], first[1]), Copy(first[1], first[2]), Copy(first[2], first[0])],
    )
    world.check()
    world.run(swap_outs=[Swap(3, [5, 5, 6])], swap_ins=[Swap(3, [7, NUM_BLOCKS, NUM_BLOCKS])])
    world.run(swap_ins=[Swap(2, rest[-23:])], copies=[Copy(0, 1)])
    world.check()
    assert world.moves.num_kept == 0


@pytest.mark.parametrize(
    ("mesh", "dtype"), [("tensor=2", "bfloat16"), ("tensor=4", "float32"), ("stage=2,tensor=2", "float32")]
)
def test_on_several_devices(mesh, dtype):
    device = Device(mesh, dtype)
    world = Shadowed(device)
    size = dict(part.split("=") for part in mesh.split(","))["tensor"]
    (beside,) = device.compiled["swap_out", 4].output_shardings
    assert beside.shard_shape((NUM_LAYERS, 4, *SHAPE[1:]))[3] == SHAPE[2] // int(size)  # no device gets others' heads
    one, two, three = world.blocks(23), world.blocks(5), world.blocks(4)
    world.run(swap_outs=[Swap(1, one), Swap(2, two), Swap(3, three)], copies=[Copy(0, 1), Copy(1, 2)])
    world.step(one[:4])
    world.run(swap_ins=[Swap(2, two[::-1])])  # not settled
    world.moves.settle()
    world.step(two)
    world.moves.settle()
    world.run(swap_ins=[Swap(1, one[::-1])], released_copies=[3])
    world.check()
    assert all(pool.sharding == device.place for pool in world.pools)
    device.compiled.close()


@pytest.fixture(scope="module")
def split():
    """On two devices."""
    device = Device("tensor=2")
    yield device
    device.compiled.close()


def staged_blocks():
    """How many blocks' contents, padding included, have memory on the two devices. (What the host has of one device's
    part is on a CPU the same memory: no array of both.)"""
    arrays = [x for x in jax.live_arrays() if x.ndim == 6 and x.shape[2:] == SHAPE[1:] and len(x.devices()) == 2]
    buffers = {shard.data.unsafe_buffer_pointer(): x.shape[1] for x in arrays for shard in x.addressable_shards}
    return sum(buffers.values()) // 2


def test_the_devices_memory_is_let_go(split):
    world = Shadowed(split)
    world.run(swap_outs=[Swap(1, world.blocks(20)), Swap(2, world.blocks(4))])
    assert staged_blocks() == 24
    world.moves.settle()  # the step before is over, which says nothing of this one
    world.run(swap_outs=[Swap(3, world.blocks(3)), Swap(4, world.blocks(3))])
    assert staged_blocks() == 32
    world.run(swap_ins=[Swap(2, world.blocks(4))], released_copies=[4])
    world.check()  # and so the executables are over, which also held them
    assert staged_blocks() == 24
    world.moves.settle()
    assert staged_blocks() == 4
    world.moves.settle()
    assert staged_blocks() == 0
    blocks = world.blocks(23)
    world.run(swap_ins=[Swap(1, blocks[:20]), Swap(3, blocks[20:])])
    world.check()
    world.run(swap_outs=[Swap(5, [0, 1])])
    world.moves.clear()
    assert staged_blocks() == 0


def test_what_is_staged_is_bounded(split, monkeypatch):
    """However many blocks move at once, and also where a single call moves more."""
    world, waits = Shadowed(split), []
    monkeypatch.setattr(block_moves, "MAX_STAGED_BYTES", 8 * host_bytes(world.pools) // 2)
    world.run(swap_outs=[Swap(1, world.blocks(36))])  # 16, 16 and 4
    assert staged_blocks() == 4
    world.moves.settle()
    world.run(swap_outs=[Swap(2, world.blocks(12))])  # 4, 4 and 4
    assert staged_blocks() == 8
    world.moves.settle()  # only the last of the first swap was due
    assert staged_blocks() == 8
    world.moves.settle()
    assert staged_blocks() == 0
    ready = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda pools: waits.append(len(pools)) or ready(pools))
    blocks = world.blocks(NUM_BLOCKS)
    world.run(swap_outs=[Swap(3, blocks[:4])], swap_ins=[Swap(2, blocks[:12]), Swap(3, blocks[12:16])])
    assert len(waits) == 1
    world.moves.settle()
    world.run(swap_ins=[Swap(1, blocks[:36])])
    assert len(waits) == 3
    world.check()


def test_after_a_failed_step_nothing_is_kept(device):
    world = Shadowed(device)
    world.run(swap_outs=[Swap(1, [0, 1]), Swap(2, [2])])
    world.moves.clear()
    world.moves.settle()
    assert world.moves.num_kept == 0
    world.apply(Plan(released_copies=[1]))  # as it may have been planned before
    with pytest.raises(AssertionError, match="a swap-in without a swap-out"):
        world.apply(Plan(swap_ins=[Swap(2, [2])]))


@pytest.mark.parametrize(
    ("moves", "broken"),
    [
        (dict(copies=[Copy(0, 1), Copy(2, 1)]), "two moves into one block"),
        (dict(swap_ins=[Swap(0, [1])], copies=[Copy(2, 1)]), "two moves into one block"),
        (dict(swap_ins=[Swap(0, [1])], copies=[Copy(1, 2)]), "a copy of a block that is swapped in"),
        (dict(swap_outs=[Swap(0, [1])]), "is used again"),
        (dict(swap_ins=[Swap(1, [1])]), "without a swap-out"),
        (dict(copies=[Copy(0, NUM_BLOCKS)]), "outside of the pool"),
        (dict(copies=[Copy(-1, 0)]), "outside of the pool"),
        (dict(swap_outs=[Swap(1, [NUM_BLOCKS])]), "outside of the pool"),
    ],
)
def test_plans_that_break_the_rules_are_refused(device, moves, broken):
    world = Shadowed(device)
    world.run(swap_outs=[Swap(0, [3])])
    with pytest.raises(AssertionError, match=broken):
        world.apply(Plan(**moves))
    world.check()  # nothing was donated


def test_more_copies_than_one_executable_makes_are_several(device):
    world = Shadowed(device)
    world.run(copies=[Copy(20, target) for target in range(19)])


def test_an_executable_that_is_not_compiled_yet_is_awaited(device, monkeypatch):
    asked = threading.Event()
    lower = jobs(device.pools, MAX_SEQS)["copy", 4]

    def lower_when_asked():
        assert asked.wait(60)
        return lower()

    plan = CompilePlan({("copy", 4): lower_when_asked})
    wait = plan.wait
    monkeypatch.setattr(plan, "wait", lambda names: (asked.set(), wait(names)))
    world = Shadowed(device)
    world.moves = BlockMoves(executables_of(plan))
    world.run(copies=[Copy(0, 1)])
    world.check()
    plan.close()


def test_the_bandwidth_is_measured_without_a_trace(device):
    world = Shadowed(device)
    world.pools, bytes_per_s = measure_bandwidth(world.pools, device.executable, np.arange(16, dtype=np.int32))
    assert 0 < bytes_per_s < float("inf")
    assert host_bytes(world.pools) == host_bytes(device.pools) == POOL_BYTES // NUM_BLOCKS
    world.check()


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"), [(1, (4,)), (4, (4,)), (5, (4, 5)), (64, (4, 16, 64)), (100, (4, 16, 64, 100))]
)
def test_one_call_can_copy_for_all_sequences(max_num_seqs, sizes):
    assert copy_sizes(max_num_seqs) == sizes


def test_pools_are_moved_in_place(device):
    """Donated and aliased, with memory for the blocks of one layer at a time; reading leaves the pools alone."""
    block = POOL_BYTES // NUM_BLOCKS // NUM_LAYERS
    for name in jobs(device.pools, MAX_SEQS):
        analysis = device.compiled[name].memory_analysis()
        kind, n = name
        assert analysis.alias_size_in_bytes == (0 if kind == "swap_out" else POOL_BYTES), name
        assert analysis.temp_size_in_bytes <= 2 * NUM_LAYERS * n * block + 4096, name


def test_pools_of_two_shapes_move_together():
    rng = np.random.default_rng(0)
    pools = [rng.integers(0, 99, shape) for shape in ((6, 2, 3), (6, 4), (6, 2, 3))]
    pools = [jnp.asarray(pool, dtype) for pool, dtype in zip(pools, ("float32", "int32", "float32"), strict=True)]
    ids, targets = jnp.asarray([4, 1], jnp.int32), jnp.asarray([0, 5], jnp.int32)
    contents = read_blocks(pools, ids)
    assert [x.shape for x in contents] == [(2, 2, 2, 3), (1, 2, 4)]
    for before, after in zip(pools, write_blocks(pools, targets, contents), strict=True):
        np.testing.assert_array_equal(after[targets], before[ids])
        np.testing.assert_array_equal(after[1:5], before[1:5])


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_moves_lower(platform):
    pools = [jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)] * NUM_LAYERS
    contents = jax.ShapeDtypeStruct((NUM_LAYERS, 4, *SHAPE[1:]), jnp.bfloat16)
    ids = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)

    def lower(fn, *args, **options):
        return jax.jit(fn, **options).trace(*args).lower(lowering_platforms=(platform,)).as_text()

    assert "tf.aliasing_output" not in lower(read_blocks, pools, ids((4,)))
    text = lower(write_blocks, pools, ids((4,)), [contents], donate_argnums=0)
    assert text.count("tf.aliasing_output") == NUM_LAYERS
    text = lower(copy_blocks, pools, ids((2, 4)), donate_argnums=0)
    assert text.count("tf.aliasing_output") == text.count("stablehlo.optimization_barrier") == NUM_LAYERS
