"""Random tiny checkpoints of every family, saved by transformers, and what it makes of them."""

import copy

import pytest

SIZES = {
    "vocab_size": 160,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA = {
    "tie_word_embeddings": True,
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
    "final_logit_softcapping": 4.0,
}
MIXTURE = {"intermediate_size": 40}
QWEN_MIXTURE = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "mlp_only_layers": [1]}
FAMILIES = {  # transformers' name -> how its sizes differ from `SIZES`; None: it has no such key
    "Llama": {},
    "Mistral": {},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma2": GEMMA | {"attn_logit_softcapping": 1.5},
    "Gemma3": GEMMA | {"sliding_window_pattern": 3},
    "Phi3": {"head_dim": None, "num_key_value_heads": 1},
    "OPT": {
        "head_dim": None,
        "num_key_value_heads": None,
        "intermediate_size": None,
        "initializer_range": None,
        "tie_word_embeddings": True,
        "ffn_dim": 80,
        "init_std": 0.2,
    },
    "Mixtral": MIXTURE | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen2Moe": MIXTURE | QWEN_MIXTURE | {"shared_expert_intermediate_size": 40, "head_dim": None},
    "Qwen3Moe": MIXTURE | QWEN_MIXTURE | {"norm_topk_prob": True},
    "Olmoe": MIXTURE | {"head_dim": None, "num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 1.5},
    "GptOss": MIXTURE | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8, "swiglu_limit": 1.0},
    "Glm4Moe": MIXTURE
    | {
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "MiniMaxM2": MIXTURE
    | {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "GraniteMoe": MIXTURE
    | {
        "head_dim": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "Ernie4_5_Moe": MIXTURE
    | {"head_dim": None, "moe_intermediate_size": 24, "moe_num_experts": 8, "moe_k": 2, "tie_word_embeddings": True},
    "Llama4": MIXTURE
    | {
        "intermediate_size": 24,
        "intermediate_size_mlp": 80,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 4,
        "floor_scale": 16,
        "pad_token_id": 0,
    },
}
FACTORS = [1.0, 1.1, 1.4, 1.7, 2.0, 2.5], [2.0, 3.0, 4.0, 6.0, 7.0, 8.0]
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": FACTORS[0], "long_factor": FACTORS[1]}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def config(family: str, **changes):
    """transformers' configuration of a tiny model."""
    transformers = pytest.importorskip("transformers")
    fields = {key: value for key, value in (SIZES | FAMILIES[family]).items() if value is not None}
    name = f"{family}TextConfig" if family in ("Gemma3", "Llama4") else f"{family}Config"
    return getattr(transformers, name)(**copy.deepcopy(fields | changes))  # it writes into what it is given


def checkpoint(path, family: str, seed: int = 0, **changes):
    """Saves a random model as transformers does, and returns it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config(family, **changes)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.2)
        for name, weight in model.named_buffers():
            if name.endswith("correction_bias"):
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(path)
    return model


def logits(model, tokens, *, cached_from: int | None = None):
    """`[len(tokens), vocab]` of transformers' `model`: of all tokens at once, or of those from `cached_from` on one by
    one over a cache."""
    torch = pytest.importorskip("torch")
    stop = len(tokens) if cached_from is None else cached_from
    with torch.no_grad():
        out = model(torch.tensor([tokens[:stop]]), use_cache=True)
        rows = [out.logits[0]]
        cache = "cache" if "cache" in out else "past_key_values"  # its name before transformers 5.24
        for token in tokens[stop:]:
            out = model(torch.tensor([[token]]), **{cache: out[cache]}, use_cache=True)
            rows.append(out.logits[0])
    return torch.cat(rows).numpy()
