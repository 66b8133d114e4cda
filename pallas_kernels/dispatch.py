"""Which implementation of an operation runs where. Without try/except, so that a kernel that fails does so loudly."""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax
from jax.sharding import Mesh

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """Where the arrays of a computation lie: on the devices of `mesh`. None: unknown, so that XLA's code serves.

    `batch_invariant`: what becomes of a row does not depend, to the last bit, on how many others there are: one
    implementation serves any number of rows.
    """

    mesh: Mesh | None = None
    batch_invariant: bool = False

    @property
    def platform(self) -> str | None:
        """ "cpu", "gpu" or "tpu"; None where it is unknown."""
        return None if self.mesh is None else self.mesh.devices.flat[0].platform

    @property
    def single_device(self) -> bool:
        """Whether all arrays lie on one known device, so that custom calls see the whole of them."""
        return self.mesh is not None and self.mesh.size == 1

    @classmethod
    def default(cls) -> "Placement":
        """JAX's default device."""
        return cls(Mesh(jax.devices()[:1], ("tensor",)))


UNPLACED = Placement()


def device_kind() -> str | None:
    """Of the devices that is compiled for: those of the mesh in this context, else JAX's; None for a mesh that doesn't
    say."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.local_devices()[0].device_kind
    return getattr(getattr(mesh, "abstract_device", None), "device_kind", None)


def compute_capability() -> int:
    """Compute capability times ten of the target GPU, which may be known from the mesh alone."""
    target = device_kind()
    if jax.default_backend() == "gpu":
        here = jax.local_devices()[0]
        if target in (None, here.device_kind):
            return int(here.compute_capability.replace(".", ""))
    return 80 if target is not None and "A100" in target else 90


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operation: function `name` in modules of `package`, which are called as the implementations are.

    `preferred` and `on_mesh` say for each platform which implementations to try, in this order, where the arrays lie on
    one device, and where they lie on several. The first serves whose module has no `supports`, or one that accepts
    the call's arguments; otherwise "reference", whose work XLA divides among devices. `warns` says so if it happens.
    """

    package: str
    name: str
    implementations: tuple[str, ...]  # modules, imported when chosen: Pallas loads slowly
    preferred: Mapping[str, tuple[str, ...]]
    on_mesh: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    warns: bool = False

    def choose(self, implementation: str, placement: Placement, *args: Any, **kwargs: Any) -> Callable:
        """The function of `implementation`, or for "auto" of the preferred one that takes these arguments. Announces
        it once. ValueError for an unknown name."""
        if implementation == "auto":
            implementation = self.preferred_at(placement, *args, **kwargs)
        if implementation not in self.implementations:
            raise ValueError(f"unknown implementation {implementation!r}; have {sorted(self.implementations)}")
        fn = getattr(self._module(implementation), self.name)
        _announce(fn)
        return fn

    def preferred_at(self, placement: Placement, *args: Any, **kwargs: Any) -> str:
        """The implementation that takes a call with these arguments where `placement` says."""
        names = self._names(placement)
        if (name := self.kernel_for(placement, *args, **kwargs)) is not None:
            return name
        if names and self.warns:
            call = inspect.signature(getattr(self._module("reference"), self.name)).bind(*args, **kwargs).arguments
            call = ", ".join(f"{name} {_describe(value)}" for name, value in call.items())
            _announce_refusal(placement.platform, call)
        return "reference"

    def kernel_for(self, placement: Placement, *args: Any, **kwargs: Any) -> str | None:
        """As `preferred_at`; None where only the reference does."""
        for name in self._names(placement):
            if self.takes(name, *args, **kwargs):
                return name
        return None

    def takes(self, implementation: str, *args: Any, **kwargs: Any) -> bool:
        """Whether that of this name takes a call with these arguments."""
        supports = getattr(self._module(implementation), "supports", None)
        return supports is None or supports(*args, **kwargs)

    def _names(self, placement: Placement) -> tuple[str, ...]:
        table = self.preferred if placement.single_device else self.on_mesh
        return table.get(placement.platform or "", ())

    def _module(self, implementation: str) -> ModuleType:
        return importlib.import_module(f"{self.package}.{implementation}")


@functools.cache
def _announce(fn: Callable) -> None:
    op, _, implementation = fn.__module__.removeprefix(f"{__package__}.").rpartition(".")
    what = "XLA" if implementation == "reference" else f"the {implementation} kernel"
    log.info("%s %s: %s", op.replace("_", " "), fn.__qualname__, what)


@functools.cache
def _announce_refusal(platform: str | None, call: str) -> None:
    log.warning("no %s kernel supports %s: the reference serves, which is far slower", platform, call)


def _describe(x: Any) -> str:
    if isinstance(x, tuple):
        return f"({', '.join(map(_describe, x))})"
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else str(x)
