"""What a process that serves takes of the machine: at most 1.3 times the weights, the KV pool, and what a test says."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxllm.pallas_kernels import native

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell"),
    pytest.mark.skipif(not native.exists(), reason="XLA's products take temporary arrays"),
]

PROCESS = """
import json, sys
import jax
from jaxllm import LLM, SamplingParams

def memory(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

found = {}
sizes = dict(max_num_seqs=16, num_blocks=64, skip_tokenizer_init=True, compilation_cache=False)
with LLM(sys.argv[1], **sizes, **json.loads(sys.argv[2])) as llm:
    found["loading"] = memory("VmHWM")
    llm.wait_compiled()
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    prompts = [list(range(1 + i, 1 + i + length)) for i, length in enumerate([16] * 15 + [600])]
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    found["peak"], found["end"] = memory("VmHWM"), memory("VmRSS")
    found["weights"] = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))
    found["pool"] = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.runner.executor.state.kv_pools))
print(json.dumps(found))
"""
MB = 10**6
# Beyond weights and pool. The aim is 400 at any size; small models took 320 to 390 with 31 executables.
LARGE_MB, SMALL_MB = 400, 450


def measured(path, **options):
    command = [sys.executable, "-c", PROCESS, str(path), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found, rest_mb):
    bound = 1.3 * found["weights"] + found["pool"] + rest_mb * MB
    assert max(found["loading"], found["peak"], found["end"]) <= bound, found


def llama_file(path, *, layers, width, mlp, heads, kv_heads, vocab):
    """A Llama in blocks of random values, of Q4_0 and Q8_0."""
    gguf = pytest.importorskip("gguf")
    kinds, rng = gguf.GGMLQuantizationType, np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(mlp)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)

    def add(name, rows, columns, kind=kinds.Q4_0):
        some = gguf.quants.quantize(rng.standard_normal((64, columns), np.float32) * np.float32(0.02), kind)
        writer.add_tensor(f"{name}.weight", np.tile(some, (rows // 64, 1)), raw_dtype=kind)

    add("token_embd", vocab, width, kinds.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for layer in (f"blk.{i}" for i in range(layers)):
        rows = {"attn_q": width, "attn_k": width * kv_heads // heads, "attn_v": width * kv_heads // heads}
        for name, count in (rows | {"attn_output": width, "ffn_gate": mlp, "ffn_up": mlp}).items():
            add(f"{layer}.{name}", count, width)
        add(f"{layer}.ffn_down", width, mlp)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{layer}.{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_of_a_gigabyte_of_blocks(tmp_path):
    sizes = dict(layers=24, width=2560, mlp=6912, heads=20, kv_heads=4, vocab=32000)
    found = measured(llama_file(tmp_path / "model.gguf", **sizes))
    assert found["weights"] > 10**9
    check(found, LARGE_MB)


def test_of_a_small_file_of_blocks(tmp_path):
    sizes = dict(layers=30, width=576, mlp=1536, heads=9, kv_heads=3, vocab=49152)
    check(measured(llama_file(tmp_path / "model.gguf", **sizes)), SMALL_MB)


def test_of_a_small_model_in_bfloat16(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(measured(tmp_path, load_format="dummy", dtype="bfloat16"), SMALL_MB)
