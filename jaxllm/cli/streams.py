"""Standard output and standard error that are closed, or whose reader has gone."""

import os
import sys
from typing import TextIO

EXIT_CLOSED_PIPE = 141  # as a shell reports SIGPIPE


def replace_closed(*, prints: bool) -> None:
    """Has /dev/null stand in for streams that are closed. `prints`: whether standard output is wanted; then it must be
    there, or it is a `ValueError`."""
    if sys.stderr is None:
        sys.stderr = _stand_in(2)
    if sys.stdout is None and prints:
        raise ValueError("standard output is closed, and the results would go there; redirect it, as in >/dev/null")
    if sys.stdout is None:
        sys.stdout = _stand_in(1)


def _stand_in(number: int) -> TextIO:
    """Takes the stream's descriptor too: a file opened later would get it, and what libraries in C++ print there."""
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.set_inheritable(number, True)  # for child processes, as it is not if it is `null` itself
        if null != number:
            os.close(null)
        return open(number, "w", closefd=False)
    return open(os.devnull, "w")  # the descriptor is a file's already


def flushed(code: int) -> int:
    """The exit code: `code`, or 141 if the reader of standard output has gone."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        return reader_gone()
    return code


def reader_gone() -> int:
    """The exit code. Without this, Python reports an error when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_CLOSED_PIPE
