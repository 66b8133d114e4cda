"""Signals held back while something must not stop halfway."""

import os
import signal
import threading
from typing import Any


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
        if threading.get_ident() == threading.main_thread().ident:
            for number in self._numbers:
                previous = signal.getsignal(number)
                is_held = isinstance(getattr(previous, "__self__", None), HeldSignals)
                if not (is_held or previous is None or previous == signal.SIG_IGN):
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
