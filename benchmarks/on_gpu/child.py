"""The process of one section: `python -m benchmarks.on_gpu.child FUNCTION RECORDS [--small]`.

What it records it writes at once, a line each, so that it outlives a crash.
"""

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

SUMMARY = "summary"  # the name of the last record


class Recorder:
    """Called with a name and a value that JSON can hold; a name may come again, and then replaces the value."""

    def __init__(self, path: Path):
        self._file = path.open("a")

    def __call__(self, name: str, value: Any) -> None:
        print(json.dumps({"name": name, "value": value}), file=self._file, flush=True)


def read_records(path: Path) -> dict[str, Any]:
    """Name -> value; without a last line that was not finished."""
    values: dict[str, Any] = {}
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    for line in lines:
        if line.endswith("\n"):
            record = json.loads(line)
            values[record["name"]] = record["value"]
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("function")
    parser.add_argument("records", type=Path)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    import jax

    jax.config.update("jax_enable_compilation_cache", False)  # times to compile are those of an empty cache
    module, _, name = arguments.function.partition(":")
    record = Recorder(arguments.records)
    record(SUMMARY, getattr(importlib.import_module(module), name)(record, arguments.small))


if __name__ == "__main__":
    main()
