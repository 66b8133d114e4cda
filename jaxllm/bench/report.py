"""The part of a report that all measurements share: machine, model, engine."""

import dataclasses
import datetime
import math
import os
import platform
from pathlib import Path
from typing import Any

from jaxllm.checkpoint.files import is_gguf


def about(llm: Any, *, model: str | None, dummy_weights: bool) -> dict[str, Any]:
    """Date, machine, model and engine, ready for JSON. `model` is the user's argument; only its name is reported."""
    import jax

    runner = llm.engine.runner
    leaves = jax.tree.leaves(runner.executor.abstract_params)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "model": {
            "name": "embedded" if model is None else _name(Path(model)),
            "parameters": sum(math.prod(leaf.shape) for leaf in leaves),
            "dtype": str(leaves[0].dtype),
            "dummy_weights": dummy_weights,
        },
        "engine": dataclasses.asdict(llm.engine.config) | {"mesh": dict(runner.executor.mesh.shape)},
    }


def machine() -> dict[str, Any]:
    """Devices, processor and versions."""
    import jax
    import jaxlib.version

    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
    }


def heading(report: dict[str, Any]) -> str:
    """The line above a table."""
    model, where = report["model"], report["machine"]
    weights = "dummy weights, " if model["dummy_weights"] else ""
    return (
        f"{model['name']} ({weights}{model['parameters'] / 1e6:.1f}M parameters, {model['dtype']}) on "
        f"{math.prod(report['engine']['mesh'].values())} of {where['device_count']} {where['device_kind']}, "
        f"{where['cpu']} with {where['cores']} cores, Python {where['python']}, JAX {where['jax']}"
    )


def _name(path: Path) -> str:
    if is_gguf(path):
        return path.stem
    path = path.resolve()
    return path.parent.name if path.is_file() else path.name


def _cpu() -> str:
    """The processor's name, as far as the system reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
