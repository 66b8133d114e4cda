"""What is asked of an `LLM` beside text: its memory, its parameters, a profile."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax

from jaxllm.base_llm import BaseLLM
from jaxllm.checkpoint.placement import canonical_params, place_params
from jaxllm.engine.caller import CallerLoop
from jaxllm.engine.device.own_settings import with_own_settings
from jaxllm.engine.engine import Engine
from jaxllm.errors import EngineAsleepError
from jaxllm.models.transformer import Params


class LLMControl(BaseLLM):
    """An engine that turns in its callers' threads, and what may be done with it between two steps."""

    _loop: CallerLoop

    @property
    def engine(self) -> Engine:
        return self._engine

    def reset_prefix_cache(self) -> bool:
        """Drops the prefix cache; True, as in vLLM where that has worked."""
        with self._loop.between_steps():
            self.engine.scheduler.forget_keys()
        return True

    def sleep(self, level: int = 1) -> None:
        """Gives the device's memory away until `wake_up`: of the parameters, which level 1 keeps in host memory and
        level 2 drops, and of the KV pool, whose contents are lost with the prefix cache.

        After level 2, `update_params` must give new parameters before the next request. Requests made meanwhile raise
        `EngineAsleepError`. ValueError while requests run.
        """
        with self._loop.between_steps():
            self.engine.sleep(level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Takes back what `sleep` gave away: "weights", "kv_cache", or both (None)."""
        with self._loop.between_steps():
            self.engine.wake_up(tags)

    def start_profile(self, directory: str | Path | None = None) -> None:
        """Traces what the device does from now on, into `directory` (None: the environment variable JAXLLM_PROFILE_DIR,
        or vLLM's VLLM_TORCH_PROFILER_DIR), for XProf or Perfetto. ValueError if there is none."""
        variables = ("JAXLLM_PROFILE_DIR", "VLLM_TORCH_PROFILER_DIR")
        directory = directory or next(filter(None, map(os.environ.get, variables)), None)
        if directory is None:
            raise ValueError(f"start_profile needs a directory: give one, or set {variables[0]}")
        jax.profiler.start_trace(str(directory))

    def stop_profile(self) -> None:
        """Writes what was traced."""
        jax.profiler.stop_trace()

    @property
    @with_own_settings
    def params(self) -> Params:
        """The parameters that are served, an `nnx.State` that `update_params` takes: canonical ones, whatever the mesh
        makes of them, and without a copy where it makes nothing of them."""
        executor = self.engine.runner.executor
        if not executor.leaves:
            raise EngineAsleepError(
                "the parameters are not on the device while the engine sleeps; call wake_up() first"
            )
        treedef = jax.tree.structure(executor.abstract_params)
        return canonical_params(jax.tree.unflatten(treedef, executor.leaves), executor.mesh)

    @with_own_settings
    def update_params(self, params: Any) -> None:
        """Replaces the parameters by a pytree of the same structure, shapes and dtypes; running requests go on with
        the new ones from their next token. ValueError names what does not match."""
        runner = self.engine.runner
        if len(runner.executor.mesh.local_devices) < runner.executor.mesh.size:
            raise ValueError(
                "an engine over several hosts keeps the parameters that it began with, as those of the program are on "
                "one of them; build another engine"
            )
        placed = place_params(params, runner.executor.abstract_params, runner.executor.mesh)
        with self._loop.between_steps():
            self.engine.update_params(placed)
