"""The benchmark of saving and loading parameters."""

import json

import pytest

from benchmarks import __main__ as bench
from benchmarks.checkpoints import table

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # Orbax's


@pytest.mark.slow
def test_checkpoints_as_json_and_as_a_table(capsys):
    pytest.importorskip("orbax.checkpoint")
    options = ["--layers", "1", "--repeats", "1", "--meshes", "tensor=1", "tensor=2", "--dtype", "bfloat16"]
    assert bench.main(["checkpoints", *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    meshes = ["tensor=1", "tensor=2"]
    assert [(row["from"], row["to"]) for row in report["results"]] == [(a, b) for a in meshes for b in meshes]
    assert all(row["orbax_save_s"] > 0 and row["safetensors_load_s"] > 0 for row in report["results"])
    assert "million parameters in bfloat16" in table(report)
