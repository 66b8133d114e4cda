"""What is said on stderr."""

import contextlib
import sys


def say(text: str) -> None:
    """Prints it. If the disk is full, the reader has gone or it is closed, it is lost, and nothing else: a server goes
    on."""
    with contextlib.suppress(OSError):
        if sys.stderr is not None:  # print would take standard output
            print(text, file=sys.stderr, flush=True)
