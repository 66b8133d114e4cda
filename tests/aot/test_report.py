"""A whole report, of a small model and with CPU devices in the place of the target's."""

import json

import jax
import pytest

from jaxllm.aot import prepare
from jaxllm.cli.aot import main
from jaxllm.pallas_kernels import native

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
SIZES = "--max-num-seqs 8 --max-num-batched-tokens 16 --block-size 16 --num-blocks 64 --dtype float32".split()


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "devices", lambda target: jax.devices()[: target.count])
    monkeypatch.setattr(native, "is_built", lambda: False)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return ["--model-config", str(tmp_path), "--target", "v6e-2", "--batch", "8", "--context", "64", *SIZES]


def test_json(arguments, capsys):
    """Sizes are each device's of two."""
    assert main([*arguments, "--json", "--steps-only"]) == 0
    found = json.loads(capsys.readouterr().out)
    layer = 64 * 4 * 16 * 2 + 64 * 2 * 2 * 16 + 64 * 96 * 3
    norms = 5 * 64
    assert found["params_bytes"] == 4 * ((128 * 64 + 2 * layer) // 2 + norms)
    assert found["pool_bytes"] == 64 * 2 * 1 * 16 * 16 * 4 * 2
    assert found["mesh"] == {"tensor": 2}
    assert (
        [e["name"] for e in found["executables"]]
        == [*found["decode"]["names"], found["largest"]]
        == ["step 8", "sample 8", "step 16"]
    )
    assert found["num_executables"] > 2
    decode = found["decode"]
    assert decode["fewest_bytes"] == found["params_bytes"] + 8 * 64 * 2 * 2 * 16 * 4
    assert decode["moved_bytes"] == sum(decode["moved"].values())
    assert decode["static_efficiency"] == pytest.approx(decode["moved_bytes"] / decode["fewest_bytes"])
    assert 1 < decode["static_efficiency"] < 20
    assert decode["moved"]["weights"] >= 0.9 * found["params_bytes"]
    assert decode["floor_ms"] == pytest.approx(decode["fewest_bytes"] / 1640e9 * 1e3)
    sampler, *steps = sorted(found["executables"], key=lambda e: e["name"])
    for e in steps:
        assert e["alias_bytes"] >= found["pool_bytes"]
        assert e["argument_bytes"] >= found["params_bytes"] + found["pool_bytes"]
    assert 128 * 64 // 2 * 4 <= sampler["argument_bytes"] < found["params_bytes"], "of the parameters the head alone"
    assert found["used_bytes"] < found["device_bytes"]
    assert found["hosts"] == {"count": 1, "size": 2, "weight_bytes": [4 * (128 * 64 + 2 * layer + norms)]}
    assert decode["memory_ms"] == pytest.approx(decode["floor_ms"])
    for step in (decode, found["prefill"]):
        sums = [each for each in step["collectives"] if each["kind"] == "all-reduce"]
        assert sums and all(not each["crosses_hosts"] and each["link_bytes"] > 0 for each in sums)
    assert found["prefill"]["what"] == "prefill of 16 tokens of one prompt"


def test_text(arguments, capsys):
    """The whole plan, for people."""
    assert main([*arguments, *"--max-num-batched-tokens 1 --max-num-seqs 1 --batch 1 --top 3".split()]) == 0
    out, err = capsys.readouterr()
    total = int(out.split("Executables of the plan: ")[1].split(";")[0])
    assert f"compiled {total} in" in out and f"{total} of {total}" in err
    assert "Decode of 1 sequences at 64 tokens, 'step 1' and 'sample 1'" in out
    for line in (
        "KV pool",
        "static efficiency",
        "How it was counted",
        "floor",
        "room for 1024",
        "Hosts: 1, of 2 devices",
    ):
        assert line in out
    assert [" MB  " in line for line in out.splitlines()[-4:]] == [False, True, True, True]


def test_a_batch_that_does_not_fit_compiles_nothing(arguments, capsys):
    assert main([*arguments, "--context", "200"]) == 2
    err = capsys.readouterr().err
    assert "error: 8 sequences of 200 tokens need 104 blocks, but there are 64" in err and "compiled" not in err
