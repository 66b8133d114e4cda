"""Weights in host memory move to huge pages and stay what they are."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.pallas_kernels.native import huge_pages

SIZE = 8 << 20  # float32


def huge_bytes(address):
    """Of the mapping that has the address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and (found := re.match(r"AnonHugePages: +(\d+) kB", line)):
            return int(found[1]) << 10
    return 0


@pytest.mark.skipif(not huge_pages.wanted(), reason="this system gives nobody huge pages")
def test_arrays_move():
    host = np.arange(SIZE, dtype=np.float32)
    sharded = jax.device_put(host, NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P("x")))
    arrays = [jnp.asarray(host) + 1, sharded, jnp.zeros(3), jnp.zeros(SIZE)]
    arrays[-1].delete()
    thread = huge_pages.collapse_soon(arrays)
    thread.join()
    middle = arrays[0].unsafe_buffer_pointer() + 2 * SIZE
    if not huge_bytes(middle):
        pytest.skip("the kernel has no MADV_COLLAPSE (Linux 6.1), or no free huge page")
    np.testing.assert_array_equal(arrays[0], host + 1)
    np.testing.assert_array_equal(sharded, host)


def test_nothing_happens_where_they_are_not_wanted(monkeypatch, tmp_path):
    monkeypatch.setattr(huge_pages, "ENABLED", tmp_path / "missing")
    assert huge_pages.collapse_soon([jnp.zeros(SIZE)]) is None
    (tmp_path / "missing").write_text("always madvise [never]\n")
    assert not huge_pages.wanted() and huge_pages.collapse_soon([jnp.zeros(SIZE)]) is None
    (tmp_path / "missing").write_text("always [madvise] never\n")
    assert huge_pages.wanted() and huge_pages.collapse_soon([]) is None


def test_an_arena_gives_aligned_memory_that_nobody_else_has(monkeypatch):
    monkeypatch.setattr(huge_pages.Arena, "CHUNK", 1 << 20)
    arena, parts = huge_pages.Arena(), []
    for num_bytes in (1, 100, 1 << 19, 1 << 19, 3 << 20, 0, 64):
        part = arena.empty(num_bytes)
        assert part.nbytes == num_bytes and part.ctypes.data % huge_pages.ALIGNMENT == 0
        part[:] = len(parts)
        parts.append(part)
    del arena
    for i, part in enumerate(parts):
        assert (part == i).all()


@pytest.mark.skipif(not huge_pages.wanted(), reason="this system gives nobody huge pages")
def test_an_arena_lies_in_huge_pages():
    part = huge_pages.Arena().empty(32 << 20)
    part[:] = 1
    if not huge_bytes(part.ctypes.data + len(part) // 2):
        pytest.skip("no huge page is free")
