"""Progress of a download, in bytes of all its files: a bar in a terminal, else a line now and then."""

import sys
import threading
import time
from collections.abc import Callable
from io import TextIOBase
from typing import Any

from tqdm import tqdm

INTERVAL_S = 10.0  # between two lines


class DownloadStopped(Exception):
    """Ends a file's download, as another failed or the user pressed Ctrl-C."""


class DownloadProgress:
    """Counts bytes from any thread. As a context manager it closes its bar."""

    def __init__(
        self, label: str, total: int, stream: TextIOBase | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._label, self._total, self._clock = label, total, clock
        self._stream = sys.stderr if stream is None else stream
        self._lock = threading.Lock()
        self._num_bytes, self._is_stopped = 0, False
        self._start_s = self._line_s = clock()
        is_terminal = self._stream is not None and self._stream.isatty()
        self._bar = tqdm(total=total, desc=label, unit="B", unit_scale=True, file=self._stream) if is_terminal else None

    def __enter__(self) -> "DownloadProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def stop(self) -> None:
        """Makes each file's download end at its next bytes."""
        self._is_stopped = True

    def add(self, num_bytes: int) -> None:
        """Raises `DownloadStopped` after `stop`."""
        if self._is_stopped:
            raise DownloadStopped
        with self._lock:
            self._num_bytes += num_bytes
            if self._bar is not None:
                self._bar.update(num_bytes)
            elif self._stream is not None and self._clock() - self._line_s >= INTERVAL_S:
                self._line_s = self._clock()
                print(self._line(), file=self._stream, flush=True)

    def _line(self) -> str:
        speed = self._num_bytes / (self._line_s - self._start_s)
        share = self._num_bytes / max(self._total, 1)
        return f"{self._label}: {size(self._num_bytes)} of {size(self._total)} ({share:.0%}), {size(speed)}/s"

    def bar_class(self) -> type:
        """A class with as much of tqdm's interface as huggingface_hub needs to report one file."""
        progress = self

        class FileBar:
            def __init__(self, *_: Any, initial: int = 0, **__: Any):
                progress.add(initial)  # bytes of an earlier attempt

            def __enter__(self) -> "FileBar":
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def close(self) -> None:
                pass

            def update(self, n: int | float | None = 1) -> None:
                progress.add(int(n or 0))

            def update_transfer(self, n: int | float | None = 1) -> None:
                """Bytes on the wire, which may be fewer than those of the file: not counted."""

            def set_postfix_str(self, *_: Any, **__: Any) -> None:
                pass

            def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None:
                pass

        return FileBar


def size(num_bytes: int | float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"
