"""The scripts that load a server for hours, for seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(script: str, out: Path) -> tuple[dict, list[dict]]:
    command = [sys.executable, str(ROOT / "scripts" / script), "--minutes", "0.3", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout), [json.loads(line) for line in out.read_text().splitlines()]


def test_a_soak(tmp_path):
    report, samples = run("soak_server.py", tmp_path / "soak.jsonl")
    assert report["verdict"] == "passed" and report["exit_status"] == 0
    assert {"200", "400", "left"} <= {kind.rpartition(": ")[2] for kind in report["by_kind"]}
    assert {sample["phase"] for sample in samples} == {"mixed", "counted", "pause"}
    assert samples[-1]["kv_cache_usage"] == 0 and set(samples[-1]["rss_mb"]) == {"server", "engine"}


def test_a_fuzz_run(tmp_path):
    pytest.importorskip("schemathesis")
    report, samples = run("fuzz_server.py", tmp_path / "fuzz.jsonl")
    assert report["verdict"] == "passed" and not report["found"] and report["statuses"]["400"] > 0 and samples
