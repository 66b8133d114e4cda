"""New parameters for an engine that runs: checked and placed in the caller's thread, taken over between two steps."""

from collections.abc import Callable
from functools import partial
from typing import Any, SupportsIndex

import jax
from flax import nnx

from jaxllm.argument_checks import check_int, plain_number
from jaxllm.checkpoint.placement import canonical_params, completed, place_params, release_others
from jaxllm.engine.device.own_settings import with_own_settings
from jaxllm.engine.device.runner import CommandExecutor
from jaxllm.engine.engine import Engine
from jaxllm.engine.loop import EngineLoop
from jaxllm.errors import EngineAsleepError
from jaxllm.models.transformer import Params
from jaxllm.models.wrapped import definition_of

IN_FLIGHT = ("continue", "recompute", "abort")


def check_holds_params(executor: CommandExecutor) -> None:
    """Raises `EngineAsleepError` if it does not hold the parameters."""
    if not executor.leaves:
        raise EngineAsleepError("the parameters are not on the device while the engine sleeps; call wake_up() first")


def current_params(engine: Engine) -> Params:
    """See `LLM.params`."""
    executor = engine.runner.executor
    check_holds_params(executor)
    treedef = jax.tree.structure(executor.abstract_params)
    return canonical_params(jax.tree.unflatten(treedef, executor.leaves), executor.mesh)


def _check_definition(engine: Engine, params: Any) -> None:
    """ValueError for a module that is another model than the one served, whose code its parameters would go through."""
    if not isinstance(params, nnx.Module) or engine.definition is None:
        return
    given = definition_of(params)
    if given is None:
        return
    found = given.difference(engine.definition, "in the module given", "in the one served")
    if found is not None:
        raise ValueError(
            f"the module given is another model than the one served, whose parameters alone change: {found}. Give "
            "nnx.state(module) where only its parameters are meant, or make a new LLM of it"
        )


@with_own_settings
def prepare_update(
    engine: Engine,
    params: Any,
    *,
    version: SupportsIndex | None,
    cast: bool,
    in_flight: str,
    keep_prefix: bool,
    donate: bool,
) -> Callable[[EngineLoop], None]:
    """What takes the parameters over, between two steps of the loop; arguments are those of `LLM.update_params`, as are
    the errors."""
    if in_flight not in IN_FLIGHT:
        raise ValueError(f"in_flight={in_flight!r:.100} must be one of {', '.join(IN_FLIGHT)}")
    if in_flight == "recompute" and keep_prefix:
        raise ValueError("in_flight='recompute' computes all keys and values anew; leave keep_prefix out")
    if version is not None:
        version = plain_number(version)
        check_int("version", version, 0, 2**31 - 1)
    executor = engine.runner.executor
    if len(executor.mesh.local_devices) < executor.mesh.size:
        raise ValueError(
            "an engine over several hosts keeps the parameters that it began with, as those of the program are on one "
            "of them; build another engine"
        )
    _check_definition(engine, params)
    params = completed(params, executor.abstract_params, partial(current_params, engine))
    placed = place_params(params, executor.abstract_params, executor.mesh, cast=cast)

    def take_over(loop: EngineLoop) -> None:
        if in_flight == "abort":
            loop.abort_all()
        engine.update_params(placed, version=version, recompute=in_flight == "recompute", keep_prefix=keep_prefix)
        if donate:
            release_others(params, placed)

    return take_over
