"""The chips that can be compiled for: their data sheets, and their devices for `jax.sharding.Mesh`."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxllm.engine.config import GPU_MEMORY_UTILIZATION, MEM_FRACTION_VARIABLES
from jaxllm.errors import JaxLLMError

GPU_TARGETS = Path(__file__).parent / "gpu_targets"
GIB = 2**30


class UnavailableTargetError(JaxLLMError):
    """The compiler for a target is not installed here."""


@dataclass(frozen=True)
class Chip:
    """One kind of device, as JAX counts them: a v7x chip has two, every other one."""

    name: str
    platform: str  # of jax.Device: "tpu" or "gpu"
    memory_bytes: int  # a program's at most: on TPUs the compiler's figure, on GPUs the whole memory
    bandwidth: float  # bytes a second of main memory, from the maker
    source: str  # of the bandwidth
    flops: float  # a second at most, of products of bfloat16 without sparsity, from the maker
    link_bandwidth: float  # bytes a second that it sends to others of its slice or host at most, over all links
    link: str  # what they are
    network_bandwidth: float = 0.0  # GPUs: likewise to other hosts, assumed; a TPU's links go to those too
    network: str = ""  # what was assumed
    cache_bytes: int = 0  # GPUs: the L2 cache's size
    slices: tuple[str, ...] = ()  # topologies of TPUs, ascending
    cores: int = 1  # devices of a chip
    family: str = ""  # TPUs: its name in a topology

    @property
    def usable_bytes(self) -> int:
        """What JAX may allocate: on a GPU the share that the environment sets, or else the commands' default."""
        if self.platform == "tpu":
            return self.memory_bytes
        given = [os.environ[name] for name in MEM_FRACTION_VARIABLES if os.environ.get(name)]
        return int(self.memory_bytes * float(given[0] if given else GPU_MEMORY_UTILIZATION))


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
_DOCS = "https://docs.cloud.google.com/tpu/docs/"


def _tpu(name: str, gibibytes: float, bandwidth: float, flops: float, ici: float, **others: Any) -> Chip:
    """`ici`: bytes a second in both directions, which the maker tells."""
    page = _DOCS + others.pop("page", name)
    size, link = int(gibibytes * GIB), f"ICI, half of {ici / 1e9:.0f} GB/s in both directions"
    return Chip(name, "tpu", size, bandwidth, page, flops, ici / 2, link, **{"family": name, **others})


def _gpu(name: str, memory: int, bandwidth: float, flops: float, nvlink: float, gigabits: int, cache: int) -> Chip:
    """`nvlink`: bytes a second in both directions; `gigabits` a second of a network adapter for each GPU."""
    source = f"NVIDIA {name.upper()}{' 80GB' * (name == 'a100')} SXM data sheet"
    source = "OpenXLA's description of an NVIDIA B200" if name == "b200" else source
    link = f"NVLink, half of {nvlink / 1e9:.0f} GB/s in both directions"
    network = f"an adapter of {gigabits} Gb/s for each GPU, as in a DGX {name.upper()}"
    return Chip(name, "gpu", memory, bandwidth, source, flops, nvlink / 2, link, gigabits * 1e9 / 8, network, cache)


CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v5e", 15.75, 819e9, 197e12, 400e9, slices=_FLAT),
        _tpu("v5p", 95.73, 2765e9, 459e12, 1200e9, slices=_CUBES),
        _tpu("v6e", 31.24, 1640e9, 918e12, 800e9, slices=_FLAT),
        _tpu("v7x", 94.74, 7380e9 / 2, 2307e12 / 2, 1200e9 / 2, slices=_CUBES, cores=2, family="tpu7x", page="tpu7x"),
        _gpu("a100", 85_100_068_864, 2039e9, 312e12, 600e9, 200, 40 * 2**20),
        _gpu("h100", 84_942_979_072, 3352e9, 989e12, 900e9, 400, 50 * 2**20),
        _gpu("h200", 151_397_597_184, 4800e9, 989e12, 900e9, 400, 50 * 2**20),
        _gpu("b200", 191_514_411_008, 7672e9, 2250e12, 1800e9, 400, 132_644_864),
    )
}


