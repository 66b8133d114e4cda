"""Engines that compile what is asked for, in place of all that they may ever run."""

import os
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from jaxllm.engine.device.compile_plan import CompilePlan
from jaxllm.engine.device.packing import min_bucket

WHERE = "jaxllm.engine.device.executor.CompilePlan"
MIN_BUCKET = "jaxllm.engine.sizing.min_bucket"


class OnDemand(CompilePlan):
    """Steps find every executable there, as if all were compiled, though one is compiled when it is first asked for:
    most are never asked for by a test, and nothing is compiled twice."""

    def __init__(self, *given: Any, compile_quickly: Any = None, ahead: Any = (), **options: Any):
        super().__init__(*given, **options)

    def ready(self, name: Hashable) -> bool:
        if name in self._queue.jobs:
            self.settle([name])
        if self._elsewhere is not None and name in self._queue.done and name not in self._elsewhere.compiled:
            self._elsewhere.want([name], is_awaited=True)  # as nobody else retries what has failed there once
            self._elsewhere.wait_compiled([name], lambda: None)
        return super().ready(name)

    def __getitem__(self, name: Hashable) -> Any:
        if name in self._queue.jobs:
            self.settle([name])
        return super().__getitem__(name)

    def _next_of_rest(self) -> None:
        return None


def install() -> None:
    """For this process's engines, from now on. Unless they are compiled as for users, they have none for a single token
    either."""
    mock.patch(WHERE, OnDemand).start()
    if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1":
        mock.patch(MIN_BUCKET, lambda platform: 8).start()


@contextmanager
def as_for_users() -> Iterator[None]:
    """Also a decorator, in which engines are as users have them."""
    with mock.patch(WHERE, CompilePlan), mock.patch(MIN_BUCKET, min_bucket):
        yield
