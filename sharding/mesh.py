"""Meshes: from a string, from the caller, or one device."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxllm.argument_checks import a_type
from jaxllm.errors import DeviceError, MeshError

AXES = ("data", "stage", "expert", "tensor")
_PLUGINS = {  # of JAX's platforms: a module of each that serves it, and what installs one
    "cuda": (("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"), "pip install 'jaxllm[cuda12]', or cuda13"),
    "tpu": (("libtpu",), "pip install 'jaxllm[tpu]'"),
}


def make_mesh(spec: str | Mesh | None, name: str | None = None) -> Mesh:
    """The engine's mesh with `Auto` axes.

    `spec` is "tensor=4" or "expert=2,tensor=2" over the first devices, a `Mesh` of the caller's (its devices and
    axis names are kept; `map_axes` is for foreign names), or None for the default device. Errors call it by `name`.
    Raises `MeshError` or `DeviceError`. An axis that splits nothing of the model is found when its parameters are
    known (`rules.check_used`).
    """
    if spec is None:
        all_devices()  # or says why there are none
        return _mesh(np.array([_default_device()]), ("tensor",))
    if isinstance(spec, Mesh):
        unknown = sorted(set(spec.axis_names) - set(AXES))
        if unknown:
            raise MeshError(
                f"mesh axes {unknown} are unknown here; the engine's are {list(AXES)}. Say which of yours is which of "
                f"these, as in axes={_example(spec)}"
            )
        return _mesh(spec.devices, spec.axis_names)
    if not isinstance(spec, str):
        raise MeshError(
            f"mesh={spec!r:.100} is {a_type(spec)}; give a string, as in 'tensor=4' for four devices, or a "
            "jax.sharding.Mesh"
        )
    sizes = parse_axes(spec)
    want, have = math.prod(sizes.values()), all_devices()
    if want > len(have):
        platform = have[0].platform
        hint = ""
        if platform == "cpu":
            hint = f". To try it on a CPU, let it be several devices: set JAX_NUM_CPU_DEVICES={want} before JAX starts"
        raise MeshError(f"{name or f'mesh {spec!r}'} needs {want} devices, but JAX has {len(have)} ({platform}){hint}")
    return _mesh(np.array(have[:want]).reshape(tuple(sizes.values())), tuple(sizes))


def _example(mesh: Mesh) -> dict[str, Any]:
    """What `map_axes` could be given for `mesh`: parameters are usually split along its last axis."""
    *others, last = mesh.axis_names
    return ({"data": tuple(others)} if others else {}) | {"tensor": last}


def _default_device() -> jax.Device:
    """What `jax.default_device` says, or else the first of this process."""
    said = jax.config.jax_default_device
    if said is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=said)[0] if isinstance(said, str) else said


def all_devices() -> list[jax.Device]:
    """JAX's devices, of the platform that it prefers. Raises `DeviceError` if it can't use what JAX_PLATFORMS says."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the second, without a text, where a GPU's plugin is missing
        raise DeviceError(_explain(jax.config.jax_platforms or "", str(error))) from error


def _explain(platforms: str, error: str) -> str:
    wanted = "cuda" if platforms == "gpu" else platforms
    modules, install = _PLUGINS.get(wanted, ((), ""))
    text = f"JAX can't use the platform {platforms!r}, which JAX_PLATFORMS or jax.config asks for"
    if modules and not any(map(_is_installed, modules)):
        return f"{text}: its plugin is not installed. Install it ({install}), or set JAX_PLATFORMS=cpu"
    reason = error.strip().partition("\n")[0].removesuffix(".") or "it gives no reason"
    return f"{text}: {reason}"


def _is_installed(module: str) -> bool:
    package = module.partition(".")[0]
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(module) is not None


def platform_of(mesh: Mesh) -> str:
    """The platform of its devices: "cpu", "gpu" or "tpu"."""
    return mesh.devices.flat[0].platform


def mesh_in_context(mesh: Mesh) -> Mesh | AbstractMesh:
    """What a `shard_map` over the axes of `mesh` takes here: the whole mesh, where one over others is around it."""
    around = jax.sharding.get_abstract_mesh()
    return mesh if around.empty or not around.manual_axes else around


def map_axes(mesh: Any, axes: Mapping[str, Any]) -> Mesh:
    """`mesh` with the engine's axes: `map_axes(mesh, {"tensor": "tp", "data": ("fsdp", "dp")})`, where several of its
    axes make one, the first of them the slowest. They stay in the order of `mesh`, so that its devices do, and what is
    split over these alike is shared. Raises `MeshError` if that names axes which there are not, one twice, or not all
    that have several devices."""
    if not isinstance(mesh, Mesh):
        raise MeshError(f"axes are of a jax.sharding.Mesh, but mesh is {a_type(mesh)}; leave axes out")
    if not isinstance(axes, Mapping) or not axes or set(axes) - set(AXES):
        raise MeshError(f"axes={axes!r:.100} must be a dict from some of {list(AXES)} to axes of mesh")
    parts = {name: _names(name, each) for name, each in axes.items()}
    named = [name for each in parts.values() for name in each]
    if unknown := [name for name in named if name not in mesh.axis_names]:
        raise MeshError(f"axes has {unknown[0]!r}, which mesh has not; its axes are {dict(mesh.shape)}")
    if len(set(named)) < len(named):
        raise MeshError(f"axes={dict(axes)!r} names an axis of mesh twice")
    left = [name for name in mesh.axis_names if name not in named]
    if unused := [name for name in left if mesh.shape[name] > 1]:
        raise MeshError(
            f"axes leaves out {unused} of mesh, {dict(mesh.shape)}; map each to one of {list(AXES)}, as 'data' if its "
            "devices shall serve requests of their own"
        )
    parts = dict(sorted(parts.items(), key=lambda part: [mesh.axis_names.index(name) for name in part[1]]))
    order = [mesh.axis_names.index(name) for name in (*(name for each in parts.values() for name in each), *left)]
    sizes = [math.prod(mesh.shape[name] for name in each) for each in parts.values()]
    return _mesh(mesh.devices.transpose(order).reshape(sizes), tuple(parts))


def _names(name: str, given: Any) -> tuple[str, ...]:
    """Axes of the caller's that make the engine's axis `name`."""
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else ()
    if not names or not all(isinstance(each, str) for each in names):
        raise MeshError(f"axes[{name!r}]={given!r:.100} must be the name of an axis of mesh, or a tuple of names")
    return names


def _mesh(devices: np.ndarray, names: tuple[str, ...]) -> Mesh:
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def parse_axes(spec: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in spec.split(","):
        name, _, size = part.partition("=")
        name = name.strip()
        if name not in AXES or name in sizes or not size.strip().isdecimal() or int(size) < 1:
            raise MeshError(
                f"bad mesh {spec!r}: give axes and their sizes, at least 1, as in 'tensor=4' or 'expert=2,tensor=2'; "
                f"the axes are {', '.join(AXES)}, each once"
            )
        sizes[name] = int(size)
    return sizes
