"""What is asked of an `LLM` beside text: its memory, its parameters, a profile."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, SupportsIndex

import jax
from flax import nnx

from jaxllm.base_llm import BaseLLM
from jaxllm.engine.caller import CallerLoop
from jaxllm.engine.device.executor import Executor
from jaxllm.engine.device.own_settings import with_own_settings
from jaxllm.engine.engine import Engine
from jaxllm.engine.weight_update import check_holds_params, current_params, prepare_update
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

    def sleep(self, level: int | None = None, *, kv: bool = True, params: bool = False) -> None:
        """Gives the device's memory away until `wake`: that of the KV pool (`kv`), whose contents are lost with the
        prefix cache, and that of the parameters (`params`), which go to host memory. Executables stay.

        `level` is vLLM's: 1 is both of these, and 2 drops the parameters, so that `update_params` must give others
        before the next request. Requests made meanwhile raise `EngineAsleepError`. ValueError while requests run.
        """
        with self._loop.between_steps():
            self.engine.sleep(level, kv=kv, params=params)

    def wake(self) -> None:
        """Takes back all that `sleep` gave away."""
        self.wake_up()

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
        makes of them, and without a copy where it makes nothing of them. `EngineError` if they were deleted."""
        self.engine.check_params()
        return current_params(self.engine)

    @property
    def module(self) -> nnx.Module:
        """The module that is served, with its parameters as they lie on the mesh: of the class that was given, or of
        the checkpoint's family. A new object each time. ValueError where the engine only sends its commands on,
        `EngineError` if the parameters were deleted."""
        self.engine.check_params()
        executor = self.engine.runner.executor
        if not isinstance(executor, Executor):
            raise ValueError("an engine that records, or leads several hosts, does not hold the module itself")
        check_holds_params(executor)
        return executor.model_shape.model(executor.leaves)

    @property
    def params_version(self) -> int:
        """Of the parameters that the next step takes: 0 at first; see `update_params`."""
        return self.engine.params_version

    def update_params(
        self,
        params: Any,
        *,
        version: SupportsIndex | None = None,
        cast: bool = True,
        in_flight: str = "continue",
        keep_prefix: bool = False,
        donate: bool = False,
    ) -> None:
        """Replaces the parameters by a pytree of the same structure and shapes: `nnx.state(model, nnx.Param)`, the
        module's state, or nested dicts. Arrays of jax that lie as the engine wants them are shared, not copied; others
        are moved to its mesh, and those of numpy are copied.

        version: what the tokens made with them are marked with, in `CompletionOutput.versions`; None: one more than
          that of the parameters before, the first of which are 0.
        cast: other floating dtypes become those of the engine; False: they are refused.
        in_flight: requests that run "continue" with the new parameters from their next token, over keys and values that
          the old ones made; "recompute" those of their prompts and tokens so far, and go on; or "abort": they end with
          what they have, finish_reason "abort".
        keep_prefix: new requests may share blocks that the old parameters made. They may not by default.
        donate: frees the arrays of `params` that the engine does not share.

        ValueError names what does not match: of a module also a class or an attribute that is another than in the one
        that is served, whose code alone runs; `nnx.state(module)` is its parameters, whatever else it is.
        """
        take_over = prepare_update(
            *(self.engine, params),
            **dict(version=version, cast=cast, in_flight=in_flight, keep_prefix=keep_prefix, donate=donate),
        )
        with self._loop.between_steps() as loop:
            take_over(loop)

    def pause(self) -> None:
        """Makes no more steps until `resume`: threads that wait for outputs wait on, and a request of this thread
        raises `EnginePausedError` as it would wait for ever. Nothing is lost, and `update_params` may be called."""
        self._loop.pause()

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._loop.resume()
