"""Moves of whole blocks before a step: to host memory, back from it, and from block to block (copy-on-write).

Of a pool's layout only this is known: axis 0 is the block. Padding ids lie past the pool, no two alike: a scatter drops
them, a gather clips them.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from jaxllm.engine.device.compile_plan import CompilePlan
from jaxllm.engine.device.packing import pick_bucket
from jaxllm.engine.schedule.block_table import Copy
from jaxllm.engine.schedule.plan import Plan, Swap
from jaxllm.pallas_kernels.copy_blocks import api as block_ops
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from jaxllm.sharding.rules import replicated

SWAP_SIZES = (4, 16)  # blocks that one `swap_out` or `swap_in` moves; more take several
MAX_STAGED_BYTES = 256 << 20  # of each device's memory, for blocks on their way, each way
NUM_TRIALS = 5  # of the bandwidth

KVPools = list[Shaped[Array, "blocks ..."]]
Lowered = jax.stages.Lowered


def copy_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """How many blocks one `copy` may move: powers of 4, up to one block for each sequence, because a plan's copies run
    as one."""
    sizes = [4]
    while sizes[-1] < max_num_seqs:
        sizes.append(min(4 * sizes[-1], max_num_seqs))
    return tuple(sizes)


def copy_blocks(kv_pools: KVPools, packed: Int[Array, "2 n"], placement: Placement = UNPLACED) -> KVPools:
    """Copies the blocks `packed[0]`, as they are before the call, to `packed[1]`, which names no block twice.
    `placement` says where the pools are."""
    copied = []
    for pool in kv_pools:
        pool = block_ops.copy_blocks(pool, packed, placement=placement)
        # One layer after the other: else the compiler gathers all first, and needs memory for all.
        pool, packed = jax.lax.optimization_barrier((pool, packed))
        copied.append(pool)
    return copied


def read_blocks(kv_pools: KVPools, ids: Int[Array, " n"]) -> Shaped[Array, "layers n ..."]:
    """The blocks' contents, in memory of their own: the next executable may overwrite the blocks."""
    return jnp.stack([pool.at[ids].get(mode="clip") for pool in kv_pools])


def write_blocks(kv_pools: KVPools, ids: Int[Array, " n"], contents: Shaped[Array, "layers n ..."]) -> KVPools:
    """The pools with `contents` in the blocks `ids`, of which none is there twice."""
    layers = enumerate(kv_pools)
    return [pool.at[ids].set(contents[i], mode="drop", unique_indices=True) for i, pool in layers]


def jobs(kv_pools: Sequence[jax.ShapeDtypeStruct], max_num_seqs: int) -> dict[Hashable, Callable[[], Lowered]]:
    """The executables for pools with these shapes and shardings: ("copy", n), ("swap_out", n) and ("swap_in", n)."""
    pools, places = list(kv_pools), [pool.sharding for pool in kv_pools]
    mesh, spec = places[0].mesh, places[0].spec
    assert isinstance(mesh, Mesh)  # not an abstract one
    beside = NamedSharding(mesh, PartitionSpec(None, *spec))  # a block's contents stay on the devices of its heads

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=replicated(mesh))

    def lower_copy(n: int) -> Lowered:
        copy = partial(copy_blocks, placement=Placement(mesh))
        return jax.jit(copy, donate_argnums=0, out_shardings=places).lower(pools, ints(2, n))

    def lower_out(n: int) -> Lowered:
        return jax.jit(read_blocks, out_shardings=beside).lower(pools, ints(n))

    def lower_in(n: int) -> Lowered:
        shape = (len(pools), n, *pools[0].shape[1:])
        contents = jax.ShapeDtypeStruct(shape, pools[0].dtype, sharding=beside)
        return jax.jit(write_blocks, donate_argnums=0, out_shardings=places).lower(pools, ints(n), contents)

    swaps = {"swap_out": lower_out, "swap_in": lower_in}
    return {("copy", n): partial(lower_copy, n) for n in copy_sizes(max_num_seqs)} | {
        (name, n): partial(lower, n) for name, lower in swaps.items() for n in SWAP_SIZES
    }


