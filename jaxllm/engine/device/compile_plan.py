"""The compile plan: every executable the engine will ever run, known before the start, compiled in the background."""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jaxllm.errors import EngineDeadError

log = logging.getLogger(__name__)

Job = Callable[[], Any]  # gives a `jax.stages.Lowered`


class CompilePlan:
    """Compiles `jobs` (name -> a function that lowers) one after the other, in their order, in one thread.

    An executable, once there, accepts only the shapes, dtypes and shardings it was made for: anything else raises a
    TypeError that names the argument, and nothing ever compiles behind the engine's back.
    """

    def __init__(
        self, jobs: Mapping[Hashable, Job], check: Callable[[Hashable, Any], None] = lambda name, compiled: None
    ):
        self._check = check
        self.names = tuple(jobs)
        self.seconds = 0.0
        self.waited_at = 0.0  # time.monotonic() when someone last waited for an executable: no hang, but work
        self._done: dict[Hashable, Any] = {}
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(dict(jobs),), name="jaxllm-compile", daemon=True)
        self._close = weakref.finalize(self, _stop_and_join, self._stop, thread)  # at the latest when Python exits
        thread.start()

    @property
    def total(self) -> int:
        return len(self.names)

    @property
    def num_done(self) -> int:
        return len(self._done)

    def ready(self, name: Hashable) -> bool:
        return name in self._done

    def __getitem__(self, name: Hashable) -> Any:
        return self._done[name]

    def wait(self, names: Sequence[Hashable], tick: Callable[[], None] = lambda: None) -> None:
        """Blocks until all `names` are there, calling `tick` now and then. Raises what the compiler raised."""
        with self._changed:
            while not all(name in self._done for name in names):
                if self._error is not None:
                    raise EngineDeadError(f"compiling a step failed: {self._error}") from self._error
                if self._stop.is_set():
                    raise EngineDeadError("the engine was closed while it compiled")
                self._changed.wait(0.1)
                self.waited_at = time.monotonic()
                tick()
        tick()

    def close(self) -> None:
        """Stops after the executable being compiled, which can't be interrupted."""
        self._close()

    def _run(self, jobs: Mapping[Hashable, Job]) -> None:
        try:
            for name, lower in jobs.items():
                if self._stop.is_set():
                    return
                start = time.perf_counter()
                compiled = _lower(name, lower).compile()
                self._check(name, compiled)
                with self._changed:
                    self._done[name] = compiled
                    self.seconds += time.perf_counter() - start
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            log.error("compiling %s failed; the engine goes on with what it has: %s", name, error)
            with self._changed:
                self._error = error
                self._changed.notify_all()


def _lower(name: Hashable, lower: Job) -> Any:
    try:
        return lower()
    except KeyError as error:
        # Seen once in JAX 0.10.2 while three threads traced at once: a variable that the jaxpr lacks.
        log.warning("lowering %s failed (KeyError: %s); trying once more", name, error)
        return lower()


def _stop_and_join(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join()
