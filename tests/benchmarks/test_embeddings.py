"""The benchmark of embeddings, beside transformers."""

import json

import pytest

from benchmarks import __main__ as bench

pytest.importorskip("torch")


@pytest.mark.slow
def test_embeddings_as_json_and_as_a_table(capsys):
    assert bench.main(["embeddings", "--texts", "3", "--repeats", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["largest_difference"] < 2e-5 and report["options"]["tokens"] > 9
    ours, theirs, by_length = report["results"]
    assert ours["ratio"] == 1 and min(theirs["texts_per_s"], by_length["texts_per_s"]) > 0
    from benchmarks.embeddings import table

    assert "transformers, sorted" in table(report)
