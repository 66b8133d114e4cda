"""The benchmark of lm-evaluation-harness over an engine."""

import json

import pytest

from benchmarks import __main__ as bench
from benchmarks.harness import table


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the harness and its back end
def test_harness_as_json_and_as_a_table(capsys):
    for package in ("lm_eval", "torch", "accelerate"):
        pytest.importorskip(package)
    assert bench.main(["harness", "--questions", "2", "--batch", "4", "--repeats", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["engine"] for row in report["results"]] == ["jaxllm", "Hugging Face"]
    assert report["largest_difference"] < 1e-3 and report["same_greedy"]
    assert "times as fast" in table(report)
