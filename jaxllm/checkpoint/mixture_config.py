"""Checks the keys of a `config.json` that mixtures of experts have, and what only some of their families read."""

from typing import Any

from jaxllm.argument_checks import check_float, check_int

_LAYERS, _EXPERTS, _WIDTH, _LEN = 2**10, 2**14, 2**20, 2**30
_ALL_EXPERTS = 2**17  # of a model, which has a name for each tensor of each: four times what is known
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SIZES = {  # least and most
    "num_experts": (0, _EXPERTS),
    "num_local_experts": (0, _EXPERTS),
    "n_routed_experts": (1, _EXPERTS),
    "moe_num_experts": (1, _EXPERTS),
    "num_experts_per_tok": (1, _EXPERTS),
    "experts_per_token": (1, _EXPERTS),
    "moe_k": (1, _EXPERTS),
    "n_group": (1, _EXPERTS),
    "topk_group": (1, _EXPERTS),
    "n_shared_experts": (0, 2**8),
    "moe_num_shared_experts": (0, 2**8),
    "moe_intermediate_size": (1, _WIDTH),
    "shared_expert_intermediate_size": (1, _WIDTH),
    "intermediate_size_mlp": (1, _WIDTH),
    "first_k_dense_replace": (0, _LAYERS),
    "decoder_sparse_step": (1, _LAYERS),
    "moe_layer_start_index": (0, _LAYERS),
    "moe_layer_end_index": (-1, _LAYERS),
    "moe_layer_interval": (1, _LAYERS),
    "interleave_moe_layer_step": (1, _LAYERS),
    "no_rope_layer_interval": (1, _LAYERS),
    "rotary_dim": (2, 2**12),
    "attention_chunk_size": (1, _LEN),
    "floor_scale": (1, _LEN),
}
_LISTS = {
    "mlp_only_layers": _LAYERS,
    "moe_layers": _LAYERS,
    "no_rope_layers": 1,
    "attn_type_list": 1,
}  # the largest that they hold
_FLAGS = ("norm_topk_prob", "use_qk_norm", "attn_temperature_tuning", "use_bias", "qkv_bias")
_NUMBERS = (
    "routed_scaling_factor",
    "clip_qkv",
    "swiglu_limit",
    "swiglu_alpha",
    "moe_norm_min",
    "attn_scale",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)
_REFUSED = ("capacity_factor", "moe_capacity_factor", "expert_capacity", "eval_capacity_factor")  # tokens get lost


def check_mixture(hf: dict[str, Any]) -> None:
    """Checks types and ranges; numbers become floats, and null is as if the key were absent. ValueError for values that
    can't be."""
    for key in (*_SIZES, *_LISTS, *_NUMBERS):
        if key in hf and hf[key] is None and key != "attention_chunk_size":  # there it says that there are none
            del hf[key]
    for key, (least, most) in _SIZES.items():
        if hf.get(key) is not None:
            check_int(key, hf[key], least, most)
    layers = hf.get("num_hidden_layers", 0)
    for key in _COUNTS:
        if layers * (hf.get(key) or 0) > _ALL_EXPERTS:
            raise ValueError(
                f"{key}={hf[key]} in each of {layers} layers are more than {_ALL_EXPERTS} experts; take the model's "
                "own config.json"
            )
    for key, most in _LISTS.items():
        values = hf.get(key, [])
        if not isinstance(values, list) or len(values) > _LAYERS:
            raise ValueError(f"{key}={hf[key]!r:.100} must be a list of at most {_LAYERS} integers")
        for value in values:
            check_int(key, value, 0, most)
    for key in _REFUSED:
        if hf.get(key):
            raise ValueError(f"{key}={hf[key]!r:.100} is not supported: no expert has a capacity here")
    for key in _FLAGS:
        if not isinstance(hf.get(key), bool | None):
            raise ValueError(f"{key}={hf[key]!r:.100} must be true or false")
    for key in _NUMBERS:
        if key in hf:
            check_float(key, hf[key], 1e-20, 1e12)
            hf[key] = float(hf[key])
