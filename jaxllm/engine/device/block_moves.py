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

from jaxllm.engine.device.commands import Command
from jaxllm.engine.device.packing import pick_bucket
from jaxllm.engine.schedule.plan import Plan
from jaxllm.pallas_kernels.copy_blocks import api as block_ops
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from jaxllm.sharding.rules import replicated

SWAP_SIZES = (4, 16)  # blocks that one `swap_out` or `swap_in` moves; more take several
MAX_STAGED_BYTES = 256 << 20  # of each device's memory, for blocks on their way, each way
NUM_TRIALS = 5  # of the bandwidth

KVPools = list[Shaped[Array, "blocks ..."]]
Contents = list[Shaped[Array, "_ n ..."]]  # of `n` blocks, the pools of one shape and dtype together
Lowered = jax.stages.Lowered


def copy_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """How many blocks one `copy` may move: powers of 4, up to one for each sequence; more take several."""
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


def read_blocks(kv_pools: KVPools, ids: Int[Array, " n"]) -> Contents:
    """The blocks' contents, in memory of their own: the next executable may overwrite the blocks."""
    return [jnp.stack([kv_pools[i].at[ids].get(mode="clip") for i in alike]) for alike in _alike(kv_pools)]


def write_blocks(kv_pools: KVPools, ids: Int[Array, " n"], contents: Contents) -> KVPools:
    """The pools with `contents` in the blocks `ids`, of which none is there twice."""
    written = list(kv_pools)
    for alike, stacked in zip(_alike(kv_pools), contents, strict=True):
        for at, i in enumerate(alike):
            written[i] = kv_pools[i].at[ids].set(stacked[at], mode="drop", unique_indices=True)
    return written


def _alike(kv_pools: Sequence[Array | jax.ShapeDtypeStruct]) -> list[list[int]]:
    """The pools' indices, those of one shape and dtype together."""
    found: dict[Hashable, list[int]] = {}
    for i, pool in enumerate(kv_pools):
        found.setdefault((pool.shape, pool.dtype), []).append(i)
    return list(found.values())


def jobs(kv_pools: Sequence[jax.ShapeDtypeStruct], max_num_seqs: int) -> dict[Hashable, Callable[[], Lowered]]:
    """The executables for pools with these shapes and shardings: ("copy", n), ("swap_out", n) and ("swap_in", n)."""
    pools, places = list(kv_pools), [pool.sharding for pool in kv_pools]
    mesh = places[0].mesh
    assert isinstance(mesh, Mesh)  # not an abstract one

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=replicated(mesh))

    def contents(n: int) -> list[jax.ShapeDtypeStruct]:
        stacked = []
        for alike in _alike(pools):
            pool = pools[alike[0]]
            beside = NamedSharding(mesh, PartitionSpec(None, *pool.sharding.spec))  # on the devices of its heads
            shape = (len(alike), n, *pool.shape[1:])
            stacked.append(jax.ShapeDtypeStruct(shape, pool.dtype, sharding=beside))
        return stacked

    def lower_copy(n: int) -> Lowered:
        copy = partial(copy_blocks, placement=Placement(mesh))
        return jax.jit(copy, donate_argnums=0, out_shardings=places).lower(pools, ints(2, n))

    def lower_out(n: int) -> Lowered:
        beside = [stacked.sharding for stacked in contents(n)]
        return jax.jit(read_blocks, out_shardings=beside).lower(pools, ints(n))

    def lower_in(n: int) -> Lowered:
        return jax.jit(write_blocks, donate_argnums=0, out_shardings=places).lower(pools, ints(n), contents(n))

    swaps = {"swap_out": lower_out, "swap_in": lower_in}
    return {("copy", n): partial(lower_copy, n) for n in copy_sizes(max_num_seqs)} | {
        (name, n): partial(lower, n) for name, lower in swaps.items() for n in SWAP_SIZES
    }


