"""Signals held back while something must not stop halfway."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_IMPORT_SYSTEM = "<frozen importlib"  # how the names of its files begin
_JAX = "/jax/_src/"  # in the names of its files
_OF_JAX = {  # functions that are not to be broken off
    "_init_backend",  # hangs at Python's end, or leaves a timer by which that comes a minute later
    "discover_pjrt_plugins",  # prints a traceback, and goes on
    "_xla_gc_callback",  # this and those below go on
    "FlatTree.paths",
    "HashableWrapper.__init__",
    "_is_ref",
    "broadcast_shapes",
    "is_constant_dim",
}
_HOOK = "no_lost_interrupt.<locals>.hook"  # which would lose it once more
_LATER_S = 0.05


def _press_later(delay_s: float, press: Callable[[], None] | None = None) -> threading.Timer:
    """Ctrl-C once more, after a while. Unlike an exception, a signal wakes a sleeping call."""
    timer = threading.Timer(delay_s, press or _press)
    timer.daemon = True
    timer.start()
    return timer


def _press() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class HeldSignals:
    """Notes the first of the given signals instead of letting it act; a second raises `KeyboardInterrupt` at once.

    Handlers exist in the main thread only, so anywhere else this does nothing. Neither does it hold a signal that is
    ignored, handled outside Python, or held already by another of these. `notice` goes to standard error with the
    first.
    """

    def __init__(self, *numbers: int, notice: bytes = b""):
        self.signal: int | None = None  # the one that came
        self._numbers, self._notice = numbers, notice
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "HeldSignals":
        if _in_main_thread():
            for number in self._numbers:
                previous = signal.getsignal(number)
                if not (_owner(previous, HeldSignals) or previous is None or previous == signal.SIG_IGN):
                    self._previous[number] = previous
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def act(self) -> None:
        """Lets the signal that was noted act after all: a Ctrl-C raises `KeyboardInterrupt`, unless the program says
        otherwise. To be called afterwards."""
        number, self.signal = self.signal, None
        if number is None:
            return
        handler = self._previous[number]
        if callable(handler):
            handler(number, None)
        else:
            signal.raise_signal(number)

    def _note(self, number: int, frame: Any) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        if self._notice:
            os.write(2, self._notice)  # print may be in the middle


class WholeImports:
    """Has Ctrl-C wait while modules are imported: in the middle of that, extension modules crash, or lose it. So it
    does in functions of JAX's that lose it, or hang. A second one acts at once.

    As `HeldSignals`, it does nothing in other threads, where Ctrl-C is ignored or not Python's, or where it is held.
    """

    def __init__(self) -> None:
        self._previous: Any = None
        self._timer: threading.Timer | None = None  # of a Ctrl-C that waits
        self._outer: FrameType | None = None  # which may itself be part of an import

    def __enter__(self) -> "WholeImports":
        previous = signal.getsignal(signal.SIGINT)
        if _in_main_thread() and callable(previous) and not _owner(previous, HeldSignals):
            self._previous, self._outer = previous, sys._getframe(1)
            signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is None:
            return
        try:
            if self._timer is not None:
                self._act(None)
        finally:
            signal.signal(signal.SIGINT, self._previous)
            self._outer = None  # which has this object

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Sets the previous handler meanwhile."""
        ours = signal.signal(signal.SIGINT, self._previous)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, ours)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._timer is None and self._must_end(frame):
            self._timer = _press_later(_LATER_S, self._again)
        else:
            self._act(frame)

    def _again(self) -> None:
        self._timer = None
        _press()

    def _act(self, frame: FrameType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._previous(signal.SIGINT, frame)

    def _must_end(self, frame: FrameType | None) -> bool:
        while frame is not None and frame is not self._outer:
            name, file = frame.f_code.co_qualname, frame.f_code.co_filename
            if file.startswith(_IMPORT_SYSTEM) or (name in _OF_JAX and _JAX in file) or name == _HOOK:
                return True
            frame = frame.f_back
        return False


@contextmanager
def no_lost_interrupt() -> Iterator[None]:
    """Repeats a Ctrl-C that Python drops because it arrives in a finalizer."""

    def hook(dropped: Any) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            _press_later(0.01)  # so that it does not arrive in this hook, as a rule
        else:
            previous(dropped)

    previous, sys.unraisablehook = sys.unraisablehook, hook
    try:
        yield
    finally:
        sys.unraisablehook = previous


@contextmanager
def asyncios_interrupts() -> Iterator[None]:
    """For `asyncio.run`: it makes a cancellation of Ctrl-C, which breaks off no import either, but only where the
    handler is Python's own. So `WholeImports` steps aside."""
    whole = _owner(signal.getsignal(signal.SIGINT), WholeImports)
    if whole is None or not _in_main_thread():
        yield
        return
    with whole.aside():
        yield


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _owner(handler: Any, kind: type) -> Any:
    """The object of class `kind` whose method `handler` is."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, kind) else None
