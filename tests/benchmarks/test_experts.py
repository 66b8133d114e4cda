"""The benchmark of a mixture of experts, beside transformers."""

import json
import sys

import pytest

from benchmarks import __main__ as bench

pytest.importorskip("torch")


@pytest.mark.slow
def test_experts_as_json_and_as_a_table(capsys):
    options = ["--layers", "1", "--output-len", "4", "--repeats", "1", "--batches", "1", "3"]
    assert bench.main(["experts", *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    one, three = report["results"]
    assert one["equal_tokens"] == three["equal_tokens"] == 1 and 0 < one["mb"] < three["mb"]
    assert min(*one["tokens_per_s"].values(), one["of_floor"], report["gb_per_s"]) > 0
    from benchmarks.experts import table

    assert "x transformers" in table(report)


@pytest.mark.slow
def test_an_environment_without_vllm(capfd):
    options = ["--layers", "1", "--output-len", "2", "--batches", "1", "--vllm", sys.executable]
    assert bench.main(["experts", *options]) == 2
    said = capfd.readouterr().err
    assert "No module named 'vllm'" in said and f"vLLM in {sys.executable} ended" in said