def host_bytes(kv_pools: Sequence[Array | jax.ShapeDtypeStruct]) -> int:
    """Bytes that one block takes in host memory, keys and values of all layers."""
    return sum(pool.size // pool.shape[0] * pool.dtype.itemsize for pool in kv_pools)


class _SwapChunk:
    """Contents `[layers, n, ...]` of some blocks: on the device at first, on the host once settled, then given up."""

    def __init__(self, contents: Array):
        self.contents: Array | np.ndarray | None = contents
        self.device_bytes = math.prod(contents.sharding.shard_shape(contents.shape)) * contents.dtype.itemsize

    def settle(self) -> None:
        """Waits for the copy and lets go of the device's memory. (On a CPU they are the same memory.)"""
        if self.contents is not None:
            self.contents = np.asarray(self.contents)


class BlockMoves:
    """Carries out the block moves of plans, and keeps swapped-out blocks in host memory."""

    def __init__(self, compile_plan: CompilePlan, num_blocks: int, max_num_seqs: int):
        self.num_blocks = num_blocks
        self._compile_plan, self._copy_sizes = compile_plan, copy_sizes(max_num_seqs)
        self.clear()

    @property
    def num_kept(self) -> int:
        """How many keys have a copy on the host, or on its way there."""
        return len(self._kept)

    def clear(self) -> None:
        """Forgets every copy."""
        self._kept: dict[int, list[_SwapChunk]] = {}
        self._staged: deque[_SwapChunk] = deque()  # not settled yet, in the order of their swap-outs
        self._num_before = 0  # of those: from before the last `settle`

    def run(self, kv_pools: KVPools, plan: Plan) -> KVPools:
        """Moves what `plan` wants moved before its step; takes the pools, and returns them. Awaits nothing but an
        executable that is not compiled yet, and room for more than `MAX_STAGED_BYTES`."""
        self._check(plan)
        for swap in plan.swap_outs:
            self._swap_out(kv_pools, swap)
        kv_pools = self._swap_in(kv_pools, plan.swap_ins)
        if plan.copies:
            kv_pools = self._copy(kv_pools, plan.copies)
        for key in plan.released_copies:
            self._give_up(self._kept.pop(key, []))  # there is none after a `clear`
        return kv_pools

    def settle(self) -> None:
        """Moves to the host what was swapped out before the previous call. Called once a step, after it is collected:
        each transfer has had a whole step's time, so the wait is short."""
        for _ in range(self._num_before):
            self._staged.popleft().settle()
        self._num_before = len(self._staged)

    def is_ready(self) -> bool:
        """Whether what `measure_bandwidth` runs is compiled."""
        return all(self._compile_plan.ready((name, SWAP_SIZES[-1])) for name in ("swap_out", "swap_in"))

    def measure_bandwidth(self, kv_pools: KVPools) -> tuple[KVPools, float]:
        """Bytes a second of a round trip to host memory and back, on an idle device. Takes the pools, and returns
        them as they were: blocks go back to where they came from."""
        size = SWAP_SIZES[-1]
        read, write = self._executable("swap_out", size), self._executable("swap_in", size)
        ids = self._pad(range(min(size, self.num_blocks)), size)
        trials = []
        for _ in range(NUM_TRIALS):
            jax.block_until_ready(kv_pools)
            start = time.perf_counter()
            contents = read(kv_pools, ids)
            contents.copy_to_host_async()
            kv_pools = jax.block_until_ready(write(kv_pools, ids, np.asarray(contents)))
            trials.append(time.perf_counter() - start)
        return kv_pools, contents.nbytes / median(trials)

    def _swap_out(self, kv_pools: KVPools, swap: Swap) -> None:
        chunks = self._kept[swap.key] = []
        for size, blocks in _split(swap.blocks):
            chunk = _SwapChunk(self._executable("swap_out", size)(kv_pools, self._pad(blocks, size)))
            chunk.contents.copy_to_host_async()
            chunks.append(chunk)
            self._staged.append(chunk)
            while len(self._staged) > 1 and sum(c.device_bytes for c in self._staged) > MAX_STAGED_BYTES:
                self._staged.popleft().settle()
                self._num_before = max(0, self._num_before - 1)

    def _swap_in(self, kv_pools: KVPools, swaps: Sequence[Swap]) -> KVPools:
        """Writes the chunks from where they are: from the device, if they have not reached the host yet."""
        staged_bytes = 0
        for swap in swaps:
            chunks = self._kept.pop(swap.key)
            for chunk, (size, blocks) in zip(chunks, _split(swap.blocks), strict=True):
                if staged_bytes and staged_bytes + chunk.device_bytes > MAX_STAGED_BYTES:
                    jax.block_until_ready(kv_pools)  # then nobody needs the chunks before this one
                    staged_bytes = 0
                staged_bytes += chunk.device_bytes
                kv_pools = self._executable("swap_in", size)(kv_pools, self._pad(blocks, size), chunk.contents)
            self._give_up(chunks)
        return kv_pools

    def _copy(self, kv_pools: KVPools, copies: Sequence[Copy]) -> KVPools:
        """All at once: each reads what its source holds before any is written."""
        size = pick_bucket(self._copy_sizes, len(copies))
        sources, targets = zip(*copies, strict=True)
        packed = np.stack([self._pad(sources, size), self._pad(targets, size)])
        return self._executable("copy", size)(kv_pools, packed)

    def _give_up(self, chunks: Sequence[_SwapChunk]) -> None:
        for chunk in chunks:
            chunk.contents, chunk.device_bytes = None, 0

    def _executable(self, name: str, size: int) -> Callable:
        self._compile_plan.wait([(name, size)])
        return self._compile_plan[name, size]

    def _pad(self, blocks: Sequence[int], size: int) -> np.ndarray:
        """int32 [size]: the blocks, then padding; also where a block lies past the pool."""
        ids = self.num_blocks + np.arange(size, dtype=np.int32)
        for i, block in enumerate(blocks):
            if block < self.num_blocks:
                ids[i] = block
        return ids

    def _check(self, plan: Plan) -> None:
        """Asserts what every plan promises. A swap-in's block past the pool is one that nobody wants back."""
        returned = [block for swap in plan.swap_ins for block in swap.blocks if block < self.num_blocks]
        written = returned + [copy.target for copy in plan.copies]
        read = [block for swap in plan.swap_outs for block in swap.blocks] + [copy.source for copy in plan.copies]
        assert len(set(written)) == len(written), "two moves into one block"
        assert all(0 <= block < self.num_blocks for block in written + read), "a block outside of the pool"
        assert not {copy.source for copy in plan.copies} & set(returned), "a copy of a block that is swapped in"
        new = {swap.key for swap in plan.swap_outs}
        assert new.isdisjoint(self._kept), "a key of a swap-out is used again"
        assert {swap.key for swap in plan.swap_ins} <= new | self._kept.keys(), "a swap-in without a swap-out"


def _split(blocks: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Sizes of executables, and the blocks that each moves: the same for a number of blocks in both directions."""
    small, large = SWAP_SIZES
    at = 0
    while at < len(blocks):
        size = large if len(blocks) - at > large - small else small
        yield size, blocks[at : at + size]
        at += size
