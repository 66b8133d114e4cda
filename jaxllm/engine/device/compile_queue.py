"""What is left to compile, in which order, and what came of the rest. Its owner holds a lock."""

import itertools
import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxllm.errors import EngineDeadError

log = logging.getLogger(__name__)

Job = Callable[[], Any]  # returns a `jax.stages.Lowered`


class CompileQueue:
    """Jobs by name, of which some are awaited, some wanted (`first` from the beginning), and some `ahead` of that.

    A job that fails is tried once more, after all others or as soon as someone waits for it."""

    def __init__(self, jobs: Mapping[Hashable, Job], first: Collection[Hashable], ahead: Collection[Hashable]):
        self.names = tuple(jobs)
        self.jobs = dict(jobs)  # left to do
        self.done: dict[Hashable, Any] = {}
        self.passing: dict[Hashable, Any] = {}  # of those, what was compiled quickly, as it was lowered
        self.failures: dict[Hashable, Exception] = {}  # failed twice
        self.compiling: set[Hashable] = set()
        self.awaits_all = False
        self._retries: set[Hashable] = set()  # failed once
        self._awaited_elsewhere: set[Hashable] = set()
        self._awaited: list[Collection[Hashable]] = [self._awaited_elsewhere]  # by those who wait
        self._wanted, self._ahead = dict.fromkeys(first), ahead

    @property
    def is_left(self) -> bool:
        """Whether anything is left to compile."""
        return bool(self.jobs or self.passing)

    @property
    def is_over(self) -> bool:
        """Whether nothing is, not even once more."""
        return len(self.done) + len(self.failures) == len(self.names) and not self.passing

    @contextmanager
    def wait_for(self, names: Collection[Hashable]) -> Iterator[None]:
        self._awaited.append(names)
        try:
            yield
        finally:
            self._awaited.remove(names)

    def is_awaited(self, name: Hashable) -> bool:
        return any(name in names for names in self._awaited)

    def want(self, names: Collection[Hashable], *, is_awaited: bool) -> None:
        if is_awaited:
            self._awaited_elsewhere |= set(names)
        self._wanted |= dict.fromkeys(names)

    def is_urgent(self, name: Hashable) -> bool:
        """Whether it should be there as soon as it can be, and once more later."""
        is_wanted = name in self._wanted or name in self._ahead or self.is_awaited(name)
        return is_wanted and not self.awaits_all and name not in self._retries

    def raise_failures(self, names: Collection[Hashable]) -> None:
        """Raises as `CompilePlan.wait`."""
        for name in names:
            if name not in self.names:
                raise ValueError(f"there is no executable {name!r}")
            if name in self.failures:
                error = self.failures[name]
                raise EngineDeadError(f"compiling {name} failed twice: {error}") from error

    def next_awaited(self) -> Hashable | None:
        free = self._free
        return next((name for names in self._awaited for name in names if name in free), None)

    def next_wanted(self) -> Hashable | None:
        """What someone waits for, or else what is wanted; a wanted one that failed before is left for later."""
        if (awaited := self.next_awaited()) is not None:
            return awaited
        free = self._free - self._retries
        wanted = (name for name in self._wanted if name in free)
        passing = (name for name in self.passing if name not in self.compiling) if self.awaits_all else ()
        return next(itertools.chain(wanted, passing), None)

    def next_ahead(self) -> Hashable | None:
        free = self._free - self._retries
        return next((name for name in self._ahead if name in free), None)

    def next_of_rest(self) -> Hashable | None:
        """The first of the rest, where nothing is compiled or wanted; before all what takes another's place, of what
        was wanted last, and last one that failed before."""
        if self.compiling or self.next_wanted() is not None:
            return None
        rest = (name for name in self.jobs if name not in self._retries)
        return next(itertools.chain(reversed(self.passing), rest, self.jobs), None)

    def finish(self, name: Hashable, compiled: Any, passing: Any, error: Exception | None) -> None:
        """Notes what came of it: `compiled`, and if that was quick `passing`, what it was lowered to; or an error."""
        self.compiling.remove(name)
        if error is None:
            self.done[name] = compiled
        if self.passing.pop(name, None) is not None:
            if error is not None:
                log.warning("compiling %s once more failed; it stays as it is: %s", name, error)
            return
        if passing is not None:
            self.passing[name] = passing
        if error is not None:
            self._note(name, error)
        if error is None or name in self.failures:
            del self.jobs[name]

    @property
    def _free(self) -> set[Hashable]:
        return self.jobs.keys() - self.compiling

    def _note(self, name: Hashable, error: Exception) -> None:
        if name not in self._retries:
            self._retries.add(name)
            log.warning("compiling %s failed and is tried once more after the others: %s", name, error)
        else:
            self.failures[name] = error
            log.error("compiling %s failed twice; the engine goes on without it: %s", name, error)
