"""The `config.json` of a model, checked to be read as the model's configuration again."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from flax import nnx

from jaxllm.argument_checks import a_type
from jaxllm.checkpoint.config import read_spec
from jaxllm.checkpoint.formats import Checkpoint, GivenConfig, open_checkpoint
from jaxllm.models import gemma2, gemma3, llama, mistral, qwen2, qwen3, registry, transformer
from jaxllm.models.definition import Definition
from jaxllm.models.rope import Dynamic, LinearRope, Llama3, Rope, Yarn

_ORIGINAL = {"original_max_len": "original_max_position_embeddings"}
_ROPES: Mapping[type[Rope], tuple[str, Mapping[str, str]]] = {  # name of the kind, our fields by their names
    Rope: ("default", {}),
    LinearRope: ("linear", {"factor": "factor"}),
    Dynamic: ("dynamic", {"factor": "factor"}),
    Llama3: ("llama3", {key: key for key in ("factor", "low_freq_factor", "high_freq_factor")} | _ORIGINAL),
    Yarn: (
        "yarn",
        {key: key for key in ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor")} | _ORIGINAL,
    ),
}
_QUANTISED = ("quantization_config", "compression_config", "quantization")


def family_of(model: Any) -> tuple[ModuleType, Any]:
    """The architecture's file that `model` is of, and the configuration. ValueError for a class of somebody else's that
    is not registered, TypeError for what is no module."""
    kind, cfg = type(model), getattr(model, "cfg", None)
    for module in registry.modules():
        if kind is module.Model and type(cfg) is module.Config:
            return module, cfg
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model is {a_type(model)}; give a module, as LLM.module is of an LLM")
    raise ValueError(
        f"{kind.__module__}.{kind.__qualname__} is no architecture's Model in jaxllm.models: how its parameters are "
        "called in a checkpoint is not known. jaxllm.models.registry.register makes an architecture known, with its "
        "WEIGHTS"
    )


def check_definition(model: nnx.Module, family: ModuleType, cfg: Any) -> None:
    """ValueError for a module that differs from the one that is made of its configuration, which is what is read."""
    made = Definition.of(transformer.abstract(family.Model, cfg))
    found = Definition.of(model).difference(made, "in the model", "in what its configuration describes")
    if found is not None:
        raise ValueError(
            f"config.json has no words for this model: {found}. Make the model of a configuration that says so, if one "
            "can; otherwise save nnx.state(model), by Orbax say"
        )


def checked_config(cfg: Any, folder: Path | None) -> dict[str, Any]:
    """The keys of the model at `folder`, or of `cfg` alone if it is None, without those of a quantisation. ValueError
    if they describe another model than `cfg`."""
    if folder is None:
        checkpoint: Checkpoint = GivenConfig(made_config(cfg))
        where, remedy = "its config.json, made of the model's configuration,", "give like=, a directory of such a model"
    else:
        checkpoint = open_checkpoint(folder)
        where, remedy = str(checkpoint.config_path), "give like=, a directory with the same configuration"
    task = None if cfg.task == "generate" else cfg.task
    hf = checkpoint.config()
    read = read_spec(checkpoint, cfg.dtype, task=task).cfg
    wanted, got = _plain(cfg), _plain(read)
    if type(read) is not type(cfg) or wanted != got:
        different = [key for key in wanted.keys() | got.keys() if wanted.get(key) != got.get(key)]
        raise ValueError(
            f"{where} describes a {type(read).__module__} that differs from the model ({type(cfg).__module__}) in "
            f"{', '.join(sorted(different)) or 'its kind'}; {remedy}"
        )
    return {key: value for key, value in hf.items() if key not in _QUANTISED}


def made_config(cfg: Any) -> dict[str, Any]:
    """The content of a `config.json` for a language model of the families that `_FAMILIES` has, in the form of
    transformers 5. ValueError for others."""
    if type(cfg) not in _FAMILIES or cfg.task != "generate":
        known = ", ".join(kind.__module__.rpartition(".")[2] for kind in _FAMILIES)
        raise ValueError(
            f"no config.json can be made of a {type(cfg).__module__}.{type(cfg).__qualname__} with task={cfg.task!r}, "
            f"only of language models of {known}; give like=, a directory of such a model"
        )
    name, model_type, own = _FAMILIES[type(cfg)]
    ropes = {layer.window is None: layer.rope for layer in cfg.layers}
    rope = ropes.get(True, ropes.get(False))
    shared = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.embed,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.mlp,
        "max_position_embeddings": rope.original_max_len if isinstance(rope, Dynamic) else cfg.max_len,
        "rms_norm_eps": cfg.eps,
        "hidden_act": cfg.activation,
        "tie_word_embeddings": cfg.tie_embeddings,
        "rope_parameters": _rope(rope),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return shared | own(cfg)


def _rope(rope: Rope | None) -> dict[str, Any]:
    if rope is None or type(rope) not in _ROPES:
        raise ValueError(f"no config.json can be made for the positions {rope!r}; give like=, a directory with it")
    kind, fields = _ROPES[type(rope)]
    values = {theirs: getattr(rope, ours) for ours, theirs in fields.items()}
    given = {key: value for key, value in values.items() if value is not None}
    return {"rope_type": kind, "rope_theta": rope.theta, **given}


def _windows(cfg: Any) -> dict[str, Any]:
    """By the type of each layer."""
    windows = [layer.window for layer in cfg.layers]
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"layer_types": types, "sliding_window": next((one for one in windows if one is not None), None)}


def _llama(cfg: Any) -> dict[str, Any]:
    return {"attention_bias": cfg.qkv_bias, "mlp_bias": cfg.mlp_bias}


def _mistral(cfg: Any) -> dict[str, Any]:
    return {"sliding_window": cfg.layers[0].window}


def _qwen2(cfg: Any) -> dict[str, Any]:
    windows = _windows(cfg)
    is_used = windows["sliding_window"] is not None
    return windows | {"use_sliding_window": is_used, "max_window_layers": cfg.num_layers}


def _qwen3(cfg: Any) -> dict[str, Any]:
    return _qwen2(cfg) | {"attention_bias": cfg.qkv_bias}


def _gemma2(cfg: Any) -> dict[str, Any]:
    scalar = cfg.head_dim if cfg.query_scale is None else cfg.query_scale**-2
    windows = _windows(cfg)
    return windows | {
        "sliding_window": windows["sliding_window"] or cfg.max_len,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "hidden_activation": cfg.activation,
        "attn_logit_softcapping": cfg.attn_soft_cap,
        "final_logit_softcapping": cfg.logit_soft_cap,
        "attention_bias": cfg.qkv_bias,
    }


def _gemma3(cfg: Any) -> dict[str, Any]:
    ropes = {kind: [layer.rope for layer in cfg.layers if (layer.window is None) == kind] for kind in (True, False)}
    full, local = (ropes[kind][0] if ropes[kind] else Rope(theta=1e4) for kind in (True, False))
    return _gemma2(cfg) | {"rope_parameters": {"full_attention": _rope(full), "sliding_attention": _rope(local)}}


_FAMILIES: Mapping[type, tuple[str, str, Callable[[Any], dict[str, Any]]]] = {
    llama.Config: ("Llama", "llama", _llama),
    mistral.Config: ("Mistral", "mistral", _mistral),
    qwen2.Config: ("Qwen2", "qwen2", _qwen2),
    qwen3.Config: ("Qwen3", "qwen3", _qwen3),
    gemma2.Config: ("Gemma2", "gemma2", _gemma2),
    gemma3.Config: ("Gemma3", "gemma3_text", _gemma3),
}


def _plain(cfg: Any) -> dict[str, Any]:
    """The fields that make a model what it is, where each value is written one way."""
    fields = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg) if field.name != "dtype"}
    return fields | {"query_scale": cfg.query_scale or cfg.head_dim**-0.5}
