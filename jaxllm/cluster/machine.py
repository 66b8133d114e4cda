"""Which machine this is."""

import socket
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """The same text for all processes of one machine, and another for every other machine."""
    try:
        return _BOOT.read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()
