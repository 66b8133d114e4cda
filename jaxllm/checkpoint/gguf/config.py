"""A GGUF file's metadata as the `config.json` that the same model has in Hugging Face format."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxllm.checkpoint import unsupported
from jaxllm.checkpoint.gguf.architectures import ARCHITECTURES, MODEL_TYPES, Architecture
from jaxllm.checkpoint.gguf.metadata import Metadata
from jaxllm.checkpoint.gguf.vocabulary import stop_ids
from jaxllm.checkpoint.tensors import StoredTensor
from jaxllm.errors import ModelFormatError

# Keys that change what a model computes, in ways that no architecture here has; with these values they don't.
_UNSUPPORTED = {
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "attention.scale": (0,),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0,),
    "attention.clamp_kqv": (0,),
    "attention.temperature_scale": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "nextn_predict_layers": (0,),
    "expert_weights_scale": (0, 1),
    "expert_group_count": (0, 1),
    "leading_dense_block_count": (0,),
}


def architecture_of(metadata: Metadata) -> Architecture:
    """Raises `ModelFormatError` for one that is not supported."""
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        what = unsupported.describe([name[:100]], {})
        raise ModelFormatError(
            f"{metadata.file}: general.architecture={name!r:.100} is not supported; supported: "
            f"{', '.join(sorted(ARCHITECTURES))} (llama is Mistral's too)" + (f". {what}" if what else "")
        )
    return ARCHITECTURES[name]


def hugging_face_config(
    metadata: Metadata, tensors: Mapping[str, StoredTensor], vector: Callable[[str], np.ndarray]
) -> dict[str, Any]:
    """What `config.json` would hold. `tensors` have the file's names, and `vector` reads one of them, float32 `[n]`.
    Raises `ModelFormatError`."""
    architecture, keys = architecture_of(metadata), _Keys(metadata)
    keys.check_supported()
    if "token_embd.weight" not in tensors:
        raise ModelFormatError(f"{metadata.file} has no tensor token_embd.weight; take a file with a whole model")
    heads, width = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", width // max(heads, 1))
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.error("attention.value_length", f"differs from the keys' length, {head_dim}; that is not supported")
    config = {
        "architectures": [architecture.name],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": keys.integer("feed_forward_length"),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "eos_token_id": stop_ids(metadata),
    } | _mixture_keys(architecture, keys)
    if scaling := _rope_scaling(keys, vector, tensors, config["max_position_embeddings"]):
        config["rope_scaling"] = scaling
    turned = keys.integer("rope.dimension_count", head_dim)
    if turned != head_dim:
        config["partial_rotary_factor"] = _fraction(turned, head_dim)
    config |= _family_keys(architecture, keys, config)
    # Classes have tokens for padding of their own, which may lie beyond the vocabulary.
    return config | {"model_type": MODEL_TYPES[config["architectures"][0]], "pad_token_id": None}


def _mixture_keys(architecture: Architecture, keys: "_Keys") -> dict[str, Any]:
    """Those of the experts, where there are some."""
    experts = keys.integer("expert_count", 0)
    if not experts:
        return {}
    if architecture.mixture is None:
        raise keys.error("expert_count", "is not supported for this architecture")
    mixture = {
        "architectures": [architecture.mixture],
        "num_experts": experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "norm_topk_prob": architecture.renormalises,
    }
    if architecture.mixture != "MixtralForCausalLM":  # whose experts are as wide as a dense layer
        mixture["moe_intermediate_size"] = keys.integer("expert_feed_forward_length")
    if "expert_shared_feed_forward_length" in keys:
        mixture["shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length")
    return mixture


class _Keys:
    """The metadata whose keys begin with the architecture's name."""

    def __init__(self, metadata: Metadata):
        self._metadata, self._prefix = metadata, metadata.text("general.architecture") + "."

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._metadata

    def integer(self, key: str, *default: Any) -> Any:
        return self._metadata.integer(self._prefix + key, *default)

    def number(self, key: str, *default: Any) -> Any:
        return self._metadata.number(self._prefix + key, *default)

    def text(self, key: str, *default: Any) -> Any:
        return self._metadata.text(self._prefix + key, *default)

    def numbers(self, key: str, *default: Any) -> Any:
        return self._metadata.numbers(self._prefix + key, *default)

    def is_array(self, key: str) -> bool:
        return self._metadata.is_array(self._prefix + key)

    def error(self, key: str, what: str) -> ModelFormatError:
        return self._metadata.error(self._prefix + key, what)

    def check_supported(self) -> None:
        for key, harmless in _UNSUPPORTED.items():
            if key not in self:
                continue
            is_flag = isinstance(harmless[0], bool)
            value = self._metadata.flag(self._prefix + key) if is_flag else self.number(key)
            if value not in harmless:
                raise self.error(key, "is not supported for this architecture")


