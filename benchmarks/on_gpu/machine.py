"""The machine: what it is, and what its memory and its tensor cores reach at best, which the floors are made of."""

import importlib.metadata
import os
import shutil
import subprocess
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp

from benchmarks.kernels import Timing, copy_bandwidth, seconds
from benchmarks.on_gpu.child import Recorder
from benchmarks.on_gpu.sections import PROFILED_GRAPHS
from jaxllm.bench import report

COPY_BYTES, MATMUL_SIZE = 2**32, 8192
SMALL_COPY_BYTES, SMALL_MATMUL_SIZE = 2**22, 256
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13")
NEEDED = ("flax", "einops", "jaxtyping", "safetensors", "tokenizers", "tqdm")  # by the sections to come


def run(record: Recorder, small: bool) -> str:
    device = jax.devices()[0]
    memory = device.memory_stats() or {}
    record("machine", report.machine())
    record("memory_bytes", memory.get("bytes_limit"))
    record("compute_capability", getattr(device, "compute_capability", None))
    record("nvidia_smi", _nvidia_smi())
    record("packages", {name: version for name in PACKAGES if (version := _version(name))})
    record("missing_packages", [name for name in NEEDED if find_spec(name) is None])
    record("environment", {k: v for k, v in os.environ.items() if k.startswith(("XLA_", "JAX_", "CUDA_VISIBLE"))})
    record("can_profile_graphs", knows_option(PROFILED_GRAPHS))
    timing = Timing(1, 3) if small else Timing(10, 7)
    bandwidth = copy_bandwidth(SMALL_COPY_BYTES if small else COPY_BYTES, timing)
    record("bandwidth", bandwidth)
    flops = matmul_rate(SMALL_MATMUL_SIZE if small else MATMUL_SIZE, timing)
    record("flops", flops)
    return (
        f"{device.device_kind}, {memory.get('bytes_limit', 0) / 2**30:.1f} GiB for JAX {jax.__version__}; "
        f"copies {bandwidth / 1e12:.2f} TB/s, bfloat16 products {flops / 1e12:.0f} TFLOP/s"
    )


def matmul_rate(size: int, timing: Timing) -> float:
    """Operations a second of a square product of random bfloat16 matrices: zeros would run faster."""
    keys = jax.random.split(jax.random.key(0), 2)
    a, b = (jax.jit(partial(jax.random.normal, shape=(size, size), dtype=jnp.bfloat16))(key) for key in keys)
    multiply = jax.jit(jnp.matmul)
    return 2 * size**3 / seconds(lambda: multiply(a, b), timing)


def knows_option(name: str) -> bool:
    """Whether this XLA has a flag of this name. Left in XLA_FLAGS, one that it lacks would end the process."""
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), jnp.float32))
    try:
        lowered.compile(compiler_options={name: True})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return False
        raise
    return True


def _nvidia_smi() -> str | None:
    """Name, driver and memory, as the driver tells them; None where there is no such program."""
    if not (program := shutil.which("nvidia-smi")):
        return None
    query = "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit"
    found = subprocess.run([program, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
    return found.stdout.strip() or found.stderr.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
