"""The compile plan: every executable the engine will ever run, known before the start, compiled in the background."""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jaxllm.errors import EngineDeadError

log = logging.getLogger(__name__)

Job = Callable[[], Any]  # returns a `jax.stages.Lowered`


class CompilePlan:
    """Compiles `jobs` (name -> a function that lowers) one after the other, in their order, in one thread.

    An executable accepts only the shapes, dtypes and shardings it was compiled for: anything else raises a TypeError
    that names the argument, so nothing ever compiles behind the engine's back.

    A job that fails is tried once more, after all others or as soon as someone waits for it. The engine goes on
    without an executable that failed twice.
    """

    def __init__(
        self, jobs: Mapping[Hashable, Job], check: Callable[[Hashable, Any], None] = lambda name, compiled: None
    ):
        self._check = check
        self.names = tuple(jobs)
        self.seconds = 0.0
        self.waited_at = 0.0  # time.monotonic() when someone last waited for an executable: no hang, but work
        self._done: dict[Hashable, Any] = {}
        self._retries: set[Hashable] = set()  # failed once
        self._failures: dict[Hashable, Exception] = {}  # failed twice
        self._wanted: list[Collection[Hashable]] = []  # by those who wait
        self._changed = threading.Condition()
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

    @property
    def num_failed(self) -> int:
        """Executables that failed twice: the engine has to do without them."""
        return len(self._failures)

    def ready(self, name: Hashable) -> bool:
        return name in self._done

    def awaited(self, name: Hashable) -> Callable:
        """The executable, once it is compiled."""
        self.wait([name])
        return self[name]

    def __getitem__(self, name: Hashable) -> Any:
        return self._done[name]

    def wait(self, names: Sequence[Hashable], tick: Callable[[], None] = lambda: None) -> None:
        """Blocks until all `names` are there, calling `tick` now and then. Raises `EngineDeadError`, its cause the
        compiler's error, if one of them failed twice, and `ValueError` if there is none of a name."""
        with self._changed, self._wait_for(names):
            while not all(name in self._done for name in names):
                self._raise_failures(names)
                self._sleep(tick)
        tick()

    def wait_all(self) -> None:
        """Blocks until nothing is left to compile. Raises like `wait`."""
        with self._changed:
            while self.num_done + self.num_failed < self.total:
                self._sleep(lambda: None)
            self._raise_failures(self.names)

    def close(self) -> None:
        """Stops after the executable being compiled, which can't be interrupted."""
        self._close()

    def abandon(self) -> None:
        """As `close`, without waiting for the executable being compiled."""
        self._stop.set()

    @contextmanager
    def _wait_for(self, names: Collection[Hashable]) -> Iterator[None]:
        self._wanted.append(names)
        try:
            yield
        finally:
            self._wanted.remove(names)

    def _raise_failures(self, names: Sequence[Hashable]) -> None:
        for name in names:
            if name not in self.names:
                raise ValueError(f"there is no executable {name!r}")
            if name in self._failures:
                error = self._failures[name]
                raise EngineDeadError(f"compiling {name} failed twice: {error}") from error

    def _sleep(self, tick: Callable[[], None]) -> None:
        if self._stop.is_set():
            raise EngineDeadError("the engine was closed while it compiled")
        self._changed.wait(0.1)
        self.waited_at = time.monotonic()
        tick()

    def _run(self, jobs: dict[Hashable, Job]) -> None:
        while jobs and not self._stop.is_set():
            name = self._next(jobs)
            start = time.perf_counter()
            compiled, error = None, None
            try:
                compiled = jobs[name]().compile()
                self._check(name, compiled)
            except Exception as raised:  # noqa: BLE001 - whatever the compiler raises is told to those who wait
                error = raised
            with self._changed:
                self.seconds += time.perf_counter() - start
                if error is None:
                    self._done[name] = compiled
                else:
                    self._note(name, error)
                if error is None or name in self._failures:
                    del jobs[name]
                self._changed.notify_all()

    def _next(self, jobs: Mapping[Hashable, Job]) -> Hashable:
        """The first of `jobs`; one that failed before comes last, unless someone waits for it."""
        with self._changed:
            wanted = {name for names in self._wanted for name in names}
            later = self._retries - wanted
            return next((name for name in jobs if name not in later), next(iter(jobs)))

    def _note(self, name: Hashable, error: Exception) -> None:
        if name not in self._retries:
            self._retries.add(name)
            log.warning("compiling %s failed and is tried once more after the others: %s", name, error)
        else:
            self._failures[name] = error
            log.error("compiling %s failed twice; the engine goes on without it: %s", name, error)


def _stop_and_join(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join()
