"""A server under load, with an engine that computes, each in its own process: no errors, and nothing left behind."""

from jaxllm.bench import serve
from jaxllm.cli.bench import main
from tests.chat_model import write_model

SIZES = dict(max_num_seqs=8, max_num_batched_tokens=16, block_size=4, num_blocks=64, max_model_len=64)


def test_a_short_load(tmp_path, capsys):
    engine = SIZES | {"model": str(write_model(tmp_path / "tiny"))}
    report = serve.run(engine, streams=32, seconds=3.0, input_len=6, output_len=8, seed=0)
    assert report["requests"] >= 32 and report["failed"] == 0 and report["errors"] == []
    assert report["left"]["kv_cache_usage"] == 0 and max(report["left"]["more_fds"].values()) <= 0
    assert report["exit_status"] == 0
    assert any("0 of 64 blocks are used" in line for line in report["last_log"]), report["last_log"]
    assert set(report["rss_mb"]) == {"start", "middle", "end"} and report["tokens_per_s"] > 0
    assert "requests" in serve.table(report)


def test_options_are_checked(capsys):
    assert main(["serve", "--streams", "0"]) == 2
    assert "--streams is 0" in capsys.readouterr().err


def test_options_of_the_engine_reach_the_server():
    assert serve.server_options({"max_num_seqs": 4, "enable_prefix_caching": False}) == [
        "--no-prefix-caching",
        "--max-num-seqs",
        "4",
    ]
