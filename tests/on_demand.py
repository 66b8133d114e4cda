"""Engines that compile what is asked for, in place of all that they may ever run."""

import os
from collections.abc import Hashable
from typing import Any
from unittest import mock

from jaxllm.engine.device.compile_plan import CompilePlan

WHERE = "jaxllm.engine.device.executor.CompilePlan"


class OnDemand(CompilePlan):
    """Steps find every executable there, as if all were compiled, though one is compiled when it is first asked for:
    most are never asked for by a test."""

    def ready(self, name: Hashable) -> bool:
        if name in self._jobs:
            self.settle([name])
        if self._elsewhere is not None and name in self._done:
            self._elsewhere.wait_compiled([name], lambda: None)
        return super().ready(name)

    def __getitem__(self, name: Hashable) -> Any:
        if name in self._jobs:
            self.settle([name])
        return super().__getitem__(name)

    def _next_of_rest(self) -> None:
        return None


def install() -> None:
    """For this process's engines, from now on. Unless compiled as for users, their smallest steps are of 8 tokens, as on a
    TPU."""
    mock.patch(WHERE, OnDemand).start()
    if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1":
        mock.patch("jaxllm.engine.sizing.min_bucket", lambda platform: 8).start()


def compiles_in_background() -> Any:
    """A context manager, and a decorator, in which engines are as users have them."""
    return mock.patch(WHERE, CompilePlan)
