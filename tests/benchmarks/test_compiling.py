"""The benchmark of requests while executables compile, on a real engine."""

import json

import pytest

from benchmarks import __main__ as bench
from tests.checkpoints import write_config


@pytest.mark.slow
def test_compiling_as_json_and_as_a_table(tmp_path, capsys):
    write_config(tmp_path, max_position_embeddings=64)
    command = ["compiling", "--model", str(tmp_path), "--dummy-weights", "--requests", "3", "--input-len", "6"]
    sizes = ["--output-len", "8", "--max-num-seqs", "2", "--max-num-batched-tokens", "8", "--seconds", "1"]
    code = bench.main([*command, *sizes, "--repeats", "1", "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    results = json.loads(captured.out)
    during, after = results["results"]
    assert (during["phase"], after["phase"]) == ("while compiling", "compiled")
    assert during["compiled"] <= after["compiled"] and after["compiled"] > 10
    for row in (during, after):
        assert 0 < row["slowest_tokens_per_s"] <= row["alone_tokens_per_s"] and row["many_s"] > 0
    from benchmarks.compiling import table

    assert "while compiling" in table(results)
