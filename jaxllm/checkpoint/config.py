"""A Hugging Face model directory's `config.json`: data that may be hostile. No code is taken from it."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp

from jaxllm.checkpoint.files import read_json
from jaxllm.errors import ModelFormatError
from jaxllm.models import registry, transformer

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}

# Far above any model that exists, and low enough that a damaged file cannot ask for terabytes.
_SIZES = {
    "vocab_size": 2**24, "hidden_size": 2**18, "num_hidden_layers": 2**10, "num_attention_heads": 2**12,
    "intermediate_size": 2**20, "max_position_embeddings": 2**30,
}  # fmt: skip
_OPTIONAL_SIZES = {"num_key_value_heads": 2**12, "head_dim": 2**12}
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
_ROPE_NUMBERS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model directory, understood: the architecture's module, its sizes, and the special tokens."""

    module: ModuleType
    cfg: transformer.Config
    eos_token_ids: tuple[int, ...]  # each ends a text; may be empty
    bos_token_id: int | None


def resolve_dtype(dtype: str, platform: str) -> Any:
    """The dtype of parameters and activations; "auto" is float32 on "cpu" (slow in bfloat16), else bfloat16.

    Raises `ValueError` for a name that is not "auto" or in `DTYPES`.
    """
    if dtype == "auto":
        return jnp.float32 if platform == "cpu" else jnp.bfloat16
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; choose one of {['auto', *DTYPES]}")
    return DTYPES[dtype]


def read_config(model_dir: Path, dtype: Any) -> ModelSpec:
    """Reads `config.json` and, for the ids that end a text, `generation_config.json`.

    `dtype` is what `resolve_dtype` returned. Raises `ModelFormatError` naming file, field and value.
    """
    if not model_dir.is_dir():
        raise ModelFormatError(
            f"{model_dir} is not a directory; give a local directory in Hugging Face format "
            "(config.json, tokenizer.json, *.safetensors)"
        )
    path = model_dir / "config.json"
    hf = read_json(path)
    try:
        if hf.get("quantization_config") is not None:
            raise ValueError("quantised weights (quantization_config) are not supported; use the original")
        module = _architecture(hf)
        _check_sizes(hf)
        _check_rope(hf)
        cfg = module.Config.from_hf(hf, dtype=dtype)
    except KeyError as error:
        raise ModelFormatError(f"{path} lacks the key {error}; take the model's whole config.json") from error
    except ValueError as error:
        raise ModelFormatError(f"{path}: {error}") from error

    eos = _generation_eos(model_dir, cfg.vocab) or _token_ids(path, hf, "eos_token_id", cfg.vocab)
    bos = _token_ids(path, hf, "bos_token_id", cfg.vocab)
    return ModelSpec(module=module, cfg=cfg, eos_token_ids=eos, bos_token_id=bos[0] if bos else None)


def _architecture(hf: dict) -> ModuleType:
    names = hf["architectures"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"architectures={names!r:.100} must be a list of names")
    known = [name for name in names if name in registry.ARCHITECTURES]
    if not known:
        supported = sorted(registry.ARCHITECTURES)
        raise ValueError(f"architectures={names!r:.200} is not supported; supported: {supported}")
    return registry.find(known[0])


def _check_sizes(hf: dict) -> None:
    for key, most in _SIZES.items():
        _check_int(key, hf[key], most)
    for key, most in _OPTIONAL_SIZES.items():
        if hf.get(key) is not None:
            _check_int(key, hf[key], most)
    for key in _FLAGS:
        if not isinstance(hf.get(key), bool | None):
            raise ValueError(f"{key}={hf[key]!r:.100} must be true or false")
    if "rms_norm_eps" in hf:
        _make_float(hf, "rms_norm_eps")

    heads, kv_heads = hf["num_attention_heads"], hf.get("num_key_value_heads") or hf["num_attention_heads"]
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if not hf.get("head_dim") and hf["hidden_size"] % heads:
        raise ValueError(
            f"hidden_size={hf['hidden_size']} is not a multiple of num_attention_heads={heads}; give head_dim"
        )
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} is odd, but rotary embeddings pair features; it must be even")


def _check_rope(hf: dict) -> None:
    if "rope_theta" in hf:
        _make_float(hf, "rope_theta")
    for key in ("rope_parameters", "rope_scaling"):
        rope = {} if hf.get(key) is None else hf[key]
        if not isinstance(rope, dict):
            raise ValueError(f"{key}={rope!r:.100} must be an object")
        kind = str(rope.get("rope_type", rope.get("type")))
        for name in _ROPE_NUMBERS.get(kind, ()):
            _make_float(rope, name, key)
        if kind == "llama3":
            _check_int(f"{key}.original_max_position_embeddings", rope.get("original_max_position_embeddings"), 2**30)
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if low >= high:
                raise ValueError(f"{key}: low_freq_factor={low} must be less than high_freq_factor={high}")
        if "rope_theta" in rope:
            _make_float(rope, "rope_theta", key)
        if (part := rope.get("partial_rotary_factor")) not in (1, None):
            raise ValueError(f"{key}.partial_rotary_factor={part} is not supported, only 1")


def _check_int(key: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{key}={value!r:.100} must be an integer in [1, {most}]")


def _make_float(owner: dict, key: str, *path: str) -> None:
    """Checks `owner[key]` and makes it a float, since JSON may write 1000000 where 1e6 is meant."""
    value = owner.get(key)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < 1e12:
        raise ValueError(f"{'.'.join((*path, key))}={value!r:.100} must be a positive number below 1e12")
    owner[key] = float(value)


def _generation_eos(model_dir: Path, vocab: int) -> tuple[int, ...]:
    path = model_dir / "generation_config.json"
    return _token_ids(path, read_json(path), "eos_token_id", vocab) if path.exists() else ()


def _token_ids(path: Path, hf: dict, key: str, vocab: int) -> tuple[int, ...]:
    """The id or ids of `key`, without repeats; none where it is absent or null."""
    value = hf.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise ModelFormatError(
                f"{path}: {key} holds {token!r:.100}, which is not a token id in [0, {vocab}); "
                "correct it, or use null for none"
            )
    return tuple(dict.fromkeys(ids))
