"""Reads a checkpoint's configuration, in the form of a Hugging Face `config.json`, which may be hostile: it is data
only, no code of the directory runs."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp

from jaxllm.argument_checks import check_float, check_int
from jaxllm.checkpoint import unsupported
from jaxllm.checkpoint.formats import Checkpoint, open_checkpoint
from jaxllm.checkpoint.mixture_config import check_mixture
from jaxllm.checkpoint.quantized.detect import scheme_of
from jaxllm.errors import ModelFormatError
from jaxllm.models import registry, tasks, transformer
from jaxllm.models.layers import ACTIVATIONS

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}

# Far above any existing model, and low enough that a damaged file cannot ask for terabytes.
_MAX_LEN = 2**30
_SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**18,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**12,
    "intermediate_size": 2**20,
    "ffn_dim": 2**20,
    "max_position_embeddings": _MAX_LEN,
}
_OPTIONAL_SIZES = {
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "word_embed_proj_dim": 2**18,
    "sliding_window": _MAX_LEN,
    "sliding_window_pattern": 2**10,
    "original_max_position_embeddings": _MAX_LEN,
    "type_vocab_size": 2**10,
    "local_attention": _MAX_LEN,
    "global_attn_every_n_layers": 2**10,
}
_IDS = ("pad_token_id", "sep_token_id")
_FLAGS = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "use_bidirectional_attention",
    "is_causal",
    "is_decoder",
    "add_cross_attention",
    "norm_bias",
    "classifier_bias",
    "do_layer_norm_before",
    "_remove_final_layer_norm",
    "layer_norm_elementwise_affine",
    "enable_bias",
)
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "classifier_activation")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps")
_OPTIONAL_NUMBERS = ("attn_logit_softcapping", "final_logit_softcapping", "partial_rotary_factor")
_ROPE_NUMBERS = {  # required by each kind
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_OPTIONAL_ROPE_NUMBERS = ("factor", "attention_factor", "beta_fast", "beta_slow", "partial_rotary_factor")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A parsed model directory: the architecture's module, its sizes, and the special tokens."""

    module: ModuleType
    cfg: transformer.Config
    eos_token_ids: tuple[int, ...]  # each ends a generation; may be empty


def resolve_dtype(dtype: str, platform: str) -> Any:
    """The dtype of parameters and activations; "auto" is float32 on "cpu", else bfloat16. (`auto_dtype.dtype_for_cpu`
    says where an engine prefers bfloat16 on a CPU.)

    Raises `ValueError` for a name that is not "auto" or in `DTYPES`.
    """
    if dtype == "auto":
        return jnp.float32 if platform == "cpu" else jnp.bfloat16
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; choose one of {['auto', *DTYPES]}")
    return DTYPES[dtype]


def read_config(path: Path, dtype: Any) -> ModelSpec:
    """The specification of the model in the directory, or GGUF file, `path`; see `read_spec`."""
    return read_spec(open_checkpoint(path), dtype)


def read_spec(checkpoint: Checkpoint, dtype: Any, overrides: Any = None, task: str | None = None) -> ModelSpec:
    """Reads the configuration, and the ids of end-of-sequence tokens; a `generation_config.json` goes before it there.
    `overrides` are in the place of keys of the configuration, `task` in that of what the architecture is for.

    `dtype` comes from `resolve_dtype`. Raises `ModelFormatError` naming file, field and value.
    """
    if not isinstance(overrides, dict | None):
        raise ValueError(f"hf_overrides is a {type(overrides).__name__}; give a dict of config.json's keys")
    hf, path = checkpoint.config() | (overrides or {}), checkpoint.config_path
    try:
        name = _architecture(hf)
        module = registry.find(name)
        scheme_of(checkpoint, hf)  # refuses what can't be read
        _check_sizes(hf)
        check_mixture(hf)
        _check_ropes(hf)
        cfg = module.Config.from_hf(hf, dtype=dtype, **tasks.task_fields(name, hf, task))
        if cfg.task == "classify" and hf.get("classifier_from_token") is not None:
            cfg = replace(cfg, label_tokens=_label_tokens(checkpoint, module, hf["classifier_from_token"]))
        if getattr(cfg, "has_pairs", False) and cfg.sep_token_id is None:
            cfg = replace(cfg, sep_token_id=_separator(checkpoint))
        if cfg.max_len > _MAX_LEN:
            raise ValueError(f"rope scaling makes a context of {cfg.max_len} tokens; at most {_MAX_LEN} are supported")
    except KeyError as error:
        raise ModelFormatError(f"{path} lacks the key {error}; take the model's whole config.json") from error
    except ValueError as error:
        raise ModelFormatError(f"{path}: {error}") from error

    eos = _token_ids(checkpoint.generation_path, checkpoint.generation_config(), "eos_token_id", cfg.vocab)
    eos = eos or _token_ids(path, hf, "eos_token_id", cfg.vocab)
    return ModelSpec(module=module, cfg=cfg, eos_token_ids=eos)


