"""Many checks, of which none stops the others."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from benchmarks.kernels import WrongResultError
from benchmarks.on_gpu.child import Recorder

COMPILERS = 8  # executables compiled at a time: the compiler takes a core for each, and holds no lock
LONGEST = 300  # characters of an error that are kept


class Checks:
    """Runs checks and records what each gave: the numbers it returned, or its error."""

    def __init__(self, record: Recorder):
        self._record = record
        self._results: dict[str, dict[str, Any]] = {}

    def run(self, name: str, check: Callable[[], dict[str, Any]]) -> None:
        try:
            result = {"ok": True} | check()
        except Exception as error:  # noqa: BLE001 - whatever a kernel does, the others are checked as well
            text = " ".join(f"{type(error).__name__}: {error}".split())
            result = {"ok": False, "error": text[:LONGEST]}
            print(f"{name}: {error!r}", flush=True)
        self._results[name] = result
        self._record("checks", self._results)

    def summary(self) -> str:
        """Of all checks. Raises `WrongResultError` if one has failed."""
        wrong = [name for name, result in self._results.items() if not result["ok"]]
        if wrong:
            first = self._results[wrong[0]]["error"]
            raise WrongResultError(f"{len(wrong)} of {len(self._results)} wrong: {', '.join(wrong)}; {first}")
        return f"{len(self._results)} checks"


def compile_all(lowerings: dict[str, Callable[[], jax.stages.Lowered]]) -> dict[str, Callable[[], Any]]:
    """Name -> a function that waits for the executable, or raises what the compiler raised. Lowers one after the other
    and compiles several at a time."""
    pool = ThreadPoolExecutor(COMPILERS)

    def start(lower: Callable[[], jax.stages.Lowered]) -> Callable[[], Any]:
        try:
            return pool.submit(lower().compile).result
        except Exception as error:  # noqa: BLE001 - raised again where the check runs
            failure = error

        def fail() -> Any:
            raise failure

        return fail

    waits = {name: start(lower) for name, lower in lowerings.items()}
    pool.shutdown(wait=False)
    return waits
