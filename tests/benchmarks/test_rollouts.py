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
    names = ("arrays_us", "logprobs_us", "generate_us", "alone_us")
    assert all(min(row[name] for name in names) > 0 for row in report["results"])
    assert "with log-probabilities" in table(report)