def _label_tokens(checkpoint: Checkpoint, module: ModuleType, given: Any) -> tuple[int, int]:
    """The ids of the tokens that a language model chooses between."""
    if not issubclass(module.Model, transformer.Decoder):
        raise ValueError("classifier_from_token is for language models; an encoder has a head of its own")
    tokens = given if isinstance(given, list) and len(given) == 2 else []
    vocab = checkpoint.tokenizer().get_vocab()
    ids = [vocab[token] for token in tokens if isinstance(token, str) and token in vocab]
    if len(ids) != 2:
        raise ValueError(f'classifier_from_token={given!r:.100} must be two tokens of the tokenizer, as ["no", "yes"]')
    return ids[0], ids[1]


def _separator(checkpoint: Checkpoint) -> int | None:
    """The token between two texts, as the tokenizer's files say; None if they don't tell the texts apart."""
    tokenizer = checkpoint.tokenizer()
    if tokenizer.tells_pairs and tokenizer.sep_token_id is None:
        raise ValueError("it has no sep_token_id, nor the tokenizer a sep_token, which ends the first text of a pair")
    return tokenizer.sep_token_id if tokenizer.tells_pairs else None


def _architecture(hf: dict) -> str:
    names, model_type = hf.get("architectures"), hf.get("model_type")
    types = [model_type[:100]] if isinstance(model_type, str) else []
    if names is None:
        if found := unsupported.describe(types, hf):
            raise ValueError(found)
        names = hf["architectures"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"architectures={names!r:.100} must be a list of names")
    known = [name for name in names if name in registry.ARCHITECTURES]
    if not known:
        if found := unsupported.describe([*(name[:100] for name in names), *types], hf):
            raise ValueError(found)
        supported = sorted(registry.ARCHITECTURES)
        raise ValueError(
            f"architectures={names!r:.200} is not supported; supported: {supported}, and what "
            "jaxllm.models.registry.register is given"
        )
    return known[0]


def _check_sizes(hf: dict) -> None:
    """Checks types and ranges of the keys that some family reads; `from_hf` finds missing keys."""
    if hf.get("sliding_window") == 0 and hf.get("use_sliding_window") is False:  # as transformers 5 writes Qwen2-MoE's
        hf["sliding_window"] = None
    for key, most in (_SIZES | _OPTIONAL_SIZES).items():
        if key in hf and not (hf[key] is None and key in _OPTIONAL_SIZES):
            check_int(key, hf[key], 1, most)
    if "max_window_layers" in hf:
        check_int("max_window_layers", hf["max_window_layers"], 0, 2**10)
    for key in _FLAGS:
        if not isinstance(hf.get(key), bool | None):
            raise ValueError(f"{key}={hf[key]!r:.100} must be true or false")
    for key in _ACTIVATIONS:
        if hf.get(key) is not None and hf[key] not in list(ACTIVATIONS):
            raise ValueError(f"{key}={hf[key]!r:.100} is not supported; supported: {sorted(ACTIVATIONS)}")
    types = hf.get("layer_types")
    if types is not None and not (isinstance(types, list) and all(isinstance(kind, str) for kind in types)):
        raise ValueError(f"layer_types={types!r:.100} must be a list of strings")
    for key in _EPSILONS:
        if key in hf:
            _make_float(hf, key, least=1e-12)
    for key in _IDS:
        if hf.get(key) is not None:
            check_int(key, hf[key], 0, _SIZES["vocab_size"])
    if "query_pre_attn_scalar" in hf:
        _make_float(hf, "query_pre_attn_scalar")
    for key in _OPTIONAL_NUMBERS:
        if hf.get(key) is not None:
            _make_float(hf, key)

    heads, kv_heads = hf["num_attention_heads"], hf.get("num_key_value_heads") or hf["num_attention_heads"]
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if not hf.get("head_dim") and hf["hidden_size"] % heads:
        raise ValueError(
            f"hidden_size={hf['hidden_size']} is not a multiple of num_attention_heads={heads}; give head_dim"
        )


