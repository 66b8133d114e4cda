"""The model that the package ships, and the script that trained it."""

import importlib.util
import json
import sysconfig
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file

import jaxllm
from jaxllm.checkpoint.config import read_config
from jaxllm.text.tokenizer import Tokenizer
from tests.checkpoints import load

MODEL_DIR = Path(jaxllm.__file__).parent / "default_model"
TEXT = 'import os\n\n\ndef f(self, x=123):\n    """Héllo ✓"""\n\treturn x  # <|user|>\n'
SIZES = "--vocab 300 --layers 2 --embed 16 --heads 4 --kv-heads 2 --head-dim 6 --mlp 20 --batch 8 --seq-len 64"
SHAPES = {
    "self_attn.q_proj": (24, 16), "self_attn.k_proj": (12, 16), "self_attn.v_proj": (12, 16),
    "self_attn.o_proj": (16, 24), "mlp.gate_proj": (20, 16), "mlp.up_proj": (20, 16), "mlp.down_proj": (16, 20),
    "input_layernorm": (16,), "post_attention_layernorm": (16,),
}  # fmt: skip


def check_model_dir(model_dir: Path) -> None:
    """Config, tokenizer and weights are read, fit each other, and special tokens are where they should be."""
    spec = read_config(model_dir, jnp.float32)
    assert load(model_dir)
    tokenizer = Tokenizer.from_dir(model_dir)
    assert tokenizer.vocab_size == spec.cfg.vocab
    assert spec.eos_token_ids == (tokenizer.eos_token_id,)
    ids = tokenizer.encode(TEXT)
    assert ids[0] == spec.bos_token_id
    assert tokenizer.decode(ids[1:], skip_special_tokens=False) == TEXT


def test_the_packaged_model_is_small_and_whole():
    assert sum(path.stat().st_size for path in MODEL_DIR.glob("*.*")) <= 12_000_000
    check_model_dir(MODEL_DIR)
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["tie_word_embeddings"] and config["max_position_embeddings"] == 1024


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[1] / "scripts" / "train_default_model.py"
    spec = importlib.util.spec_from_file_location("train_default_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_training_lowers_the_loss_and_writes_a_model(script, tmp_path):
    source = Path(sysconfig.get_paths()["stdlib"]) / "email"
    options = ["--source", str(source), "--holdout", "0.1", "--steps", "30", "--lr", "1e-2", *SIZES.split()]
    report = script.main(["--out", str(tmp_path), *options])
    assert len(report.losses) == 30
    assert np.mean(report.losses[-5:]) < report.losses[0] - 0.5
    assert report.heldout_loss < np.log(300)

    tensors = load_file(tmp_path / "model.safetensors")
    layers = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in SHAPES.items()}
    ends = {"model.embed_tokens.weight": (300, 16), "model.norm.weight": (16,)}
    assert {name: tensor.shape for name, tensor in tensors.items()} == layers | ends
    assert {tensor.dtype for tensor in tensors.values()} == {jnp.dtype("bfloat16")}
    check_model_dir(tmp_path)


def test_the_same_files_are_held_out_again(script, tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.py").write_text(str(i))
    train, heldout = script.read_source(tmp_path, 0.2)
    assert sorted(train + heldout) == sorted(map(str, range(40)))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").write_text("left out")
    assert script.read_source(tmp_path, 0.2) == (train, heldout)


def test_a_source_without_files_is_an_error(script, tmp_path):
    with pytest.raises(ValueError, match="0 files to train on and 0 held out"):
        script.read_source(tmp_path, 0.1)


def test_too_few_tokens_are_an_error(script):
    rows = script.batches(np.arange(100, dtype=np.int32), 4, 32, np.random.default_rng(0))
    with pytest.raises(ValueError, match="100 tokens are too few for 4 rows of 32"):
        next(rows)


def test_batches_are_consecutive_tokens(script):
    rows = script.batches(np.arange(1000, dtype=np.int32), 2, 16, np.random.default_rng(0))
    starts = set()
    for batch, _ in zip(rows, range(25), strict=False):
        assert batch.shape == (2, 17)
        np.testing.assert_array_equal(batch - batch[:, :1], np.tile(np.arange(17), (2, 1)))
        starts |= set(batch[:, 0].tolist())
    assert len(starts) == 50  # one epoch, nothing twice