@dataclass(frozen=True)
class Target:
    """Devices to compile for: `count` of one kind, on hosts of `host_size` each."""

    chip: Chip
    count: int
    host_size: int

    def __str__(self) -> str:
        return f"{self.chip.name}-{self.count}"

    @property
    def num_hosts(self) -> int:
        return -(-self.count // self.host_size)

    @property
    def topology(self) -> str:
        """The smallest topology with at least `count` devices, of which `count` are used."""
        if self.chip.platform == "gpu":
            return f"1x{self.num_hosts}x{self.host_size}"
        sizes = {math.prod(map(int, shape.split("x"))) * self.chip.cores: shape for shape in self.chip.slices}
        return f"{self.chip.family}:{sizes[min(size for size in sizes if size >= self.count)]}"


def parse_target(text: str, num_hosts: int | None = None) -> Target:
    """The target of "v6e-8": a chip's name and the number of devices, on `num_hosts` hosts, or as many as such a slice
    or so many GPUs have. Raises `ValueError`."""
    name, _, count = text.lower().rpartition("-")
    if name not in CHIPS:
        raise ValueError(f"target {text!r} is unknown: give a chip of {sorted(CHIPS)} and a number of devices, 'v6e-8'")
    chip = CHIPS[name]
    most = math.prod(map(int, chip.slices[-1].split("x"))) * chip.cores if chip.slices else 64
    if not count.isdecimal() or not 1 <= int(count) <= most:
        raise ValueError(f"target {text!r}: the number of devices must be in [1, {most}] for {name}")
    return Target(chip, int(count), _host_size(text, chip, int(count), num_hosts))


def _host_size(text: str, chip: Chip, count: int, num_hosts: int | None) -> int:
    """Devices of a host. A slice of up to eight v5e or v6e is one host by itself, larger ones have hosts of four."""
    full = (4, 8) if chip.slices == _FLAT else (4 * chip.cores,) if chip.slices else (8,)
    if num_hosts is None:
        return min(count, full[-1]) if count <= full[-1] else full[0]
    size, rest = divmod(count, max(num_hosts, 1))
    fits = size in full or (num_hosts == 1 and size <= full[-1]) or (chip.platform == "gpu" and 1 <= size <= 8)
    if num_hosts < 1 or rest or not fits:
        sizes = "1 to 8" if chip.platform == "gpu" else " or ".join(map(str, full))
        raise ValueError(
            f"{num_hosts} hosts can't have the {count} devices of {text}: a host of {chip.name} has {sizes}"
        )
    return size


def missing(platform: str) -> str | None:
    """Why there is no compiler for `platform` here; None if there is one."""
    import jax

    if platform == "tpu":
        return None if find_spec("libtpu") else "libtpu is not installed; pip install 'jax[tpu]'"
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    if not find_spec("jax_plugins") or not any(find_spec(name) for name in plugins):
        return "JAX's CUDA plugin is not installed; pip install 'jax[cuda13]' (Python 3.12 or newer)"
    if jax.__version_info__ < (0, 11, 2):
        return f"JAX {jax.__version__} can't compile for absent GPUs; version 0.11.2 can"
    return None


def devices(target: Target) -> Sequence[Any]:
    """The target's devices, which can be compiled for and nothing else. Raises `UnavailableTargetError`."""
    if reason := missing(target.chip.platform):
        raise UnavailableTargetError(f"can't compile for {target}: {reason}")
    # By default libtpu looks for a TPU and its host's metadata, and locks it for one process.
    for name, value in {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    if target.chip.platform == "tpu":
        # libtpu takes hosts of four chips, unless it is told of larger ones.
        hosts = {"chips_per_host_bounds": (2, 4, 1)} if target.host_size == 8 * target.chip.cores else {}
        found = topologies.get_topology_desc(platform="tpu", topology_name=target.topology, **hosts)
    else:
        config = (GPU_TARGETS / f"{target.chip.name}.txtpb").read_text()
        found = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=config, topology=target.topology
        )
    return found.devices[: target.count]
