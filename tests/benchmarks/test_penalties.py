"""The benchmark of penalties, on a real engine."""

import json

from benchmarks import __main__ as bench
from tests.checkpoints import write_config


def test_penalties_as_json(tmp_path, capsys):
    write_config(tmp_path, max_position_embeddings=64)
    code = bench.main(
        ["penalties", "--model", str(tmp_path), "--dummy-weights", "--requests", "6", "--input-len", "6"]
        + ["--output-len", "12", "--block-size", "4", "--max-num-batched-tokens", "8", "--repeats", "1", "--json"]
    )
    captured = capsys.readouterr()
    assert code == 0, captured.err
    none, repetition, everything = rows = json.loads(captured.out)["results"]
    assert [row["penalties"] for row in rows] == ["none", "repetition", "all"] and none["share_of_none"] == 1
    for row in rows:
        assert abs(row["output_tokens_per_s"] * row["wall_s"] - 6 * 12) < 1e-6
    assert none["steps"] == repetition["steps"] == everything["steps"] > 12, "as many run at once"
    assert none["tokens_a_step"] == repetition["tokens_a_step"] and repetition["preempted"] == 0