def host_bytes(kv_pools: Sequence[Array | jax.ShapeDtypeStruct]) -> int:
    """Bytes that one block takes in host memory, keys and values of all layers."""
    return sum(pool.size // pool.shape[0] * pool.dtype.itemsize for pool in kv_pools)


def encode_moves(plan: Plan, num_pages: int, max_num_seqs: int) -> list[Command]:
    """What moves before the step of `plan`, in the order of the contract: swap-outs, swap-ins, copies. The arrays are
    ids of blocks, int32 `[n]` or, of a copy, `[2, n]`, for the executables of `n` blocks."""
    if not plan.has_moves:
        return []
    _check(plan, num_pages)
    commands = [
        Command(name, tuple(_pad(blocks, size, num_pages) for size, blocks in _split(swap.pages)), swap.key)
        for name, swaps in (("swap_out", plan.swap_outs), ("swap_in", plan.swap_ins))
        for swap in swaps
    ]
    sizes = copy_sizes(max_num_seqs)
    for at in range(0, len(plan.copies), sizes[-1]):  # in the plan's order: what was planned first is read first
        copies = plan.copies[at : at + sizes[-1]]
        size = pick_bucket(sizes, len(copies))
        packed = np.stack([_pad(pages, size, num_pages) for pages in zip(*copies, strict=True)])
        commands.append(Command("copy", (packed,)))
    return commands + [Command("release", (), key) for key in plan.released_copies]


def encode_measurement(num_pages: int) -> Command:
    """Measures with pages as there are; the ids are int32 `[SWAP_SIZES[-1]]`."""
    return Command("measure_bandwidth", (_pad(range(min(SWAP_SIZES[-1], num_pages)), SWAP_SIZES[-1], num_pages),))


def _check(plan: Plan, num_pages: int) -> None:
    """Asserts what every plan promises. A swap-in's block past the pool is one that nobody wants back."""
    returned = [page for swap in plan.swap_ins for page in swap.pages if page < num_pages]
    written = returned + [copy.target for copy in plan.copies]
    read = [page for swap in plan.swap_outs for page in swap.pages] + [copy.source for copy in plan.copies]
    assert len(set(written)) == len(written), "two moves into one block"
    assert all(0 <= block < num_pages for block in written + read), "a block outside of the pool"
    assert not {copy.source for copy in plan.copies} & set(returned), "a copy of a block that is swapped in"


def _pad(blocks: Sequence[int], size: int, num_pages: int) -> np.ndarray:
    """int32 [size]: the blocks, then padding; also where a block lies past the pool."""
    ids = num_pages + np.arange(size, dtype=np.int32)
    for i, block in enumerate(blocks):
        if block < num_pages:
            ids[i] = block
    return ids


def _split(blocks: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Sizes of executables, and the blocks that each moves: the same for a number of blocks in both directions."""
    small, large = SWAP_SIZES
    at = 0
    while at < len(blocks):
        size = large if len(blocks) - at > large - small else small
        yield size, blocks[at : at + size]
        at += size


class _SwapChunk:
    """Contents of some blocks: on the device at first, on the host once settled."""

    def __init__(self, contents: Contents):
        self.contents: Sequence[Array | np.ndarray] = contents
        self.device_bytes = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in contents)
        for x in contents:
            x.copy_to_host_async()

    def settle(self) -> None:
        """Waits for the copy and lets go of the device's memory. (On a CPU they are the same memory.)"""
        self.contents = [np.asarray(x) for x in self.contents]

    def give_up(self) -> None:
        """Nobody wants it any more."""
        self.contents, self.device_bytes = [], 0


class BlockMoves:
    """Moves blocks, and keeps those that are swapped out in host memory. `executable` gives one by its name, once it is
    compiled."""

    def __init__(self, executable: Callable[[Hashable], Callable]):
        self._executable = executable
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
        self._returning_bytes = 0  # of each device's memory, for blocks that came back since

    def apply(self, kv_pools: KVPools, command: Command) -> KVPools:
        """Takes the pools, and returns them. Awaits nothing but an executable that is not compiled yet, and room for
        more than `MAX_STAGED_BYTES`."""
        if command.name == "swap_out":
            self._swap_out(kv_pools, command)
        elif command.name == "swap_in":
            return self._swap_in(kv_pools, command)
        elif command.name == "copy":
            (packed,) = command.arrays
            return self._executable(("copy", packed.shape[-1]))(kv_pools, packed)
        else:
            self._give_up(self._kept.pop(command.key, []))  # there is none after a `clear`
        return kv_pools

    def settle(self) -> None:
        """Moves to the host what was swapped out before the previous call. Called once a step, after it is collected:
        each transfer has had a whole step's time, so the wait is short."""
        for _ in range(self._num_before):
            self._staged.popleft().settle()
        self._num_before, self._returning_bytes = len(self._staged), 0

    def _swap_out(self, kv_pools: KVPools, command: Command) -> None:
        assert command.key not in self._kept, "a key of a swap-out is used again"
        chunks = self._kept[command.key] = []
        for ids in command.arrays:
            chunk = _SwapChunk(self._executable(("swap_out", ids.shape[-1]))(kv_pools, ids))
            chunks.append(chunk)
            self._staged.append(chunk)
            while len(self._staged) > 1 and sum(c.device_bytes for c in self._staged) > MAX_STAGED_BYTES:
                self._staged.popleft().settle()
                self._num_before = max(0, self._num_before - 1)

    def _swap_in(self, kv_pools: KVPools, command: Command) -> KVPools:
        """Writes the chunks from where they are: from the device, if they have not reached the host yet."""
        assert command.key in self._kept, "a swap-in without a swap-out"
        chunks = self._kept.pop(command.key)
        for chunk, ids in zip(chunks, command.arrays, strict=True):
            if self._returning_bytes and self._returning_bytes + chunk.device_bytes > MAX_STAGED_BYTES:
                jax.block_until_ready(kv_pools)  # then nobody needs the chunks before this one
                self._returning_bytes = 0
            self._returning_bytes += chunk.device_bytes
            kv_pools = self._executable(("swap_in", ids.shape[-1]))(kv_pools, ids, list(chunk.contents))
        self._give_up(chunks)
        return kv_pools

    def _give_up(self, chunks: Sequence[_SwapChunk]) -> None:
        for chunk in chunks:
            chunk.give_up()


def measure_bandwidth(
    kv_pools: KVPools, executable: Callable[[Hashable], Callable], ids: Int[np.ndarray, " n"]
) -> tuple[KVPools, float]:
    """Bytes a second of a round trip of the blocks `ids` to host memory and back, on an idle device. Takes the pools,
    and returns them as they were: blocks go back to where they came from."""
    read, write = executable(("swap_out", ids.shape[-1])), executable(("swap_in", ids.shape[-1]))
    trials = []
    for _ in range(NUM_TRIALS):
        jax.block_until_ready(kv_pools)
        start = time.perf_counter()
        contents = read(kv_pools, ids)
        for x in contents:
            x.copy_to_host_async()
        kv_pools = jax.block_until_ready(write(kv_pools, ids, [np.asarray(x) for x in contents]))
        trials.append(time.perf_counter() - start)
    return kv_pools, sum(x.nbytes for x in contents) / median(trials)
