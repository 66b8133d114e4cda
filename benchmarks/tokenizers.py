"""What a tokenizer costs: loading it, encoding, decoding as a stream, and the memory for all of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

from benchmarks.runs import table_lines

_COLUMNS = (
    ("vocab", "vocabulary", "d"),
    ("load_s", "load s", ".2f"),
    ("encode_mb_per_s", "encode MB/s", ".2f"),
    ("decode_tokens_per_s", "decode tokens/s", ".0f"),
    ("memory_mb", "memory MB", ".0f"),
)
_SAMPLE = Path(__file__).parents[1] / "README.md"


def run(directories: Sequence[str], repeats: int) -> dict[str, Any]:
    """The report; each directory's figures are medians of processes of their own."""
    rows = []
    for directory in directories:
        runs = [_measured(directory) for _ in range(repeats)]
        rows.append({"tokenizer": Path(directory).name} | {name: median_low(r[name] for r in runs) for name in runs[0]})
    return {"benchmark": "tokenizers", "options": {"repeats": repeats}, "results": rows}


def table(report: dict[str, Any]) -> str:
    return "\n".join(table_lines(report["results"], "tokenizer", _COLUMNS, 17))


def _measured(directory: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.tokenizers", directory]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=_SAMPLE.parent)
    return json.loads(done.stdout)


def _measure(directory: str) -> dict[str, float]:
    from jaxllm.text.tokenizer import Tokenizer

    text, before = _SAMPLE.read_text(), _resident_bytes()
    start = time.perf_counter()
    tokenizer = Tokenizer.from_dir(directory)
    loaded = time.perf_counter()
    ids = tokenizer.encode(text)
    encoded = time.perf_counter()
    stream = tokenizer.stream()
    decoded = "".join(stream.push(token) for token in ids) + stream.flush()
    end = time.perf_counter()
    assert len(decoded) >= len(text.strip()) - 1, "a stream has lost text"
    return {
        "vocab": tokenizer.vocab_size or 0,
        "load_s": loaded - start,
        "encode_mb_per_s": len(text.encode()) / 1e6 / (encoded - loaded),
        "decode_tokens_per_s": len(ids) / (end - encoded),
        "memory_mb": (_resident_bytes() - before) / 1e6,
    }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1])))
