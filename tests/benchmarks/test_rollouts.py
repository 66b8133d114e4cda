"""The benchmark of samples as arrays."""

import json

import pytest

from benchmarks import __main__ as bench
from benchmarks.rollouts import table


@pytest.mark.slow
def test_rollouts_as_json_and_as_a_table(capsys):
    options = ["--slots", "4", "--tokens", "2", "3", "--prompts", "2", "--repeats", "1"]
    assert bench.main(["rollouts", *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in report["results"]] == [2, 3]
    assert all(min(row["arrays_us"], row["logprobs_us"], row["generate_us"]) > 0 for row in report["results"])
    assert "with log-probabilities" in table(report)