def _family_keys(architecture: Architecture, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    """The keys that only some families' configurations have."""
    window = keys.integer("attention.sliding_window", architecture.default_window) or None
    if architecture.name == "Phi3ForCausalLM":
        max_len = config["max_position_embeddings"]
        original = keys.integer("rope.scaling.original_context_length", max_len)
        return {"sliding_window": window, "original_max_position_embeddings": original}
    if architecture.full_attention_each is None:
        if window is None or window >= config["max_position_embeddings"]:
            return {}
        if architecture.name == "LlamaForCausalLM":
            return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
        raise keys.error("attention.sliding_window", "is not supported, as the file does not say for which layers")
    num_layers, width, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    is_wide = num_layers == architecture.wide_query_scale_at
    attention_cap, logit_cap = (50.0, 30.0) if architecture.name == "Gemma2ForCausalLM" else (None, None)
    family = {
        "layer_types": _layer_types(architecture.full_attention_each, keys, num_layers),
        "sliding_window": window,
        "query_pre_attn_scalar": width // heads if is_wide else config["head_dim"],
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", attention_cap) or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", logit_cap) or None,
    }
    if architecture.name == "Gemma3ForCausalLM":
        family["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10000.0)
    return family


def _layer_types(full_each: int, keys: _Keys, num_layers: int) -> list[str]:
    pattern = "attention.sliding_window_pattern"
    if keys.is_array(pattern):  # for each layer, whether it has a window
        has_window = keys.numbers(pattern).tolist()
    else:
        full_each = keys.integer(pattern, full_each)
        if full_each < 1 or num_layers > 2**10:
            raise keys.error(pattern, f"must be at least 1, and the {num_layers} layers at most {2**10}")
        has_window = [(i + 1) % full_each != 0 for i in range(num_layers)]
    return ["sliding_attention" if one else "full_attention" for one in has_window]


def _rope_scaling(
    keys: _Keys, vector: Callable[[str], np.ndarray], tensors: Mapping[str, StoredTensor], max_len: int
) -> dict[str, Any] | None:
    """`rope_scaling`. Divisors of the frequencies that the file holds as tensors become longrope's."""
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    original = keys.integer("rope.scaling.original_context_length", max_len)
    amplitude = keys.number("rope.scaling.attn_factor", 1.0)
    if "rope_freqs.weight" in tensors:
        divisors = vector("rope_freqs.weight").tolist()
        return _longrope(divisors, divisors, max_len, amplitude)
    if "rope_factors_long.weight" in tensors:
        short, long = (vector(f"rope_factors_{length}.weight").tolist() for length in ("short", "long"))
        return _longrope(short, long, original, amplitude)
    kind = keys.text("rope.scaling.type", "linear" if factor else "none")
    if kind == "none" or factor in (0, 1):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.error("rope.scaling.type", "is not supported; supported: none, linear, yarn, and longrope's tensors")
    if not factor > 1:
        raise keys.error("rope.scaling.factor", "must be more than 1")
    amplitude *= keys.number("rope.scaling.yarn_attn_factor", 1.0)  # of the paper's
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": None if amplitude == 1 else amplitude * (0.1 * math.log(factor) + 1),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _longrope(short: list[float], long: list[float], original: int, amplitude: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": amplitude,
    }


def _fraction(turned: int, head_dim: int) -> float:
    """`turned / head_dim`, rounded such that the product with `head_dim` is not below `turned`."""
    fraction = turned / max(head_dim, 1)
    return fraction if int(head_dim * fraction) == turned else math.nextafter(fraction, math.inf)
