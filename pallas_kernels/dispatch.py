"""Chooses kernels. Without try/except, so that a kernel that fails does so loudly."""

import functools
import logging
from collections.abc import Callable, Mapping

import jax

log = logging.getLogger(__name__)


def choose(
    implementations: Mapping[str, Callable], preferred: Mapping[str, str], name: str, platform: str | None
) -> Callable:
    """The implementation called `name`, or for "auto" the preferred one of `platform` (None: JAX's default)."""
    if name == "auto":
        name = preferred.get(platform or jax.default_backend(), "reference")
    if name not in implementations:
        raise ValueError(f"unknown implementation {name!r}; have {sorted(implementations)}")
    announce(implementations[name])
    return implementations[name]


@functools.cache
def announce(fn: Callable) -> None:
    """Logs once that `fn` serves."""
    log.info("using %s.%s", fn.__module__, fn.__qualname__)
