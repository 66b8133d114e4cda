"""Meshes: from a string, from the caller, or one device."""

import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxllm.errors import MeshError

AXES = ("data", "stage", "expert", "tensor")


def make_mesh(spec: str | Mesh | None) -> Mesh:
    """The engine's mesh with `Auto` axes.

    `spec` is "tensor=4" or "expert=2,tensor=2" over the first devices, a `Mesh` of the caller's (its devices and
    axis names are kept; `rename_axes` maps foreign names), or None for the default device. Raises `MeshError`. An
    axis that splits nothing of the model is found when its parameters are known (`rules.check_used`).
    """
    if spec is None:
        return _mesh(np.array(jax.devices()[:1]), ("tensor",))
    if isinstance(spec, Mesh):
        unknown = sorted(set(spec.axis_names) - set(AXES))
        if unknown:
            raise MeshError(
                f"mesh axes {unknown} are unknown here; the engine's are {list(AXES)}. Map them with "
                f"jaxllm.sharding.mesh.rename_axes(mesh, {{{unknown[0]!r}: 'tensor'}})"
            )
        return _mesh(spec.devices, spec.axis_names)
    sizes = parse_axes(spec)
    want, have = math.prod(sizes.values()), jax.devices()
    if want > len(have):
        raise MeshError(f"mesh {spec!r} needs {want} devices, but there are {len(have)} ({have[0].platform})")
    return _mesh(np.array(have[:want]).reshape(tuple(sizes.values())), tuple(sizes))


def platform_of(mesh: Mesh) -> str:
    """The platform of its devices: "cpu", "gpu" or "tpu"."""
    return mesh.devices.flat[0].platform


def rename_axes(mesh: Mesh, names: Mapping[str, str]) -> Mesh:
    """`mesh` with its axes renamed: `rename_axes(mesh, {"model": "tensor"})`."""
    return Mesh(mesh.devices, tuple(names.get(name, name) for name in mesh.axis_names))


def _mesh(devices: np.ndarray, names: tuple[str, ...]) -> Mesh:
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def parse_axes(spec: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in spec.split(","):
        name, _, size = part.partition("=")
        name = name.strip()
        if name not in AXES or name in sizes or not size.strip().isdecimal() or int(size) < 1:
            raise MeshError(f"bad mesh {spec!r}: expected e.g. 'tensor=4', with axes of {list(AXES)} each once")
        sizes[name] = int(size)
    return sizes
