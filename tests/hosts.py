"""What each of several hosts would load, on the fake devices of one process, and what it asks of the files."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxllm.checkpoint import loader, native_read, tensors, window
from jaxllm.pallas_kernels import native

PARTITIONS = {  # of eight devices, by their places in the mesh
    "each": [[i] for i in range(8)],
    "pairs": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "halves": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "uneven": [[0, 1, 2], [3, 4, 5, 6, 7]],
    "scattered": [[0, 3], [1, 6, 7], [2, 4, 5]],
}


class Loaded(NamedTuple):
    """What one host has done."""

    arrays: dict[str, dict[jax.Device, np.ndarray]]  # by the parameter, of each of its devices
    read: Counter[str]  # bytes, by the tensor's name in the file
    held_bytes: int  # of parameters in the host's memory, one after the other


@contextmanager
def count_bytes(patch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """What is asked of files, by the tensor."""
    read: Counter[str] = Counter()
    by_numpy, by_kernel = tensors._read_into, native_read.read

    def read_into(tensor, start, part):
        read[tensor.name] += len(part)
        return by_numpy(tensor, start, part)

    def read_jobs(jobs):
        for job in jobs:
            read[job.tensor.name] += job.tensor.num_bytes
        by_kernel(jobs)

    with patch.context() as here:
        here.setattr(tensors, "_read_into", read_into)
        here.setattr(native_read, "read", read_jobs)
        yield read


def load_as(devices: Collection[jax.Device], load: Callable[[Callable], None]) -> Loaded:
    """What the host of these `devices` does, while `load` loads with what it is given as `take`."""
    arrays: dict[str, dict[jax.Device, np.ndarray]] = {}
    held, empty = [], loader._empty
    parts: dict[jax.Device, np.ndarray] = {}  # of the array that was made last

    def make(shape, sharding, part):
        indices = sharding.devices_indices_map(shape)
        parts.update({device: np.array(part(indices[device])) for device in devices})
        return nothing

    def counted(*args):
        host = empty(*args)
        held.extend(window.values.nbytes for window in host.windows)
        return host

    nothing = jnp.zeros(())

    with pytest.MonkeyPatch.context() as patch, count_bytes(patch) as read:
        patch.setattr(window, "own_devices", lambda mesh: set(devices))
        patch.setattr(jax, "make_array_from_callback", make)
        patch.setattr(loader, "_empty", counted)
        load(lambda name, _: arrays.update({name: dict(parts)}))
    return Loaded(arrays, read, sum(held))


def check_hosts(
    mesh: Mesh, load: Callable[[Callable | None], object], partition: str = "pairs"
) -> tuple[list[Loaded], dict[str, jax.Array]]:
    """That the devices of hosts get what they get from one process alone; `load` is given `take`. Returns what each
    host has done, and the arrays."""
    whole: dict[str, jax.Array] = {}
    load(whole.__setitem__)
    order = list(mesh.devices.flat)
    hosts = []
    for places in PARTITIONS[partition]:
        own = [order[place] for place in places]
        one = load_as(own, load)
        assert one.arrays.keys() == whole.keys()
        for name, parts in one.arrays.items():
            for shard in whole[name].addressable_shards:
                if shard.device in parts:
                    got, want = parts[shard.device], np.asarray(shard.data)
                    assert got.dtype == want.dtype
                    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), err_msg=name)
        hosts.append(one)
    return hosts, whole


@contextmanager
def readers(kind: str) -> Iterator[None]:
    """Tensors are read by "numpy", or in "C++"."""
    if kind == "C++" and not native.is_built():
        pytest.skip("the native library is not built")
    with pytest.MonkeyPatch.context() as patch:
        if kind == "numpy":
            patch.setattr(native, "is_built", lambda: False)
        yield
