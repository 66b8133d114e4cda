"""Graphs of a decode step: how many launches the compiler planned, and what happens to them at run time."""

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks.on_gpu import trace
from benchmarks.on_gpu.child import Recorder
from benchmarks.on_gpu.engines import Jobs, decoding, few_executables, open_dummy, small_model
from jaxllm.aot import thunks

MODEL, TOKENS, BATCHES, CONTEXT, STEPS = "qwen3-0.6b", (1, 64, 512), (1, 64), 128, 24
SMALL_TOKENS, SMALL_BATCHES, SMALL_CONTEXT, SMALL_STEPS = (1, 16), (1,), 8, 2
NUM_BLOCKS, SMALL_NUM_BLOCKS = 2048, 32
_SOURCES = ("command_executor", "command_buffer_thunk")  # of XLA, whose logs tell of updates, each in its words
_NUMBERS = {
    "commands": re.compile(r"Updated (\d+) commands|num_commands=(\d+)"),
    "us": re.compile(r" in (\d+) *[uμµ]s"),
    "skipped": re.compile(r"skipped (\d+)"),
}
MOST_KINDS = 12  # of lines of the log that are kept


def run(record: Recorder, small: bool) -> str:
    tokens, context, steps = (SMALL_TOKENS, SMALL_CONTEXT, SMALL_STEPS) if small else (TOKENS, CONTEXT, STEPS)
    measured: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = small_model(Path(directory)) if small else MODEL
        blocks = SMALL_NUM_BLOCKS if small else NUM_BLOCKS
        with (
            few_executables(tokens) as jobs,
            open_dummy(model, tokens, max_model_len=16 * context, num_blocks=blocks) as llm,
        ):
            llm.wait_compiled()
            for batch in SMALL_BATCHES if small else BATCHES:
                with decoding(llm, batch, context, 4 * steps) as pace:
                    log = stderr_of(lambda: pace(steps))  # noqa: B023 - called at once
                    data = trace.profile(lambda: pace(steps))  # noqa: B023 - called at once
                busy = trace.device_busy(data)
                measured[batch] = {
                    "updates": updates(log, steps),
                    "log": kinds_of_lines(log, steps),
                    "driver_calls": trace.driver_calls(data, steps),
                    "kernels": None if busy is None else busy.kernels / steps,
                }
                record("measured", measured)
            record("compiled", compiled := compiled_counts(jobs, SMALL_BATCHES if small else BATCHES))
    planned = {n: row["launches"] for n, row in compiled.items()}
    updated = {n: row["updates"] for n, row in measured.items()}
    return f"compiled: launches by batch {planned or 'not a GPU'}; measured: updates {updated}"


def compiled_counts(jobs: Jobs, batches: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    """What the thunks of the decode step list, by batch; nothing where the platform is no GPU."""
    counts: dict[int, dict[str, Any]] = {}
    if jax.devices()[0].platform != "gpu":
        return counts
    for batch in batches:
        with tempfile.TemporaryDirectory() as directory:
            _, listed = thunks.compile_and_list(jobs["step", batch](), Path(directory))
        counts[batch] = counts_of(listed)
    return counts


def counts_of(listed: thunks.Thunks) -> dict[str, Any]:
    outer = sum(listed.outer.values())
    named = {"launches": listed.launches, "command_buffers": listed.command_buffers, "outer": outer}
    return named | {"kinds": dict(listed.all)}


def stderr_of(run: Callable[[], Any]) -> str:
    """What the process writes to its standard error meanwhile, its libraries included; written there as well."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        os.dup2(file.fileno(), 2)
        try:
            run()
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        text = file.read()
    sys.stderr.write(text)
    return text


def updates(log: str, steps: int) -> dict[str, dict[str, float]]:
    """Of graphs, a step, by the part of XLA that logged them: how often one was updated, commands updated and left out,
    µs. Empty if the log tells of none: graphs are not updated at all, or the log says it otherwise."""
    found: dict[str, dict[str, float]] = {}
    for line in log.splitlines():
        source = next((name for name in _SOURCES if f"{name}.cc" in line), None)
        if source is None or "Updated" not in line:
            continue
        totals = found.setdefault(source, {"updates": 0.0, **dict.fromkeys(_NUMBERS, 0.0)})
        totals["updates"] += 1
        for name, pattern in _NUMBERS.items():
            if number := pattern.search(line):
                totals[name] += int(next(filter(None, number.groups())))
    return {source: {name: n / steps for name, n in totals.items()} for source, totals in found.items()}


def kinds_of_lines(log: str, steps: int) -> dict[str, float]:
    """The most frequent lines of the log and how often they come in a step, without their numbers and the log's own
    beginning: what `updates` may not understand."""
    bare = (re.sub(r"0x[0-9a-f]+|\d+", "#", line.rpartition("] ")[2])[:100] for line in log.splitlines())
    return {line: count / steps for line, count in Counter(bare).most_common(MOST_KINDS) if line}
