"""Tiny mixtures of experts of every family without torch: their configurations, and tensors in each form of files."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from safetensors.numpy import save_file

from jaxllm.checkpoint.config import ModelSpec, read_config
from jaxllm.checkpoint.fill import WeightPart
from jaxllm.checkpoint.loader import abstract_params
from jaxllm.checkpoint.placement import named
from jaxllm.checkpoint.weights_table import weights_table

HF = {
    "vocab_size": 24,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
QWEN = {"num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
FAMILIES = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": QWEN | {"shared_expert_intermediate_size": 48},
    "Qwen3Moe": QWEN,
    "Olmoe": {"num_experts": 4},
    "GptOss": {"num_local_experts": 4},
    "Glm4Moe": {"n_routed_experts": 4, "moe_intermediate_size": 32, "attention_bias": True},
    "MiniMaxM2": {"num_local_experts": 4, "rotary_dim": 4},
    "GraniteMoe": {"num_local_experts": 4},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "Llama4": {"num_local_experts": 4, "intermediate_size_mlp": 40, "moe_layers": [1]},
}


def config(family: str, **changes) -> dict:
    return HF | FAMILIES[family] | {"architectures": [f"{family}ForCausalLM"]} | changes


def write_config(folder: Path, family: str, **changes) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config(family, **changes)))
    return read_config(folder, jnp.float32)


def form_table(spec: ModelSpec, form: int) -> dict:
    """`weights_table` of a checkpoint with experts in that form of `EXPERTS`."""
    names = {name.replace("{i}", str(i)).replace("{e}", "0") for name in spec.module.EXPERTS[form] for i in range(9)}
    return weights_table(spec, names)


def random_values(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Of the parameters, by their dotted names."""
    draw = np.random.default_rng(seed)
    values = {}
    for name, variable in named(abstract_params(spec)).items():
        shape = variable.get_value().shape
        near = 1.0 if name.endswith("scale") else 0.0
        values[name] = (near + 0.3 * draw.standard_normal(shape)).astype(np.float32)
    return values


def tensors_of(values: dict[str, np.ndarray], table: dict) -> dict[str, np.ndarray]:
    """What files hold of these parameters, by the table."""
    tensors = {}
    for name, weights in table.items():
        for weight in (weight for weight in weights if weight.path in values):
            value = values[weight.path]
            part = WeightPart.at(name, weight, value.shape, 0)
            left, right = weight.axes.split("->")
            tensors[name] = np.ascontiguousarray(rearrange(value[part.place], f"{right} -> {left}", **part.sizes))
    return tensors


def write_mixture(folder: Path, family: str, form: int = 0, dtype=np.float32, **changes) -> dict[str, np.ndarray]:
    """A checkpoint; returns the parameters."""
    spec = write_config(folder, family, **changes)
    values = random_values(spec)
    tensors = tensors_of(values, form_table(spec, form))
    save_file({name: value.astype(dtype) for name, value in tensors.items()}, folder / "model.safetensors")
    return values


def loaded_values(params) -> dict[str, jax.Array]:
    return {name: variable.get_value() for name, variable in named(params).items()}
