"""What there is to run, the most valuable first."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Section:
    """`function` is "module:name" of a callable (record, small) -> one line for people, run in its own process."""

    name: str
    function: str
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)

    def least_s(self) -> float:
        """With less time than this left it is not worth starting."""
        return self.limit_s / 4


_HERE = "benchmarks.on_gpu"
# What XLA says of its graphs when it updates them.
_GRAPH_LOG = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "command_executor=3,command_buffer_thunk=3"}
# Without it XLA runs no graphs while a profiler does.
PROFILED_GRAPHS = "xla_enable_command_buffers_during_profiling"
SECTIONS = (
    Section("machine", f"{_HERE}.machine:run", 120),
    Section("attention", f"{_HERE}.attention:run", 240),
    Section("ops", f"{_HERE}.ops:run", 180),
    Section("model", f"{_HERE}.model:run", 300),
    Section("speed-8b", f"{_HERE}.speed:run_8b", 420),
    Section("speed-0.6b", f"{_HERE}.speed:run_06b", 300),
    Section("attention-speed", f"{_HERE}.attention_speed:run", 240),
    Section("graph", f"{_HERE}.graph:run", 240, _GRAPH_LOG),
    Section("autotune", f"{_HERE}.autotune:run", 300),
)
