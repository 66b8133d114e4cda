"""The compile plan: every executable the engine will ever run, known before the start, compiled in the background."""

import itertools
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

from jaxllm.engine.device.own_settings import own_settings
from jaxllm.engine.host_memory import give_back
from jaxllm.errors import EngineDeadError

log = logging.getLogger(__name__)

_NICE = 19  # priority of the thread that compiles what nobody waits for
_IDLE_S = 0.3  # without a step, after which nobody's request is under way
_POLL_S = 0.1
_QUICKER = 3  # times as fast is what is compiled quickly

Job = Callable[[], Any]  # returns a `jax.stages.Lowered`


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

    A job that fails is tried once more, after all others or as soon as someone waits for it. The engine goes on
    without an executable that failed twice.
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
        self.names = tuple(jobs)
        self.seconds = self.longest_s = 0.0  # of all executables, and of the one that took longest
        self.waited_at = 0.0  # time.monotonic() when someone last waited for an executable: no hang, but work
        self._elsewhere: Elsewhere | None = None
        self._jobs = dict(jobs)  # left to do
        self._done: dict[Hashable, Any] = {}
        self._passing: dict[Hashable, Any] = {}  # of those, what was compiled quickly, as it was lowered
        self._awaits_all = False
        self._retries: set[Hashable] = set()  # failed once
        self._failures: dict[Hashable, Exception] = {}  # failed twice
        self._awaited_elsewhere: set[Hashable] = set()
        self._awaited: list[Collection[Hashable]] = [self._awaited_elsewhere]  # by those who wait
        self._wanted = dict.fromkeys(first)
        self._ahead = ahead
        self._has_stepped = False
        self._compiling: set[Hashable] = set()
        self._is_trimmed = True  # whether what compiling took, and is free, went back to the system
        self._is_stepping, self._active_at = True, time.monotonic()  # until the parameters are there
        self._rest_at = 0.0  # time.monotonic() from which the rest may go on beside steps
        self._changed = threading.Condition()
        self._stop = threading.Event()
        *_, self._thread_ahead = threads = [
            threading.Thread(target=target, args=args, name=f"jaxllm-compile{name}", daemon=True)
            for name, target, args in (
                ("", self._run, (self._next_wanted, 0)),
                ("-help", self._run, (self._next_awaited, 0)),
                ("-rest", self._run, (self._next_of_rest, _NICE)),
                ("-ahead", self._run_ahead, ()),
            )
        ]
        # At the latest when Python exits.
        self._close = weakref.finalize(self, _stop_and_join, self._stop, self._changed, threads)
        for thread in threads:
            thread.start()

    @property
    def total(self) -> int:
        return len(self.names)

    def join(self, elsewhere: Elsewhere) -> None:
        """From now on an executable is ready once other processes have it too."""
        self._elsewhere = elsewhere

    @property
    def num_done(self) -> int:
        return len(self._done if self._elsewhere is None else self._done.keys() & self._elsewhere.compiled)

    @property
    def num_failed(self) -> int:
        """Executables that failed twice: the engine has to do without them."""
        return len(self._failures)

    @property
    def compiled(self) -> list[Hashable]:
        """What this process has, in the order that it came."""
        return list(self._done)

    @property
    def failures(self) -> dict[Hashable, Exception]:
        """What this process has to do without, and why."""
        return dict(self._failures)

    def ready(self, name: Hashable) -> bool:
        return name in self._done and (self._elsewhere is None or name in self._elsewhere.compiled)

    def is_passing(self, name: Hashable) -> bool:
        """Whether it was compiled quickly, and another one will take its place."""
        return name in self._passing

    def awaited(self, name: Hashable) -> Callable:
        """The executable, once it is compiled."""
        self.wait([name])
        return self[name]

    def __getitem__(self, name: Hashable) -> Any:
        return self._done[name]

    def wait(self, names: Sequence[Hashable], tick: Callable[[], None] = lambda: None) -> None:
        """Blocks until all `names` are there, calling `tick` now and then. Raises `EngineDeadError`, its cause the
        compiler's error, if one of them failed twice, and `ValueError` if there is none of a name."""
        if all(map(self.ready, names)):
            return tick()
        if self._elsewhere is not None:
            self._elsewhere.want(names, is_awaited=True)
        with self._changed, self._wait_for(names):
            while not all(name in self._done for name in names):
                self._raise_failures(names)
                self._sleep(tick)
        if self._elsewhere is not None:
            self._elsewhere.wait_compiled(names, partial(self._waiting, tick))
        tick()

    def settle(self, names: Sequence[Hashable]) -> None:
        """Blocks until nothing is left to try for any of `names` here, whatever came of it."""
        if self._elsewhere is not None:
            self._elsewhere.want(names, is_awaited=True)
        with self._changed, self._wait_for(names):
            while not self._jobs.keys().isdisjoint(names) and not self._stop.is_set():
                self._changed.wait(_POLL_S)
                self.waited_at = time.monotonic()

    def wait_all(self) -> None:
        """Blocks until nothing is left to compile. Raises like `wait`."""
        self._awaits_all = True
        self.want(self.names)
        with self._changed:
            while len(self._done) + self.num_failed < self.total or self._passing:
                self._sleep(lambda: None)
            self._raise_failures(self.names)
        if self._elsewhere is not None:
            self._elsewhere.wait_compiled(self.names, self._waiting)

    def want(self, names: Sequence[Hashable], *, is_awaited: bool = False) -> None:
        """Has `names` compiled next, and waits for none of them; `is_awaited`: somebody else does."""
        if self._elsewhere is not None:
            self._elsewhere.want(names, is_awaited=is_awaited)
        with self._changed:
            if is_awaited:
                self._awaited_elsewhere |= set(names)
            self._wanted |= dict.fromkeys(names)
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
        self._awaited.append(names)
        self._changed.notify_all()
        try:
            yield
        finally:
            self._awaited.remove(names)

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
        for name in self._ahead:
            with self._changed:
                if self._has_stepped or self._stop.is_set():
                    return
                if name not in self._jobs or name in self._compiling:
                    continue
                self._compiling.add(name)
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
        if not self._is_left or self._is_idle:
            self._trim()

    def _make(self, name: Hashable) -> tuple[Any, Any]:
        """The executable, and what it was lowered to if that is to be compiled once more."""
        if (lowered := self._passing.get(name)) is not None:
            return self._compile(lowered), None
        with self._changed:
            is_wanted = any(name in names for names in (self._wanted, self._ahead, *self._awaited))
            is_urgent = is_wanted and not self._awaits_all and name not in self._retries
        lowered = self._jobs[name]()
        if self._compile_quickly is None or not is_urgent:
            return self._compile(lowered), None
        compiled, is_same = self._compile_quickly(lowered)
        return compiled, None if is_same else lowered

    @property
    def _is_left(self) -> bool:
        """Whether anything is left to compile."""
        return bool(self._jobs or self._passing)

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
            while self._is_left and not self._stop.is_set():
                if (name := take()) is not None:
                    self._compiling.add(name)
                    return name
                self._changed.wait(_POLL_S)
        return None

    def _next_wanted(self) -> Hashable | None:
        """What someone waits for, or else what is wanted; a wanted one that failed before is left for later."""
        if (awaited := self._next_awaited()) is not None:
            return awaited
        free = self._jobs.keys() - self._compiling
        wanted = (name for name in self._wanted if name in free - self._retries)
        passing = (name for name in self._passing if name not in self._compiling) if self._awaits_all else ()
        return next(itertools.chain(wanted, passing), None)

    def _next_awaited(self) -> Hashable | None:
        free = self._jobs.keys() - self._compiling
        return next((name for names in self._awaited for name in names if name in free), None)

    def _next_of_rest(self) -> Hashable | None:
        """The first of the rest if now is the time for it; before all what takes another's place, of what was wanted
        last, and last one that failed before."""
        is_time = self._is_idle or time.monotonic() >= self._rest_at
        if self._compiling or self._next_wanted() is not None or not is_time:
            return None
        rest = (name for name in self._jobs if name not in self._retries)
        return next(itertools.chain(reversed(self._passing), rest, self._jobs), None)

    def _finish(self, name: Hashable, compiled: Any, passing: Any, error: Exception | None, seconds: float) -> None:
        self.seconds += seconds
        self.longest_s = max(self.longest_s, seconds)
        whole = seconds if passing is None else _QUICKER * seconds
        self._rest_at = time.monotonic() + whole * (1 / self._share - 1)
        self._compiling.remove(name)
        if any(name in names for names in self._awaited):
            self._active_at = time.monotonic()  # whoever waits is about to step
        if error is None:
            self._done[name] = compiled
        if self._passing.pop(name, None) is not None:
            if error is not None:
                log.warning("compiling %s once more failed; it stays as it is: %s", name, error)
            return
        if passing is not None:
            self._passing[name] = passing
        if error is not None:
            self._note(name, error)
        if error is None or name in self._failures:
            del self._jobs[name]

    def _note(self, name: Hashable, error: Exception) -> None:
        if name not in self._retries:
            self._retries.add(name)
            log.warning("compiling %s failed and is tried once more after the others: %s", name, error)
        else:
            self._failures[name] = error
            log.error("compiling %s failed twice; the engine goes on without it: %s", name, error)


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
