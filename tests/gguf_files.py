"""Tiny GGUF files, written with llama.cpp's own package as its converter does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

ARCHITECTURES = {
    "Llama": "llama",
    "Mistral": "llama",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Gemma2": "gemma2",
    "Gemma3": "gemma3",
    "Phi3": "phi3",
    "Mixtral": "llama",
    "Qwen2Moe": "qwen2moe",
    "Qwen3Moe": "qwen3moe",
}
QUANTISED = {"F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}  # types that the package can write


def kind(name: str) -> Any:
    return gguf.GGMLQuantizationType[name]


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Llama's queries or keys, in the order that the converter gives them."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def separate(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes `interleave`."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


class Converted:
    """A model of transformers as its converter writes it: `tensors` by the file's names, quantised, and `state`, what
    a reader makes of them, by Hugging Face's."""

    def __init__(self, family: str, model: Any, dtype: Callable[[str], str] = lambda name: "Q8_0"):
        self.config, self.architecture = model.config, ARCHITECTURES[family]
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        self._names = gguf.get_tensor_name_map(arch, self.config.num_hidden_layers)
        self.tensors: dict[str, tuple[np.ndarray, Any]] = {}
        self.state: dict[str, np.ndarray] = {}
        for name, tensor in model.state_dict().items():
            if name != "lm_head.weight" or not self.config.tie_word_embeddings:
                add = self._add_experts if tensor.ndim == 3 else self._add
                add(name, tensor.float().numpy(), dtype)

    def _add_experts(self, name: str, value: np.ndarray, dtype: Callable[[str], str]) -> None:
        """Gate and up in tensors of their own."""
        members = [name]
        if name.endswith("gate_up_proj"):
            members = [name.replace("gate_up_proj", member) for member in ("gate_proj", "up_proj")]
        for member, part in zip(members, np.split(value, len(members), axis=1), strict=True):
            self._add(f"{member}.weight", part, dtype)
        self.state[name] = np.concatenate([self.state.pop(f"{member}.weight") for member in members], axis=1)

    def _add(self, name: str, value: np.ndarray, dtype: Callable[[str], str]) -> None:
        stored_name = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None, name
        heads = {"attn_q": self.config.num_attention_heads, "attn_k": self.config.num_key_value_heads}
        heads_here = heads.get(stored_name.split(".")[-2]) if self.architecture == "llama" else None
        is_gemma_norm = self.architecture.startswith("gemma") and "norm" in stored_name
        value = interleave(value, heads_here) if heads_here else value + np.float32(1) if is_gemma_norm else value
        chosen = kind(dtype(stored_name) if value.ndim > 1 else "F32")
        data = gguf.quants.quantize(value, chosen)
        read = gguf.quants.dequantize(data, chosen).astype(np.float32).reshape(value.shape)
        read = separate(read, heads_here) if heads_here else read - np.float32(1) if is_gemma_norm else read
        self.tensors[stored_name], self.state[name] = (data, chosen), np.ascontiguousarray(read)

    def metadata(self) -> dict[str, Any]:
        """The keys that say how the model computes, without the architecture's prefix."""
        config = self.config
        rope = config.rope_parameters
        if "full_attention" in rope:
            rope = rope["full_attention"]
        keys = {
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "block_count": config.num_hidden_layers,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            "rope.freq_base": float(rope["rope_theta"]),
        }
        if self.architecture != "phi3":
            keys["attention.key_length"] = keys["attention.value_length"] = config.head_dim
        if self.architecture.startswith("gemma"):
            keys |= {"attention.sliding_window": config.sliding_window}
            keys |= {"final_logit_softcapping": config.final_logit_softcapping}
        if self.architecture == "gemma2":
            keys |= {"attn_logit_softcapping": config.attn_logit_softcapping}
        if self.architecture == "phi3":
            keys |= {"attention.sliding_window": config.sliding_window or 0}
        if hasattr(config, "num_experts_per_tok"):
            experts = config.num_experts if self.architecture == "qwen2moe" else config.num_local_experts
            keys |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
        if "moe" in self.architecture:
            keys |= {"expert_feed_forward_length": config.moe_intermediate_size}
        if self.architecture == "qwen2moe":
            keys |= {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
        return keys

    def write(self, file: Path, changes: dict[str, Any] | None = None, **tokenizer: Any) -> Path:
        """`changes` are metadata without the prefix (None: left out), `tokenizer` are its keys."""
        keys = self.metadata() | (changes or {})
        prefixed = {f"{self.architecture}.{key}": value for key, value in keys.items()}
        return write(file, self.architecture, prefixed | vocabulary_keys(**tokenizer), self.tensors)


def vocabulary_keys(**keys: Any) -> dict[str, Any]:
    return {f"tokenizer.{'' if key.startswith('chat') else 'ggml.'}{key}": value for key, value in keys.items()}


def write(file: Path, architecture: str, metadata: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """`tensors` are pairs of stored array and type (None: float32). Ints become uint32, floats float32."""
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in metadata.items():
        add_key(writer, key, value)
    for name, tensor in tensors.items():
        data, dtype = tensor
        writer.add_tensor(name, data, raw_dtype=kind("F32") if dtype is None else dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_key(writer: Any, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)
