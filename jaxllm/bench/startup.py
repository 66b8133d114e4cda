"""Time from the command to the first token, in fresh processes, with an empty and a filled compilation cache.

Each repeat has its own cache directory. The first process (cold) finds it empty and fills it; the second (warm) uses
it. This process keeps the time: from before it starts the other until the other prints its progress. Files of Python
packages and of the model may be in the system's page cache both times.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from jaxllm.bench import report
from jaxllm.bench.probe import EVENTS, REPORT
from jaxllm.cli.common import EXIT_USER_ERROR
from jaxllm.errors import JaxLLMError

PROBE = (sys.executable, "-m", "jaxllm.bench.probe")


class StartupTimes(NamedTuple):
    seconds: dict[str, float]  # from the start of the process to each event
    about: dict[str, Any]  # see `report.about`


def run(model: dict[str, Any], *, repeats: int, probe: Sequence[str] = PROBE) -> dict[str, Any]:
    """The report: medians over `repeats`. `model` are the arguments of `open_llm`."""
    starts: dict[str, list[StartupTimes]] = {"cold": [], "warm": []}
    with tqdm(total=2 * repeats, desc="measuring", unit="start", disable=None, leave=False) as bar:
        for _ in range(repeats):
            with tempfile.TemporaryDirectory(prefix="jaxllm-bench-") as cache:
                for part in starts.values():
                    part.append(start_once([*probe, json.dumps(model)], cache))
                    bar.update()
    results = {
        name: {f"{event}_s": statistics.median(start.seconds[event] for start in part) for event in EVENTS}
        for name, part in starts.items()
    }
    about = starts["cold"][0].about
    return {"benchmark": "startup", **about, "options": {"repeats": repeats}, "results": results}


def start_once(command: list[str], cache: str) -> StartupTimes:
    """Runs `command` with its compilation cache in `cache`.

    Raises `ValueError` with its message if it reported bad input, and `JaxLLMError` if it failed otherwise.
    """
    others = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment = others | {"XDG_CACHE_HOME": cache}
    seconds: dict[str, float] = {}
    about: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        with process:
            try:
                for line in process.stdout:
                    word, _, rest = line.strip().partition(" ")
                    if word in EVENTS:
                        seconds[word] = time.perf_counter() - start
                    elif word == REPORT:
                        about = json.loads(rest)
            except BaseException:  # Ctrl-C too
                process.kill()
                raise
        stderr.seek(0)
        _check_end(process.returncode, stderr.read().strip())
    missing = [event for event in EVENTS if event not in seconds] + [REPORT] * (not about)
    if missing:
        raise JaxLLMError(f"the measured process ended without reporting {', '.join(missing)}")
    return StartupTimes(seconds, about)


def _check_end(code: int, errors: str) -> None:
    if code == EXIT_USER_ERROR:
        raise ValueError(errors.rpartition("\n")[2].removeprefix("error: "))
    if code:
        raise JaxLLMError(f"the measured process ended with exit code {code}:\n{errors}")


def table(results: dict[str, Any]) -> str:
    lines = [report.heading(results), f"{'cache':<8}" + "".join(f"{event.replace('_', ' '):>14}" for event in EVENTS)]
    for name, row in results["results"].items():
        lines.append(f"{name:<8}" + "".join(f"{row[f'{event}_s']:>14.2f}" for event in EVENTS))
    return "\n".join([*lines, f"seconds from the start of the process; medians of {results['options']['repeats']}"])
