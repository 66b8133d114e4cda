"""Gives the device's memory away while an engine has nothing to do, and takes it back."""

from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from jaxllm.engine.device.executor import Executor
from jaxllm.engine.device.runner import Runner
from jaxllm.engine.failure import LACKS_PARAMS
from jaxllm.errors import EngineAsleepError, EngineError
from jaxllm.models.transformer import Params

WEIGHTS, KV_CACHE = "weights", "kv_cache"
_BOTH = (WEIGHTS, KV_CACHE)


def _what_sleeps(level: int | None, kv: bool, params: bool) -> tuple[tuple[str, ...], bool]:
    """What `LLM.sleep` asks for: names of memory to give away, and whether the parameters are kept on the host."""
    if level is None:
        if not (kv or params):
            raise ValueError("sleep(kv=False, params=False) gives nothing away; say which")
        return tuple(tag for tag, gives in ((WEIGHTS, params), (KV_CACHE, kv)) if gives), True
    if level not in (1, 2):
        raise ValueError(f"level={level!r} must be 1 (parameters go to host memory) or 2 (they are dropped)")
    if not kv:
        raise ValueError(f"level={level} gives the KV pool away too; for kv=False leave level out")
    return _BOTH, level == 1


class Sleep:
    """What of an engine's memory is given away: its parameters, its KV pool."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self.given_away: set[str] = set()
        self._kept: list[Any] = []  # the parameters in host memory, with their places
        self._lacks_params = False  # they were dropped

    def fall(self, level: int | None, *, kv: bool, params: bool) -> None:
        """Gives memory away; arguments and errors are those of `LLM.sleep`."""
        tags, keep = _what_sleeps(level, kv, params)
        executor = self._runner.executor
        if not isinstance(executor, Executor):
            raise ValueError(
                "an engine that records, or runs over several hosts, can't sleep; build one without record and cluster"
            )
        if WEIGHTS in tags:
            if keep and executor.lacks_params():
                raise EngineError(LACKS_PARAMS)
            if WEIGHTS not in self.given_away and not self._lacks_params:
                if keep:
                    self._kept = [(np.array(jax.device_get(leaf)), leaf.sharding) for leaf in executor.leaves]
                executor.release_params()
            if not keep:
                self._kept, self._lacks_params = [], True
        if KV_CACHE in tags:
            executor.release_state()
        self.given_away.update(tags)

    def wake(self, tags: Collection[str] | None) -> None:
        """Takes back what `tags` name: "weights", "kv_cache", or both."""
        wanted = _BOTH if tags is None else [tags] if isinstance(tags, str) else tags
        if unknown := [tag for tag in wanted if tag not in _BOTH]:
            raise ValueError(f"tags has {unknown[0]!r}; it may have {WEIGHTS!r} and {KV_CACHE!r}")
        self.given_away.difference_update(wanted)
        if WEIGHTS not in self.given_away and self._kept:
            leaves = [jax.device_put(array, sharding) for array, sharding in self._kept]
            treedef = jax.tree.structure(self._runner.executor.abstract_params)
            self._runner.set_params(jax.tree.unflatten(treedef, leaves))
            self._kept = []

    def set_params(self, params: Params) -> None:
        """New parameters, also while it sleeps."""
        self._runner.set_params(params)
        self._kept, self._lacks_params = [], False
        self.given_away.discard(WEIGHTS)

    def check_awake(self) -> None:
        """Raises `EngineAsleepError` if no request can be served."""
        if self.given_away:
            raise EngineAsleepError(
                f"the engine sleeps without its {' and '.join(sorted(self.given_away))}; wake_up() first"
            )
        if self._lacks_params:
            raise EngineAsleepError("the parameters were dropped by sleep(level=2); give new ones to update_params")
