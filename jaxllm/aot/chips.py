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
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "tpu", int(15.75 * GIB), 819e9, _DOCS + "v5e", slices=_FLAT, family="v5e"),
        Chip("v5p", "tpu", int(95.73 * GIB), 2765e9, _DOCS + "v5p", slices=_CUBES, family="v5p"),
        Chip("v6e", "tpu", int(31.24 * GIB), 1640e9, _DOCS + "v6e", slices=_FLAT, family="v6e"),
        Chip("v7x", "tpu", int(94.74 * GIB), 7380e9 / 2, _DOCS + "tpu7x", slices=_CUBES, cores=2, family="tpu7x"),
        Chip("a100", "gpu", 85_100_068_864, 2039e9, "NVIDIA A100 80GB SXM data sheet", 40 * 2**20),
        Chip("h100", "gpu", 84_942_979_072, 3352e9, "NVIDIA H100 SXM data sheet", 50 * 2**20),
        Chip("h200", "gpu", 151_397_597_184, 4800e9, "NVIDIA H200 SXM data sheet", 50 * 2**20),
        Chip("b200", "gpu", 191_514_411_008, 7672e9, "OpenXLA's description of an NVIDIA B200", 132_644_864),
    )
}


@dataclass(frozen=True)
class Target:
    """Devices to compile for: `count` of one kind."""

    chip: Chip
    count: int

    def __str__(self) -> str:
        return f"{self.chip.name}-{self.count}"

    @property
    def topology(self) -> str:
        """The smallest topology with at least `count` devices, of which `count` are used."""
        if self.chip.platform == "gpu":
            return f"1x1x{self.count}" if self.count <= 8 else f"1x{-(-self.count // 8)}x8"
        sizes = {math.prod(map(int, shape.split("x"))) * self.chip.cores: shape for shape in self.chip.slices}
        return f"{self.chip.family}:{sizes[min(size for size in sizes if size >= self.count)]}"


def parse_target(text: str) -> Target:
    """The target of "v6e-8": a chip's name and the number of devices. Raises `ValueError`."""
    name, _, count = text.lower().rpartition("-")
    if name not in CHIPS:
        raise ValueError(f"target {text!r} is unknown: give a chip of {sorted(CHIPS)} and a number of devices, 'v6e-8'")
    chip = CHIPS[name]
    most = math.prod(map(int, chip.slices[-1].split("x"))) * chip.cores if chip.slices else 64
    if not count.isdecimal() or not 1 <= int(count) <= most:
        raise ValueError(f"target {text!r}: the number of devices must be in [1, {most}] for {name}")
    return Target(chip, int(count))


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
        found = topologies.get_topology_desc(platform="tpu", topology_name=target.topology)
    else:
        config = (GPU_TARGETS / f"{target.chip.name}.txtpb").read_text()
        found = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=config, topology=target.topology
        )
    return found.devices[: target.count]
