"""The machine's memory, as far as this process may use it: containers have less than the machine."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
_V1, _V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


def machine_bytes() -> int:
    """Of the machine, or of the container; the same at each start."""
    return min([_physical_bytes(), *(limit for limit, _ in _limits())])


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> int:
    """What could be allocated now without swapping, other programs' caches included. All where the system does not
    tell."""
    total = machine_bytes()
    return min([_available(total), *(max(0, limit - used) for limit, used in _limits())])


def swap_free_bytes() -> int:
    """Of the system's swap space; 0 in a container with a limit, whose share of it is not known."""
    return 0 if machine_bytes() < _physical_bytes() else _meminfo().get("SwapFree", 0)


def give_back() -> None:
    """Returns to the system what the C library holds of memory that is free: after loading and compiling that is more
    than a hundred megabytes, as it has an arena for each thread. Nothing where it is not glibc."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _available(total: int) -> int:
    return _meminfo().get("MemAvailable", total)


def _meminfo() -> dict[str, int]:
    """Bytes by name; empty where the system is not Linux."""
    try:
        lines = (PROC / "meminfo").read_text().splitlines()
    except OSError:
        return {}
    values = (line.split(":", 1) for line in lines if ":" in line)
    return {name: int(value.split()[0]) * 1024 for name, value in values if value.split()}


def _limits() -> Iterator[tuple[int, int]]:
    """The limit and the use, caches of files left out, of each control group around this process; in bytes."""
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, (limit, use) = (CGROUP / "memory", _V1) if controllers else (CGROUP, _V2)
        inner = PurePosixPath(path.lstrip("/"))
        for folder in (root / inner, *(root / parent for parent in inner.parents)):
            most, used = _number(folder / limit), _number(folder / use)
            if most is not None:
                yield most, (used or 0) - _file_cache(folder)


def _number(file: Path) -> int | None:
    """None for "max", and where the file is not: in a container the path may be that of the machine outside."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _file_cache(folder: Path) -> int:
    """Bytes of cached files, which the kernel gives up for memory that is asked for."""
    try:
        values = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return int(values.get("inactive_file", 0))
