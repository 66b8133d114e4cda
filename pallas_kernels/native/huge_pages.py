"""Huge pages for weights in host memory: with pages of 4 KiB, looking up where they are costs a step that is bound by
memory several percent, more in a virtual machine. Linux; anywhere else, and where an administrator says never, nothing.
"""

import ctypes
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import jax

PAGE = 2 << 20  # bytes; of x86-64, and of Arm with base pages of 4 KiB
LEAST = 1 << 20  # bytes from which an array is worth moving
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # of <asm-generic/mman-common.h>; the second since Linux 6.1


def wanted() -> bool:
    """Whether the system gives huge pages to processes that ask for them."""
    try:
        return any(f"[{mode}]" in ENABLED.read_text() for mode in ("always", "madvise"))
    except OSError:  # not Linux, or a kernel without them
        return False


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
                madvise(page, PAGE, MADV_HUGEPAGE)  # on memory that is gone by now, they do nothing
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
