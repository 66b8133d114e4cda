"""What the profiler saw: when the device was busy, and which calls of the driver a step made."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

HOST_GAP_NS = 10_000  # a pause of the device longer than this is the host's; between two kernels of a graph it is 1 µs
ProfileData = Any  # jax.profiler's, which pyright can't read
_DRIVER_CALL = re.compile(r"cu[A-Z]\w+")


@dataclass
class Busy:
    """Shares of the time from the first to the last kernel of a trace."""

    window_s: float
    idle_share: float  # in pauses longer than `HOST_GAP_NS`
    gap_share: float  # in shorter ones
    kernels: int  # and copies


def profile(run: Callable[[], Any]) -> ProfileData:
    """The trace of `run`, without Python's calls."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    with TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            run()
        (path,) = Path(directory).rglob("*.xplane.pb")
        return jax.profiler.ProfileData.from_serialized_xspace(path.read_bytes())


def device_busy(data: ProfileData) -> Busy | None:
    """How busy the first GPU was; None if the trace has none."""
    planes = [plane for plane in data.planes if plane.name.startswith("/device:GPU:")]
    if not planes:
        return None
    lines = list(planes[0].lines)
    streams = [line for line in lines if line.name.startswith("Stream")] or lines
    events = [(e.start_ns, e.start_ns + e.duration_ns) for line in streams for e in line.events]
    return busy_of(events) if events else None


def busy_of(events: Sequence[tuple[float, float]]) -> Busy:
    """Of (begin, end) in ns, which may overlap."""
    ordered = sorted(events)
    idle, gaps, until = 0.0, 0.0, ordered[0][0]
    for begin, end in ordered:
        pause = max(0.0, begin - until)
        if pause > HOST_GAP_NS:
            idle += pause
        else:
            gaps += pause
        until = max(until, end)
    window = max(until - ordered[0][0], 1.0)
    return Busy(window / 1e9, idle / window, gaps / window, len(events))


def driver_calls(data: ProfileData, steps: int) -> dict[str, float]:
    """Calls of the CUDA driver a step, by name, the most frequent first."""
    planes = [plane for plane in data.planes if plane.name.startswith("/host:")]
    names = (e.name for plane in planes for line in plane.lines for e in line.events)
    calls = Counter(found[0] for name in names if (found := _DRIVER_CALL.match(name)))
    return {name: round(count / steps, 2) for name, count in calls.most_common()}
