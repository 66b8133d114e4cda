"""What the devices of this process have, what of it is in use, and what its engines have claimed and not taken yet.

Loading takes minutes, and a CPU's pool takes memory only as it is written: a second engine of the process would find
free what the first one still needs. So each claims what it takes before it does.
"""

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxllm.engine.config import GPU_MEMORY_UTILIZATION, MEM_FRACTION_VARIABLES
from jaxllm.engine.host_memory import free_bytes, machine_bytes, swap_free_bytes
from jaxllm.sharding.mesh import platform_of

ALLOCATOR_SHARE = 0.98  # of what the runtime may allocate; the rest is fragmentation
JAX_GPU_FRACTION = 0.75  # of a GPU's memory that JAX may allocate unless the environment says otherwise


class DeviceMemory(NamedTuple):
    """Bytes of one device. The sizes of an engine follow from these alone, so that the members of a group, which must
    have the same ones, exchange what each has measured and go by the `least`."""

    total: int  # that it has
    limit: int  # of those, that the runtime may allocate
    in_use: int  # of those, that are allocated
    claimed: int = 0  # likewise, that other engines of the process will allocate
    is_host: bool = False  # whether it is a part of the machine's memory, which others use too
    swap: int = 0  # of the host, beyond its memory

    @property
    def free(self) -> int:
        return max(0, self.limit - self.in_use - self.claimed)

    def usable(self, share: float | None) -> int:
        """What the process may use: `share` of all (None: the default's), and no more than the runtime may."""
        return min(int(self.total * (share or GPU_MEMORY_UTILIZATION)), int(self.limit * ALLOCATOR_SHARE))


def least(found: Sequence[DeviceMemory]) -> DeviceMemory:
    """What every one of these has: the same on all who know the same, in any order."""
    total, limit, in_use, claimed, _, swap = zip(*found, strict=True)
    return DeviceMemory(min(total), min(limit), max(in_use), max(claimed), found[0].is_host, min(swap))


def measure(mesh: Mesh, *, processes_here: int = 1) -> DeviceMemory | None:
    """Of the fullest of this process's devices on the mesh; None if the runtime does not tell. CPU devices have equal
    parts of the machine's memory, with those of other members of the group: `processes_here` are on this machine."""
    devices = mesh.local_devices
    return _host_part(len(devices), processes_here) if platform_of(mesh) == "cpu" else fullest(devices)


def _host_part(num_devices: int, processes_here: int) -> DeviceMemory:
    total, free = (num_bytes // (num_devices * processes_here) for num_bytes in (machine_bytes(), free_bytes()))
    claimed = sum(claim.outstanding * len(claim.devices) for claim in _claims() if claim.is_host) // num_devices
    swap = swap_free_bytes() // (num_devices * processes_here)
    return DeviceMemory(total, total, total - free, claimed, is_host=True, swap=swap)


def fullest(devices: Sequence[Any]) -> DeviceMemory | None:
    """Of the accelerator on which least is free; None if the runtime does not tell."""
    found, claims = [], _claims()
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        limit = stats["bytes_limit"]
        total = int(limit / _allocator_fraction()) if device.platform == "gpu" else limit
        claimed = sum(claim.outstanding for claim in claims if device in claim.devices)
        found.append(DeviceMemory(total, limit, stats.get("bytes_in_use", 0), claimed))
    return min(found, key=lambda memory: memory.limit - memory.in_use - memory.claimed)


def _allocator_fraction() -> float:
    """The share of a GPU's memory that JAX may allocate."""
    given = [os.environ[name] for name in MEM_FRACTION_VARIABLES if os.environ.get(name)]
    return float(given[0]) if given else JAX_GPU_FRACTION


class Claim:
    """What an engine takes of each of its devices, in bytes, from before it does until it is closed or gone."""

    def __init__(self, mesh: Mesh, params: int, state: int):
        self.devices, self.is_host = frozenset(mesh.local_devices), platform_of(mesh) == "cpu"
        self.params, self.state = params, state
        self._taker: Any = None
        with _LOCK:
            _CLAIMS.add(self)

    def follow(self, executor: Any) -> None:
        """What the executor holds, its `leaves` and `state`, is in use and claimed no longer."""
        self._taker = weakref.ref(executor)

    def release(self) -> None:
        with _LOCK:
            _CLAIMS.discard(self)

    @property
    def outstanding(self) -> int:
        """Bytes of a device that are claimed and not in use."""
        taker = self._taker and self._taker()
        params = self.params * (taker is None or not taker.leaves)
        # A CPU takes a pool's memory as it is first written, which may be never, and does not say how much it has.
        return params + self.state * (self.is_host or taker is None or taker.state is None)


@contextmanager
def sizing() -> Iterator[None]:
    """Between measuring and claiming no other engine of the process does either."""
    with _LOCK:
        yield


def _claims() -> list[Claim]:
    with _LOCK:
        return list(_CLAIMS)


_LOCK = threading.RLock()
_CLAIMS: weakref.WeakSet[Claim] = weakref.WeakSet()  # of the process, which its devices' memory is
