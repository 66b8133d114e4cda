"""The compile plan: every executable the engine will ever run, known before the start, compiled in the background."""

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, runtime_checkable

from jaxllm.engine.device.compile_queue import CompileQueue, Job
from jaxllm.engine.device.own_settings import own_settings
from jaxllm.engine.host_memory import give_back
from jaxllm.errors import EngineDeadError

log = logging.getLogger(__name__)

_NICE = 19  # priority of the thread that compiles what nobody waits for
_IDLE_S = 0.3  # without a step, after which nobody's request is under way
_POLL_S = 0.1
_QUICKER = 3  # times as fast is what is compiled quickly


@runtime_checkable
class Elsewhere(Protocol):
    """Other processes that compile the same."""

    @property
    def compiled(self) -> Set[Hashable]:
        """What all of them have."""
        ...

    def want(self, names: Sequence[Hashable], *, is_awaited: bool) -> None: ...
    def wait_compiled(self, names: Sequence[Hashable], tick: Callable[[], None]) -> None:
        """Blocks until all of them have `names`. Raises as `CompilePlan.wait`."""


class CompilePlan:
    """Compiles `jobs` (name -> a function that lowers), in a few threads, each one job at a time.

    One compiles at once what is `first`, what someone waits for, and what `want` names. Another helps it with what
    someone waits for, as the engine stands still then. The third, at low priority, goes through the rest in the order
    of `jobs` while the others have nothing to do: when the engine idles, and while it steps for no more than `share` of
    the time. A fourth compiles what is `ahead` until the first step, and goes on with what it has at low priority; it
    leaves that where executables are not compiled, but at hand.

    `compile` makes an executable of what is lowered. `compile_quickly` makes one sooner, and tells whether it is the
    same: one that is not is in its place until the third thread has made that, or until `wait_all`.

    An executable accepts only the shapes, dtypes and shardings it was compiled for: anything else raises a TypeError
    that names the argument, so nothing ever compiles behind the engine's back.

    A job that fails is tried once more (see `CompileQueue`); the engine goes on without what failed twice.
    """

    def __init__(
        self,
        jobs: Mapping[Hashable, Job],
        check: Callable[[Hashable, Any], None] = lambda name, compiled: None,
        *,
        compile: Callable[[Any], Any] = lambda lowered: lowered.compile(),
        compile_quickly: Callable[[Any], tuple[Any, bool]] | None = None,
        first: Collection[Hashable] = (),
        ahead: Collection[Hashable] = (),
        share: float = 1.0,
    ):
        self._check, self._share = check, share
        self._compile, self._compile_quickly = compile, compile_quickly
        self._queue = CompileQueue(jobs, first, ahead)
        self.seconds = self.longest_s = 0.0  # of all executables, and of the one that took longest
        self.waited_at = 0.0  # time.monotonic() when someone last waited for an executable: no hang, but work
        self._elsewhere: Elsewhere | None = None
        self._has_stepped = False
        self._is_trimmed = True  # whether what compiling took, and is free, went back to the system
        self._is_stepping, self._active_at = True, time.monotonic()  # until the parameters are there
        self._rest_at = 0.0  # time.monotonic() from which the rest may go on beside steps
        self._changed = threading.Condition()
        self._stop = threading.Event()
        *_, self._thread_ahead = threads = [
            threading.Thread(target=target, args=args, name=f"jaxllm-compile{name}", daemon=True)
            for name, target, args in (
                ("", self._run, (self._queue.next_wanted, 0)),
                ("-help", self._run, (self._queue.next_awaited, 0)),
                ("-rest", self._run, (self._next_of_rest, _NICE)),
                ("-ahead", self._run_ahead, ()),
            )
        ]
        # At the latest when Python exits.
        self._close = weakref.finalize(self, _stop_and_join, self._stop, self._changed, threads)
        for thread in threads:
            thread.start()

    @property
    def names(self) -> tuple[Hashable, ...]:
        return self._queue.names

    @property
    def total(self) -> int:
        return len(self.names)

    def join(self, elsewhere: Elsewhere) -> None:
        """From now on an executable is ready once other processes have it too."""
        self._elsewhere = elsewhere

    @property
    def num_done(self) -> int:
        done = self._queue.done
        return len(done if self._elsewhere is None else done.keys() & self._elsewhere.compiled)

    @property
    def num_failed(self) -> int:
        """Executables that failed twice: the engine has to do without them."""
        return len(self._queue.failures)

    @property
    def compiled(self) -> list[Hashable]:
        """What this process has, in the order that it came."""
        return list(self._queue.done)

    @property
    def failures(self) -> dict[Hashable, Exception]:
        """What this process has to do without, and why."""
        return dict(self._queue.failures)

    def ready(self, name: Hashable) -> bool:
        return name in self._queue.done and (self._elsewhere is None or name in self._elsewhere.compiled)

    def is_passing(self, name: Hashable) -> bool:
        """Whether it was compiled quickly, and another one will take its place."""
        return name in self._queue.passing

    def awaited(self, name: Hashable) -> Callable:
        """The executable, once it is compiled."""
        self.wait([name])
        return self[name]

    def __getitem__(self, name: Hashable) -> Any:
        return self._queue.done[name]

    def wait(self, names: Sequence[Hashable], tick: Callable[[], None] = lambda: None) -> None:
        """Blocks until all `names` are there, calling `tick` now and then. Raises `EngineDeadError`, its cause the
        compiler's error, if one of them failed twice, and `ValueError` if there is none of a name."""
        if all(map(self.ready, names)):
            return tick()
        if self._elsewhere is not None:
            self._elsewhere.want(names, is_awaited=True)
        with self._changed, self._wait_for(names):
            while not all(name in self._queue.done for name in names):
                self._queue.raise_failures(names)
                self._sleep(tick)
        if self._elsewhere is not None:
            self._elsewhere.wait_compiled(names, partial(self._waiting, tick))
        tick()

    def settle(self, names: Sequence[Hashable]) -> None:
        """Blocks until nothing is left to try for any of `names` here, whatever came of it."""
        if self._elsewhere is not None:
            self._elsewhere.want(names, is_awaited=True)
        with self._changed, self._wait_for(names):
            while not self._queue.jobs.keys().isdisjoint(names) and not self._stop.is_set():
                self._changed.wait(_POLL_S)
                self.waited_at = time.monotonic()

    def wait_all(self) -> None:
        """Blocks until nothing is left to compile. Raises like `wait`."""
        self._queue.awaits_all = True
        self.want(self.names)
        with self._changed:
            while not self._queue.is_over:
                self._sleep(lambda: None)
            self._queue.raise_failures(self.names)
        if self._elsewhere is not None:
            self._elsewhere.wait_compiled(self.names, self._waiting)

    def want(self, names: Sequence[Hashable], *, is_awaited: bool = False) -> None:
        """Has `names` compiled next, and waits for none of them; `is_awaited`: somebody else does."""
        if self._elsewhere is not None:
            self._elsewhere.want(names, is_awaited=is_awaited)
        with self._changed:
            self._queue.want(names, is_awaited=is_awaited)
            self._changed.notify_all()

    def stepped(self, *, is_stepping: bool) -> None:
        """Notes that the engine did something just now, and whether a step is still in flight."""
        self._is_stepping, self._active_at = is_stepping, time.monotonic()
        if is_stepping and not self._has_stepped:
            self._has_stepped = True
            if self._thread_ahead.is_alive():
                _lower_priority(_NICE, self._thread_ahead)

    def close(self) -> None:
        """Stops after the executables being compiled, which can't be interrupted."""
        self._close()

    def abandon(self) -> None:
        """As `close`, without waiting for the executables being compiled."""
        self._stop.set()

    @contextmanager
    def _wait_for(self, names: Collection[Hashable]) -> Iterator[None]:
        with self._queue.wait_for(names):
            self._changed.notify_all()
            yield

    def _sleep(self, tick: Callable[[], None]) -> None:
        if self._stop.is_set():
            raise EngineDeadError("the engine was closed while it compiled")
        self._changed.wait(_POLL_S)
        self._waiting(tick)

    def _waiting(self, tick: Callable[[], None] = lambda: None) -> None:
        self.waited_at = time.monotonic()
        tick()

    def _run(self, take: Callable[[], Hashable | None], nice: int) -> None:
        if nice:
            _lower_priority(nice, threading.current_thread())
        while (name := self._take(take)) is not None:
            self._do(name)

    def _run_ahead(self) -> None:
        while not self._has_stepped:
            with self._changed:
                name = None if self._stop.is_set() else self._queue.next_ahead()
                if name is None:
                    return
                self._queue.compiling.add(name)
            self._do(name)
            if self.ready(name) and not self.is_passing(name):
                return  # executables are at hand, and soon there once they are asked for

    def _do(self, name: Hashable) -> None:
        self._is_trimmed = False
        start = time.perf_counter()
        compiled, passing, error = None, None, None
        try:
            with own_settings():
                compiled, passing = self._make(name)
            self._check(name, compiled)
        except Exception as raised:  # noqa: BLE001 - whatever the compiler raises is told to those who wait
            error = raised
        with self._changed:
            self._finish(name, compiled, passing, error, time.perf_counter() - start)
            self._changed.notify_all()
        if not self._queue.is_left or self._is_idle:
            self._trim()

    def _make(self, name: Hashable) -> tuple[Any, Any]:
        """The executable, and what it was lowered to if that is to be compiled once more."""
        if (lowered := self._queue.passing.get(name)) is not None:
            return self._compile(lowered), None
        with self._changed:
            is_urgent = self._queue.is_urgent(name)
        lowered = self._queue.jobs[name]()
        if self._compile_quickly is None or not is_urgent:
            return self._compile(lowered), None
        compiled, is_same = self._compile_quickly(lowered)
        return compiled, None if is_same else lowered

    @property
    def _is_idle(self) -> bool:
        return not self._is_stepping and time.monotonic() >= self._active_at + _IDLE_S

    def _trim(self) -> None:
        if not self._is_trimmed:
            self._is_trimmed = True
            give_back()

    def _take(self, take: Callable[[], Hashable | None]) -> Hashable | None:
        """The next job of a thread, once there is one; None when all are done, or the plan is closed."""
        with self._changed:
            while self._queue.is_left and not self._stop.is_set():
                if (name := take()) is not None:
                    self._queue.compiling.add(name)
                    return name
                self._changed.wait(_POLL_S)
        return None

    def _next_of_rest(self) -> Hashable | None:
        """One of the rest if now is the time for it."""
        is_time = self._is_idle or time.monotonic() >= self._rest_at
        return self._queue.next_of_rest() if is_time else None

    def _finish(self, name: Hashable, compiled: Any, passing: Any, error: Exception | None, seconds: float) -> None:
        self.seconds += seconds
        self.longest_s = max(self.longest_s, seconds)
        whole = seconds if passing is None else _QUICKER * seconds
        self._rest_at = time.monotonic() + whole * (1 / self._share - 1)
        if self._queue.is_awaited(name):
            self._active_at = time.monotonic()  # whoever waits is about to step
        self._queue.finish(name, compiled, passing, error)


def _stop_and_join(stop: threading.Event, changed: threading.Condition, threads: Sequence[threading.Thread]) -> None:
    stop.set()
    with changed:
        changed.notify_all()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def _lower_priority(nice: int, thread: threading.Thread) -> None:
    """Of a thread that runs, where threads have one of their own: a step's threads go before it."""
    if sys.platform == "linux" and thread.native_id is not None:
        try:
            os.setpriority(os.PRIO_PROCESS, thread.native_id, nice)
        except OSError as error:  # a sandbox may forbid it
            log.info("executables are compiled at the process's priority: %s", error)
