"""The benchmark of preemption: real engines with too small a pool, and the arithmetic of its table."""

import json

from benchmarks import __main__ as bench
from tests.checkpoints import write_config


def test_preemption_as_json(tmp_path, capsys):
    write_config(tmp_path, max_position_embeddings=64)
    code = bench.main(
        ["preemption", "--model", str(tmp_path), "--dummy-weights", "--requests", "6", "--input-len", "6"]
        + ["--output-len", "12", "--overcommit", "3", "--block-size", "4", "--max-num-batched-tokens", "8"]
        + ["--repeats", "1", "--json"]
    )
    captured = capsys.readouterr()
    assert code == 0, captured.err
    report = json.loads(captured.out)
    assert report["engine"]["num_blocks"] == 10, "a third of six times five"
    assert report["options"]["capped_num_seqs"] == 2
    capped, auto, swap, recompute = rows = report["results"]
    assert [row["preemption"] for row in rows] == ["none", "auto", "swap", "recompute"]
    assert capped["preempted"] == capped["blocks_swapped_out"] == 0 and capped["share_of_capped"] == 1
    assert all(row["preempted"] > 0 for row in (auto, swap, recompute))
    assert swap["swapped"] == swap["preempted"] and swap["blocks_swapped_out"] > 0
    assert recompute["swapped"] == recompute["blocks_swapped_out"] == 0
    for row in rows:
        assert abs(row["output_tokens_per_s"] * row["wall_s"] - 6 * 12) < 1e-6
        assert row["share_of_capped"] == row["output_tokens_per_s"] / capped["output_tokens_per_s"]


def test_options_are_checked_first(capsys):
    assert bench.main(["preemption", "--overcommit", "0.5"]) != 0
    assert "--overcommit is 0.5; it must be at least 1" in capsys.readouterr().err
