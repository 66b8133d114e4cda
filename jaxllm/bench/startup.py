"""From the command to the first token, in fresh processes: with an empty compilation cache, then with a full one.

Each repeat has a cache directory of its own. Its first process (cold) finds it empty and leaves it with every
executable; its second (warm) finds that. The clock is this process's: it starts before the other does, and is read
when the other tells how far it is. Files of Python packages and of the model may be in the system's memory both times.
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
    """Starts `command` with `cache` as its compilation cache, and waits for its end.

    Raises `ValueError` with its message if it ended as for bad input, `JaxLLMError` if it failed otherwise.
    """
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
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
        raise JaxLLMError(f"the measured process ended without a word about {', '.join(missing)}")
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