def _check_ropes(hf: dict) -> None:
    for key in ("rope_theta", "rope_local_base_freq", "global_rope_theta", "local_rope_theta"):
        if key in hf:
            _make_float(hf, key, least=1.0)
    for key in ("rope_parameters", "rope_scaling"):
        rope = _object(hf, key)
        _check_rope(rope, key)
        for kind in ("full_attention", "sliding_attention"):
            _check_rope(_object(rope, kind, key), f"{key}.{kind}")


def _object(owner: dict, key: str, *path: str) -> dict:
    value = {} if owner.get(key) is None else owner[key]
    if not isinstance(value, dict):
        raise ValueError(f"{'.'.join((*path, key))}={value!r:.100} must be an object")
    return value


def _check_rope(rope: dict, path: str) -> None:
    for name in ("rope_type", "type"):
        if not isinstance(rope.get(name), str | None):
            raise ValueError(f"{path}.{name}={rope[name]!r:.100} must be a string")
    kind = rope.get("rope_type") or rope.get("type")
    needed = _ROPE_NUMBERS.get(kind, ())
    for name in (*needed, *(name for name in _OPTIONAL_ROPE_NUMBERS if rope.get(name) is not None)):
        _make_float(rope, name, path)
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        raise ValueError(f"{path}: low_freq_factor={low} must be less than high_freq_factor={high}")
    for name in ("mscale", "mscale_all_dim"):
        if rope.get(name) not in (None, 0):  # 0 means not given
            _make_float(rope, name, path)
    if "rope_theta" in rope:
        _make_float(rope, "rope_theta", path, least=1.0)
    if (original := rope.get("original_max_position_embeddings")) is not None:
        check_int(f"{path}.original_max_position_embeddings", original, 1, _MAX_LEN)
    if not isinstance(rope.get("truncate", True), bool):
        raise ValueError(f"{path}.truncate={rope['truncate']!r:.100} must be true or false")
    for name in ("short_factor", "long_factor"):
        factors = rope.get(name, [])
        if not isinstance(factors, list):
            raise ValueError(f"{path}.{name}={factors!r:.100} must be a list of numbers")
        numbers = {str(i): value for i, value in enumerate(factors)}
        for i in numbers:
            _make_float(numbers, i, path, name)
        if factors:
            rope[name] = list(numbers.values())


def _make_float(owner: dict, key: str, *path: str, least: float = 1e-6) -> None:
    """Checks `owner[key]` and converts it to float: JSON may write 1000000 for 1e6."""
    check_float(".".join((*path, key)), owner.get(key), least, 1e12)
    owner[key] = float(owner[key])


def _token_ids(path: Path, hf: dict, key: str, vocab: int) -> tuple[int, ...]:
    """The id or ids of `key`, without repeats; empty if it is absent or null."""
    value = hf.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise ModelFormatError(
                f"{path}: {key} holds {token!r:.100}, which is not a token id in [0, {vocab}); "
                "correct it, or use null for none"
            )
    return tuple(dict.fromkeys(ids))
