"""What is said on stderr."""

import contextlib
import sys


def say(text: str) -> None:
    """Prints it. If the disk is full or the reader has gone, it is lost, and nothing else: a server goes on."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
