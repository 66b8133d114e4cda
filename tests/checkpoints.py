"""A tiny random checkpoint, without torch, and ways to change it."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.loader import abstract_params, load_params
from jaxllm.sharding.mesh import make_mesh

HF = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
}
FUSED = {"architectures": ["Phi3ForCausalLM"]}  # the changes that make it a checkpoint of fused tensors
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def shapes(hf=HF):
    """Of a Qwen3 or Phi-3 checkpoint's tensors, by name."""
    d, f, h = hf["hidden_size"], hf["intermediate_size"], hf["head_dim"]
    q, kv = hf["num_attention_heads"] * h, hf["num_key_value_heads"] * h
    layer = {
        "self_attn.o_proj": (d, q),
        "mlp.down_proj": (d, f),
        "input_layernorm": (d,),
        "post_attention_layernorm": (d,),
    }
    if hf["architectures"] == FUSED["architectures"]:
        layer |= {"self_attn.qkv_proj": (q + 2 * kv, d), "mlp.gate_up_proj": (2 * f, d)}
    else:
        layer |= {
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.q_norm": (h,),
            "self_attn.k_norm": (h,),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
        }
    layers = {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(hf["num_hidden_layers"])
        for name, shape in layer.items()
    }
    v = hf["vocab_size"]
    return layers | {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,), "lm_head.weight": (v, d)}


def random_tensors(dtype=np.float32, hf=HF):
    values = np.random.default_rng(0).standard_normal(2**16, np.float32).astype(dtype)
    return {name: np.resize(np.roll(values, i), shape) for i, (name, shape) in enumerate(shapes(hf).items())}


def write_checkpoint(model_dir: Path, **changes) -> Path:
    """`changes` are those of the config."""
    write_config(model_dir, **changes)
    save_file(random_tensors(hf=HF | changes), model_dir / "model.safetensors")
    return model_dir


def write_config(model_dir: Path, **changes) -> None:
    (model_dir / "config.json").write_text(json.dumps(HF | changes))


def rewrite(model_dir, changes):
    """Replaces, adds or (None) drops tensors."""
    tensors = load_file(model_dir / "model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, model_dir / "model.safetensors")


def split_in_two(model_dir):
    """Two shards with an index, each a link, as in Hugging Face's cache."""
    tensors = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    (model_dir / "blobs").mkdir()
    weight_map = {}
    for i, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        file = f"model-{i}.safetensors"
        save_file({name: tensors[name] for name in names}, model_dir / "blobs" / file)
        (model_dir / file).symlink_to(Path("blobs") / file)
        weight_map |= dict.fromkeys(names, file)
    write_index(model_dir, weight_map)
    return weight_map


def write_index(model_dir, weight_map):
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load(model_dir, dtype=jnp.float32, mesh=None):
    spec = read_config(model_dir, dtype)
    return load_params(open_checkpoint(model_dir), spec, abstract_params(spec), make_mesh(mesh))


def check_same(ours, theirs):
    """That two states are equal, bit by bit."""
    leaves, others = jax.tree.leaves_with_path(ours), jax.tree.leaves_with_path(theirs)
    assert len(leaves) == len(others)
    for (path, one), (other_path, other) in zip(leaves, others, strict=True):
        assert path == other_path and one.dtype == other.dtype
        assert np.array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8)), path
