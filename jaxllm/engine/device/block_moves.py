"""Moves of whole blocks before a step: to host memory, back from it, and from block to block (copy-on-write).

Of a pool's layout only this is known: axis 0 is the block. Padding ids lie past the pool, no two alike: a scatter drops
them, a gather clips them.
"""

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
from jaxllm.engine.device.swap_chunk import SwapChunk
from jaxllm.engine.schedule.plan import Plan, StepPlan
from jaxllm.pallas_kernels.copy_blocks import api as block_ops
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from jaxllm.sharding.rules import num_shards, over_shards, shard_mesh, sharding

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
    """The executables for pools with these shapes and shardings: ("copy", n), ("swap_out", n) and ("swap_in", n), of n
    blocks in each shard."""
    pools, places = list(kv_pools), [pool.sharding for pool in kv_pools]
    mesh = places[0].mesh
    assert isinstance(mesh, Mesh)  # not an abstract one
    shards = num_shards("shards", mesh)

    def ints(size: int, *shape: int) -> jax.ShapeDtypeStruct:
        place = sharding(("shards", *(None for _ in shape)), mesh)
        return jax.ShapeDtypeStruct((shards * size, *shape), jnp.int32, sharding=place)

    def contents(n: int) -> list[jax.ShapeDtypeStruct]:
        stacked = []
        for alike in _alike(pools):
            pool = pools[alike[0]]
            of_shards, *of_heads = pool.sharding.spec
            beside = NamedSharding(mesh, PartitionSpec(of_shards, None, *of_heads))  # on the devices of its heads
            shape = (shards * len(alike), n, *pool.shape[1:])
            stacked.append(jax.ShapeDtypeStruct(shape, pool.dtype, sharding=beside))
        return stacked

    def lower_copy(n: int) -> Lowered:
        copy = over_shards(partial(copy_blocks, placement=Placement(shard_mesh(mesh))), mesh)
        return jax.jit(copy, donate_argnums=0, out_shardings=places).lower(pools, ints(2, n))

    def lower_out(n: int) -> Lowered:
        beside = [stacked.sharding for stacked in contents(n)]
        return jax.jit(over_shards(read_blocks, mesh), out_shardings=beside).lower(pools, ints(n))

    def lower_in(n: int) -> Lowered:
        write = over_shards(write_blocks, mesh)
        return jax.jit(write, donate_argnums=0, out_shardings=places).lower(pools, ints(n), contents(n))

    swaps = {"swap_out": lower_out, "swap_in": lower_in}
    found: dict[Hashable, Callable[[], Lowered]] = {
        ("copy", n): partial(lower_copy, n) for n in copy_sizes(max_num_seqs)
    }
    return found | {(name, n): partial(lower, n) for name, lower in swaps.items() for n in SWAP_SIZES}


