"""Huge pages for weights in host memory: with pages of 4 KiB, looking up where they are costs a step that is bound by
memory several percent, more in a virtual machine, and making them is half of the time that loading takes. Linux;
anywhere else, and where an administrator says never, nothing.
"""

import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

PAGE = 2 << 20  # bytes; of x86-64, and of Arm with base pages of 4 KiB
LEAST = 1 << 20  # bytes from which an array is worth moving
ALIGNMENT = 64  # bytes; an array aligned to them JAX on the CPU uses as it is rather than a copy
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MADV_COLLAPSE = 25  # of <asm-generic/mman-common.h>, since Linux 6.1


def wanted() -> bool:
    """Whether the system gives huge pages to processes that ask for them."""
    try:
        return any(f"[{mode}]" in ENABLED.read_text() for mode in ("always", "madvise"))
    except OSError:  # not Linux, or a kernel without them
        return False


class Arena:
    """Uninitialised host memory for arrays made one after the other, in chunks that lie in huge pages. A chunk lives as
    long as one of its arrays."""

    CHUNK = 64 << 20  # bytes

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)

    def empty(self, num_bytes: int) -> np.ndarray:
        """A part of it, uint8 `[num_bytes]`, aligned to `ALIGNMENT`."""
        step = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if step > len(self._left):
            self._left = _chunk(max(step, self.CHUNK))
        taken, self._left = self._left[:num_bytes], self._left[step:]
        return taken

    def array(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Likewise, an array."""
        return self.empty(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def _chunk(num_bytes: int) -> np.ndarray:
    memory = mmap.mmap(-1, num_bytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones have none
    if wanted():
        memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = np.frombuffer(memory, np.uint8)
    start = -chunk.ctypes.data % PAGE
    return chunk[start : start + num_bytes]


def collapse_soon(arrays: Sequence[jax.Array]) -> threading.Thread | None:
    """Moves the CPU's arrays to huge pages where they lie, in a thread of its own: a gigabyte takes about a second.
    Other devices' arrays stay as they are. What the kernel can't move stays in small pages."""
    # Holds no reference to the arrays.
    refs = [weakref.ref(x) for x in arrays if all(device.platform == "cpu" for device in x.sharding.device_set)]
    if not refs or not wanted():
        return None
    thread = threading.Thread(target=_collapse, args=(refs,), name="huge-pages", daemon=True)
    thread.start()
    return thread


def _collapse(refs: list[weakref.ref]) -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for ref in refs:
        for start, size in _ranges(ref()):
            for page in range(start // PAGE * PAGE, start + size, PAGE):  # neighbours in a page move too
                madvise(page, PAGE, mmap.MADV_HUGEPAGE)  # on memory that is gone by now, they do nothing
                madvise(page, PAGE, MADV_COLLAPSE)


def _ranges(array: jax.Array | None) -> list[tuple[int, int]]:
    """Address and bytes of each large part; none of an array that has been deleted or donated meanwhile."""
    if array is None:
        return []
    try:
        parts = [(shard.data.unsafe_buffer_pointer(), shard.data.nbytes) for shard in array.addressable_shards]
    except RuntimeError:
        return []
    return [part for part in parts if part[1] >= LEAST]
