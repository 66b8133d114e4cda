from benchmarks import tokenizers
from jaxllm.default_model import DEFAULT_MODEL


def test_a_row_for_each_directory():
    report = tokenizers.run([str(DEFAULT_MODEL)] * 2, repeats=2)
    for row in report["results"]:
        assert row["vocab"] > 256 and min(row[name] for name in ("load_s", "encode_mb_per_s", "memory_mb")) > 0
    first, *rows = tokenizers.table(report).splitlines()
    assert first.split()[0] == "tokenizer" and len(rows) == 2