def host_bytes(kv_pools: Sequence[Array | jax.ShapeDtypeStruct]) -> int:
    """Bytes that one block takes in host memory, keys and values of all layers."""
    return sum(pool.size // pool.shape[0] * pool.dtype.itemsize for pool in kv_pools)


def encode_moves(plan: StepPlan, num_pages: int, max_num_seqs: int) -> list[Command]:
    """What moves before the step of `plan`, in the order of the contract: swap-outs, swap-ins, copies. The arrays are
    ids of blocks, of one shard after the other int32 `[n]` or, of a copy, `[2, n]`, for the executables of `n` blocks.
    A swap has blocks of one shard, which padding tells from the others."""
    shards = plan.shards
    if not any(of_shard.has_moves for of_shard in shards):
        return []
    for of_shard in shards:
        _check(of_shard, num_pages)

    def ids(shard: int, blocks: Sequence[int], size: int) -> np.ndarray:
        return np.concatenate([_pad(blocks if i == shard else (), size, num_pages) for i in range(len(shards))])

    commands = [
        Command(name, tuple(ids(shard, blocks, size) for size, blocks in _split(swap.pages)), swap.key)
        for name in ("swap_out", "swap_in")
        for shard, of_shard in enumerate(shards)
        for swap in (of_shard.swap_outs if name == "swap_out" else of_shard.swap_ins)
    ]
    sizes = copy_sizes(max_num_seqs)
    most = max(len(of_shard.copies) for of_shard in shards)
    for at in range(0, most, sizes[-1]):  # in the plan's order: what was planned first is read first
        copies = [of_shard.copies[at : at + sizes[-1]] for of_shard in shards]
        size = pick_bucket(sizes, max(map(len, copies)))
        pages = [list(zip(*of_shard, strict=True)) or [(), ()] for of_shard in copies]
        packed = np.stack([_pad(each, size, num_pages) for of_shard in pages for each in of_shard])
        commands.append(Command("copy", (packed,)))
    return commands + [Command("release", (), key) for of_shard in shards for key in of_shard.released_copies]


def encode_measurement(num_pages: int, num_shards: int = 1) -> Command:
    """Measures with pages as there are; the ids are int32 `[SWAP_SIZES[-1]]` of each shard."""
    ids = _pad(range(min(SWAP_SIZES[-1], num_pages)), SWAP_SIZES[-1], num_pages)
    return Command("measure_bandwidth", (np.tile(ids, num_shards),))


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


class BlockMoves:
    """Moves blocks in the pools of `num_shards` shards, and keeps those that are swapped out in host memory.
    `executable` gives one by its name, once it is compiled."""

    def __init__(self, executable: Callable[[Hashable], Callable], num_shards: int = 1):
        self._executable, self._num_shards = executable, num_shards
        self.clear()

    @property
    def num_kept(self) -> int:
        """How many keys have a copy on the host, or on its way there."""
        return len(self._kept)

    def clear(self) -> None:
        """Forgets every copy."""
        self._kept: dict[int, list[SwapChunk]] = {}
        self._staged: deque[SwapChunk] = deque()  # not settled yet, in the order of their swap-outs
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
            shard = int(ids.argmin()) // self._size(ids)  # the others have padding
            chunk = SwapChunk(self._read(kv_pools, ids), self._num_shards, shard)
            chunks.append(chunk)
            self._staged.append(chunk)
            while len(self._staged) > 1 and sum(c.device_bytes for c in self._staged) > MAX_STAGED_BYTES:
                self._staged.popleft().settle()
                self._num_before = max(0, self._num_before - 1)

    def _size(self, ids: Int[np.ndarray, " n"]) -> int:
        """Of the executable."""
        return ids.shape[-1] // self._num_shards

    def _read(self, kv_pools: KVPools, ids: Int[np.ndarray, " ids"]) -> Contents:
        return self._executable(("swap_out", self._size(ids)))(kv_pools, ids)

    def _swap_in(self, kv_pools: KVPools, command: Command) -> KVPools:
        """Writes the chunks from where they are: from the device, if they have not reached the host yet."""
        assert command.key in self._kept, "a swap-in without a swap-out"
        chunks = self._kept.pop(command.key)
        for chunk, ids in zip(chunks, command.arrays, strict=True):
            if self._returning_bytes and self._returning_bytes + chunk.device_bytes > MAX_STAGED_BYTES:
                jax.block_until_ready(kv_pools)  # then nobody needs the chunks before this one
                self._returning_bytes = 0
            self._returning_bytes += chunk.device_bytes
            contents = chunk.on_device(partial(self._read, kv_pools, ids))
            kv_pools = self._executable(("swap_in", self._size(ids)))(kv_pools, ids, contents)
        self._give_up(chunks)
        return kv_pools

    def _give_up(self, chunks: Sequence[SwapChunk]) -> None:
        for chunk in chunks:
            chunk.give_up()


def measure_bandwidth(
    kv_pools: KVPools, executable: Callable[[Hashable], Callable], ids: Int[np.ndarray, " n"], num_shards: int = 1
) -> tuple[KVPools, float]:
    """Bytes a second of a round trip of a shard's blocks to host memory and back, on an idle device: all shards move
    theirs, `ids`, at once. Takes the pools, and returns them as they were: blocks go back to where they came from."""
    read, write = (executable((name, ids.shape[-1] // num_shards)) for name in ("swap_out", "swap_in"))
    trials = []
    for _ in range(NUM_TRIALS):
        jax.block_until_ready(kv_pools)
        start = time.perf_counter()
        contents = read(kv_pools, ids)
        num_bytes = sum(x.nbytes for x in contents) // num_shards
        chunk = SwapChunk(contents, num_shards, None)
        chunk.settle()
        kv_pools = jax.block_until_ready(write(kv_pools, ids, chunk.on_device(list)))
        trials.append(time.perf_counter() - start)
    return kv_pools, num_bytes / median(trials)
