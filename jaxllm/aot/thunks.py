"""What a GPU executable launches, from the thunk sequence that XLA writes where `xla_dump_to` points."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

_LINE = re.compile(r"^( *)\d+: (k\w+)")
_AFTER, _BEFORE = "thunk_sequence_after_thunk_passes.txt", "thunk_sequence.txt"
_LAUNCHES = ("Kernel", "Gemm", "Cublas", "Cudnn", "Memcpy", "Copy", "Memset", "All", "Collective", "Reduce", "Sort")
_CONTAINERS = ("kCommandBuffer", "kWhile", "kConditional", "kSequential", "kAsyncStart", "kAsyncDone")


@dataclass(frozen=True)
class Thunks:
    """Thunks by kind: on the host's list, and all, those within command buffers and loops included."""

    outer: Counter[str]
    all: Counter[str]

    @property
    def launches(self) -> int:
        """Kernels, copies and collectives; a loop's count once."""
        return sum(n for kind, n in self.all.items() if _is_launch(kind))

    @property
    def command_buffers(self) -> int:
        return self.all["kCommandBuffer"]


def compile_and_list(lowered: jax.stages.Lowered, directory: Path) -> tuple[Any, Thunks]:
    """Compiles for a GPU; the executable and its thunks. `directory` must be empty, and is written to."""
    compiled = lowered.compile(compiler_options={"xla_dump_to": str(directory)})
    found = sorted(directory.glob(f"*.{_AFTER}")) or sorted(directory.glob(f"*.{_BEFORE}"))
    if len(found) != 1:
        raise RuntimeError(f"XLA wrote {len(found)} thunk sequences to {directory}, where there must be one")
    return compiled, parse(found[0].read_text())


def parse(text: str) -> Thunks:
    """The thunks of a sequence as XLA prints it: one a line, nested ones indented."""
    found = [(len(line[1]), line[2]) for line in map(_LINE.match, text.splitlines()) if line]
    least = min((indent for indent, _ in found), default=0)
    return Thunks(Counter(kind for indent, kind in found if indent == least), Counter(kind for _, kind in found))


def _is_launch(kind: str) -> bool:
    return kind not in _CONTAINERS and not kind.endswith("Done") and any(name in kind for name in _LAUNCHES)
