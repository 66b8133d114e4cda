"""JAX as the engine needs it, whatever its caller has set for the rest of the program."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any


@contextmanager
def own_settings() -> Iterator[None]:
    """While the engine builds, traces or places something: numbers of 32 bits where nothing says otherwise, no mesh but
    its own, jit, and transfers, which it knows of. Afterwards the caller's are back."""
    import jax  # here, as what reads an engine's statistics imports this, and must not wait for JAX

    if _are_own(jax.config) and jax.sharding.get_abstract_mesh().empty:
        yield  # entering what follows takes 15 microseconds, in each step
        return
    with (
        jax.enable_x64(False),
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
        jax.debug_nans(False),  # rows that pad may be anything, and tokens that may not be are minus infinity
        jax.debug_infs(False),
        jax.check_tracer_leaks(False),  # which searches all of Python's objects after each trace
        jax.set_mesh(None),  # unlike an empty abstract mesh, which leaves the devices of the caller's
    ):
        yield


def _are_own(config: Any) -> bool:
    guards = (
        config.jax_transfer_guard_host_to_device,
        config.jax_transfer_guard_device_to_device,
        config.jax_transfer_guard_device_to_host,
    )
    flags = (
        config.jax_enable_x64,
        config.jax_disable_jit,
        config.jax_check_tracer_leaks,
        config.jax_debug_nans,
        config.jax_debug_infs,
    )
    return not any(flags) and all(guard in (None, "allow") for guard in guards)


def with_own_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under `own_settings`."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with own_settings():
            return function(*args, **kwargs)

    return wrapped
