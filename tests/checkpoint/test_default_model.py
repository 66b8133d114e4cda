"""The model that the package ships, and the script that trained it."""

import json
import sysconfig
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers
from flax import nnx
from safetensors.flax import load_file

import jaxllm
from jaxllm.checkpoint.config import read_config
from jaxllm.models import llama
from jaxllm.models.cache import Dense
from jaxllm.models.context import StepContext
from jaxllm.text.tokenizer import Tokenizer
from scripts import train_default_model as script
from scripts.training_data import chat_text
from tests.checkpoints import load

MODEL_DIR = Path(jaxllm.__file__).parent / "default_model"
TEXT = 'import os\n\n\ndef f(self, x=123):\n    """Héllo ✓"""\n\treturn x  # <|user|>\n'
ASK = {"role": "user", "content": "Write f: return one."}
ANSWER = {"role": "assistant", "content": "def f():\n    return 1\n"}
SIZES = "--vocab 300 --layers 2 --embed 16 --heads 4 --kv-heads 2 --head-dim 6 --mlp 20 --batch 8 --seq-len 64"
SHAPES = {
    "self_attn.q_proj": (24, 16),
    "self_attn.k_proj": (12, 16),
    "self_attn.v_proj": (12, 16),
    "self_attn.o_proj": (16, 24),
    "mlp.gate_proj": (20, 16),
    "mlp.up_proj": (20, 16),
    "mlp.down_proj": (16, 20),
    "input_layernorm": (16,),
    "post_attention_layernorm": (16,),
}


def check_model_dir(model_dir: Path) -> None:
    """Config, tokenizer and weights are read, fit each other, and special tokens are where they should be."""
    spec = read_config(model_dir, jnp.float32)
    assert load(model_dir)
    tokenizer = Tokenizer.from_dir(model_dir)
    assert tokenizer.vocab_size == spec.cfg.vocab
    assert spec.eos_token_ids == (tokenizer.eos_token_id,)
    ids = tokenizer.encode(TEXT)
    assert ids[0] == json.loads((model_dir / "config.json").read_text())["bos_token_id"]
    assert tokenizer.decode(ids[1:], skip_special_tokens=False) == TEXT


def test_the_packaged_model_is_small_and_whole():
    assert sum(path.stat().st_size for path in MODEL_DIR.glob("*.*")) <= 12_000_000
    check_model_dir(MODEL_DIR)
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["tie_word_embeddings"] and config["max_position_embeddings"] == 1024


def test_its_chat_template_writes_what_it_was_trained_on():
    ours, theirs = Tokenizer.from_dir(MODEL_DIR), transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    exchange = chat_text(ASK["content"], ANSWER["content"])
    text = f"<|bos|>{exchange}<|eos|>"
    assert ours.chat.render([ASK, ANSWER], add_generation_prompt=False) == text
    backend = tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    ids = theirs.apply_chat_template([ASK, ANSWER], return_dict=False)
    assert ids == script.encode(backend, [exchange]).tolist()

    messages = [{"role": "system", "content": "Be short."}, ASK, ANSWER, {"role": "user", "content": "Again."}]
    text = text.replace("<|user|>", "<|user|>Be short.\n") + "<|user|>Again.<|assistant|>"
    assert ours.chat.render(messages) == text
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == text
    with pytest.raises(ValueError, match="not tool"):
        ours.chat.render([ASK, ANSWER, {"role": "tool", "content": "3"}])


def test_it_has_learnt_python():
    model = llama.Model(read_config(MODEL_DIR, jnp.float32).cfg, rngs=nnx.Rngs(params=0))
    nnx.update(model, load(MODEL_DIR))
    backend = tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    _, bits_per_byte = script.heldout_loss(model, backend, [Path(script.__file__).read_text()])
    assert bits_per_byte < 2.0  # random parameters give 3.3


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_training_lowers_the_loss_and_writes_a_model(optimizer, tmp_path):
    source = Path(sysconfig.get_paths()["stdlib"]) / "email"
    options = ["--source", str(source), "--holdout", "0.1", "--steps", "30", "--lr", "1e-2", *SIZES.split()]
    options += ["--optimizer", optimizer]
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


def test_a_deeper_model_starts_where_the_packaged_one_ended():
    spec = read_config(MODEL_DIR, jnp.float32)
    tokens = jnp.asarray([[0, 300, 301, 302]])
    logits = {}
    for num_layers in (spec.cfg.num_layers, spec.cfg.num_layers + 1):
        model = llama.Model(replace(spec.cfg, layers=spec.cfg.layers[:1] * num_layers), rngs=nnx.Rngs(params=0))
        script.start_from(MODEL_DIR, model)
        ctx = StepContext.of(tokens)
        hidden, _ = model(tokens, ctx, [Dense()] * num_layers)
        logits[num_layers] = model.logits(hidden, ctx)
    shallow, deep = logits.values()
    np.testing.assert_allclose(deep, shallow, atol=1e-5)
    wider = llama.Model(replace(spec.cfg, mlp=8), rngs=nnx.Rngs(params=0))
    with pytest.raises(ValueError, match="give its sizes"):
        script.start_from(MODEL_DIR, wider)
