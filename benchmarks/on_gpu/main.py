"""Runs the sections one after the other within a budget of time, and goes on where an earlier run stopped."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.on_gpu import markdown
from benchmarks.on_gpu.child import SUMMARY, read_records
from benchmarks.on_gpu.results import CUT, FAILED, OK, Results, SectionResult
from benchmarks.on_gpu.sections import PROFILED_GRAPHS, SECTIONS, Section

ROOT = Path(__file__).parents[2]
JSON_NAME, MARKDOWN_NAME = "on_gpu.json", "on_gpu.md"
EPILOG = """Sections: {}. Those that have ended, well or badly, are left out of a later run into the same directory;
--again runs them once more. A section has a process and a time limit of its own, and its output is in DIR/logs. The
exit code is 0 if every section asked for has ended well."""


def main(argv: Sequence[str] | None = None) -> int:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(prog="scripts/on_gpu", description=__doc__, epilog=EPILOG.format(", ".join(names)))
    add = parser.add_argument
    add("--out", type=Path, default=Path("on_gpu"), metavar="DIR", help="for results and logs (default: on_gpu)")
    add("--minutes", type=float, default=15.0, metavar="N", help="no section runs longer (default: 15)")
    add("--only", nargs="+", choices=names, default=names, metavar="SECTION", help="of those below")
    add("--again", action="store_true", help="also what has ended before")
    add("--small", action="store_true", help="tiny shapes: a check of this program on a CPU")
    arguments = parser.parse_args(argv)
    sections = [section for section in SECTIONS if section.name in arguments.only]
    try:
        results = run(sections, arguments.out, minutes=arguments.minutes, again=arguments.again, small=arguments.small)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    left = [s.name for s in sections if not results.is_done(s.name)]
    if left:
        print(f"left, for another run: {', '.join(left)}")
    return int(any(results.sections[s.name].status != OK for s in sections if s.name not in left) or bool(left))


def run(sections: Sequence[Section], out: Path, *, minutes: float, again: bool, small: bool) -> Results:
    """Runs what has not ended yet and prints a line for each section; the results, which are in `out` as well. Raises
    `ValueError` if those there are of another kind of run."""
    (out / "logs").mkdir(parents=True, exist_ok=True)
    results = Results(out / JSON_NAME, small=small)
    deadline = time.monotonic() + 60 * minutes
    for section in sections:
        if results.is_done(section.name) and not again:
            _say(section, results.sections[section.name], "before: ")
            continue
        left = deadline - time.monotonic()
        if left < section.least_s():
            print(f"{section.name:16} not started: {max(left, 0):.0f} s are left")
            continue
        flags = f"--{PROFILED_GRAPHS}=true" if results.values("machine").get("can_profile_graphs") else ""
        results.put(section.name, run_section(section, out / "logs", small=small, limit_s=left, xla_flags=flags))
        _say(section, results.sections[section.name])
        (out / MARKDOWN_NAME).write_text(markdown.document(results))
    print(f"results: {out / JSON_NAME}, {out / MARKDOWN_NAME}")
    return results


def run_section(section: Section, logs: Path, *, small: bool, limit_s: float, xla_flags: str = "") -> SectionResult:
    """Runs one section in its process, which is killed with all it started after its limit or `limit_s`."""
    log, start = logs / f"{section.name}.log", time.monotonic()
    with tempfile.TemporaryDirectory() as directory, log.open("w") as output:
        records = Path(directory) / "records.jsonl"
        command = [sys.executable, "-m", "benchmarks.on_gpu.child", section.function, str(records)]
        process = subprocess.Popen(
            command + ["--small"] * small,
            cwd=ROOT,
            env=_environment(section, xla_flags),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        limit_s, is_own_limit = min((limit_s, False), (section.limit_s, True))
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(process)
        seconds, values = time.monotonic() - start, read_records(records)
    summary = values.pop(SUMMARY, None)
    if code == 0 and summary is not None:
        return SectionResult(OK, seconds, summary, values)
    if code is None:
        return SectionResult(
            FAILED if is_own_limit else CUT, seconds, f"stopped after {limit_s:.0f} s; see {log.name}", values
        )
    return SectionResult(FAILED, seconds, f"exit code {code}: {_last_words(log)}", values)


def _environment(section: Section, xla_flags: str) -> dict[str, str]:
    """Ours, with the checkout first on the path and, unless the user says otherwise, most of the device's memory."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    defaults = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
    given = {"PYTHONPATH": os.pathsep.join(path), "XLA_FLAGS": f"{xla_flags} {os.environ.get('XLA_FLAGS', '')}".strip()}
    return defaults | dict(os.environ) | dict(section.environment) | given


def _kill(process: subprocess.Popen) -> None:
    """What is left of the process and of those it started."""
    with contextlib.suppress(ProcessLookupError):  # where all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(log: Path) -> str:
    """The last line of a section's output, which is its exception if it ended with one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0] and not line.startswith("File ")]
    return (errors or lines or ["it said nothing"])[-1][:500]


def _say(section: Section, result: SectionResult, before: str = "") -> None:
    print(f"{section.name:16} {before}{result.status:6} {result.seconds:5.0f} s  {result.summary}", flush=True)
