"""What is read from `config.json` and `generation_config.json`, and that hostile ones are refused."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.checkpoint.config import read_config, resolve_dtype
from jaxllm.checkpoint.files import read_json
from jaxllm.errors import ModelFormatError
from jaxllm.models import llama, qwen3, rope
from jaxllm.models.layers import LayerSpec

HF = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def write(directory, generation=None, drop=(), **changes):
    hf = {key: value for key, value in (HF | changes).items() if key not in drop}
    (directory / "config.json").write_text(json.dumps(hf))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_reads_sizes_and_special_tokens(tmp_path):
    spec = read_config(write(tmp_path), jnp.bfloat16)
    assert spec.module is llama and spec.cfg.dtype == jnp.bfloat16
    assert (spec.cfg.vocab, spec.cfg.embed, spec.cfg.head_dim, spec.cfg.mlp) == (64, 32, 16, 48)
    assert spec.cfg.max_len == 128 and spec.cfg.eps == 1e-5 and not spec.cfg.tie_embeddings
    assert spec.eos_token_ids == (2,)


def test_architecture_picks_the_module(tmp_path):
    spec = read_config(write(tmp_path, architectures=["Qwen3ForCausalLM"]), jnp.float32)
    assert spec.module is qwen3 and spec.cfg.qk_norm


def test_whole_numbers_may_stand_for_floats(tmp_path):
    cfg = read_config(write(tmp_path, rope_theta=1000000, rope_parameters=ROPE | {"factor": 8}), jnp.float32).cfg
    given = cfg.layers[0].rope
    assert (given.theta, given.factor) == (1e6, 8.0) and isinstance(given.theta, float)


def test_optional_sizes_have_defaults(tmp_path):
    spec = read_config(write(tmp_path, drop=["num_key_value_heads"], head_dim=None), jnp.float32)
    assert (spec.cfg.kv_heads, spec.cfg.head_dim) == (4, 8)


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [
        ({"eos_token_id": [5, 7, 5]}, 2, (5, 7)),
        ({"eos_token_id": 9}, [2, 3], (9,)),
        ({"eos_token_id": None}, [2, 3], (2, 3)),
        ({}, 0, (0,)),
        (None, None, ()),
    ],
)
def test_generation_config_decides_on_eos(tmp_path, generation, config, want):
    assert read_config(write(tmp_path, generation, eos_token_id=config), jnp.float32).eos_token_ids == want


def test_resolve_dtype():
    assert resolve_dtype("auto", "cpu") == jnp.float32
    assert resolve_dtype("auto", "gpu") == resolve_dtype("auto", "tpu") == jnp.bfloat16
    assert resolve_dtype("float16", "cpu") == jnp.float16
    with pytest.raises(ValueError, match="'int8' is unknown.*bfloat16"):
        resolve_dtype("int8", "cpu")


ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


ROPE_KEYS = [
    *ROPE,
    "rope_theta",
    "type",
    "partial_rotary_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
    "full_attention",
    "sliding_attention",
]
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MysteryForCausalLM"]}, "'Mystery.*LlamaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "architectures=.*list of names"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures=.*list of names"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "quantised by hqq, which is not supported; take .* a GGUF file",
        ),
        ({"quantization_config": 4}, "quantization_config=4 must be an object"),
        ({"architectures": None, "model_type": "bert"}, "bert is an encoder"),
        ({"vocab_size": "64"}, "vocab_size='64'.*integer"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"num_hidden_layers": -2}, "num_hidden_layers=-2"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers=10{9} must be an integer in \[1, 1024\]"),
        ({"intermediate_size": 10**4000}, "intermediate_size=1000"),
        ({"intermediate_size": 48.0}, "intermediate_size=48.0"),
        ({"num_attention_heads": None}, "num_attention_heads=None"),
        ({"max_position_embeddings": [128]}, "max_position_embeddings="),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": {}}, "head_dim={}"),
        ({"head_dim": 15}, "turn 15 features of head_dim=15"),
        ({"head_dim": None, "hidden_size": 30}, "hidden_size=30 is not a multiple of num_attention_heads=4"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no'"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
        ({"rope_theta": float("inf")}, "rope_theta=inf"),
        ({"rope_parameters": [1]}, "rope_parameters=.*object"),
        ({"rope_parameters": ROPE | {"factor": "8"}}, "rope_parameters.factor='8'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor=None"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_parameters.rope_theta=None"),
        ({"rope_parameters": ROPE | {"low_freq_factor": 4.0}}, "low_freq_factor=4.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": ROPE | {"original_max_position_embeddings": 4.5}}, "position_embeddings=4.5 must be an"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope type 'ntk' is not supported; supported: .*longrope"),
        ({"rope_scaling": {"type": ["yarn"]}}, r"rope_scaling.type=\['yarn'\] must be a string"),
        ({"rope_scaling": {"type": "yarn", "factor": "2"}}, "rope_scaling.factor='2'"),
        ({"rope_scaling": {"type": "yarn", "truncate": 1}}, "rope_scaling.truncate=1 must be true or false"),
        ({"rope_scaling": {"type": "yarn", "mscale": [1]}}, r"rope_scaling.mscale=\[1\]"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.factor=None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "'dynamic' needs more than 2"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e9}}, "makes a context of 128000000000 tokens"),
        ({"rope_scaling": {"type": "longrope"}}, "lacks the key 'short_factor'"),
        ({"rope_scaling": LONGROPE | {"short_factor": 1.0}}, "rope_scaling.short_factor=1.0 must be a list"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0, None]}}, "rope_scaling.long_factor.1=None"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0] * 7}}, "long_factor has 7 numbers, but 8 pairs"),
        ({"rope_scaling": LONGROPE, "original_max_position_embeddings": 1}, "position_embeddings=1 must be at least"),
        ({"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu' is not supported; supported: .*'silu'"),
        ({"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] is not supported"),
        ({"layer_types": "full_attention"}, "layer_types='full_attention' must be a list"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "reads images beside text; .*such as google/gemma-3-1b-it",
        ),
        ({"eos_token_id": 64}, r"eos_token_id holds 64.*\[0, 64\)"),
        ({"eos_token_id": [2, -1]}, "eos_token_id holds -1"),
    ],
)
def test_bad_values_are_refused_with_file_and_field(tmp_path, changes, message):
    with pytest.raises(ModelFormatError, match=message) as error:
        read_config(write(tmp_path, **changes), jnp.float32)
    assert str(tmp_path / "config.json") in str(error.value)


FAMILIES = {
    "Mistral": {"sliding_window": 16},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "Qwen3": {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 9},
    "Gemma2": {
        "sliding_window": 16,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 50,
        "final_logit_softcapping": None,
    },
    "Gemma3": {"sliding_window": 16, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "Phi3": {"sliding_window": None, "rope_scaling": LONGROPE, "original_max_position_embeddings": 32},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 16},
}


def family(name, **changes):
    return {"architectures": [f"{name}ForCausalLM"]} | FAMILIES.get(name, {}) | changes


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([*rope.KINDS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(ROPE_KEYS), inner, max_size=4),
    max_leaves=6,
)
KEYS = sorted(
    {
        *HF,
        *(key for keys in FAMILIES.values() for key in keys),
        "rope_parameters",
        "rope_theta",
        "hidden_act",
        "hidden_activation",
        "activation_function",
        "rope_local_base_freq",
        "partial_rotary_factor",
        "layer_types",
        "enable_bias",
        "do_layer_norm_before",
        "_remove_final_layer_norm",
        "layer_norm_elementwise_affine",
        "mlp_bias",
        "attention_bias",
        "use_bidirectional_attention",
        "rms_norm_eps",
    }
)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["Llama", *FAMILIES]), key=st.sampled_from(KEYS), value=JSON)
def test_any_value_is_refused_or_makes_a_usable_config(tmp_path, name, key, value):
    try:
        cfg = read_config(write(tmp_path, **family(name, **{key: value})), jnp.float32).cfg
    except ModelFormatError as error:
        assert "config.json" in str(error)
    else:
        for each in filter(None, (layer.rope for layer in cfg.layers)):
            assert np.isfinite(each.inv_freq(cfg.head_dim, cfg.max_len)).all() and np.isfinite(each.amplitude)


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("Mistral", {}, (16, 16)),
        ("Mistral", {"sliding_window": None}, (None, None)),
        ("Qwen2", {}, (None, 16)),
        ("Qwen2", {"max_window_layers": 0}, (16, 16)),
        ("Qwen2", {"max_window_layers": 9}, (None, None)),
        ("Qwen2", {"use_sliding_window": False}, (None, None)),
        ("Qwen2", {"layer_types": ["sliding_attention", "full_attention"]}, (16, None)),
        ("Qwen3", {}, (None, 9)),
        ("Qwen3", {"layer_types": None, "use_sliding_window": None}, (None, None)),
        ("Gemma2", {"num_hidden_layers": 3}, (16, None, 16)),
        ("Gemma2", {"layer_types": ["full_attention"] * 2}, (None, None)),
        ("Gemma3", {"num_hidden_layers": 5}, (16, None, 16, None, 16)),
        ("Gemma3", {"num_hidden_layers": 7, "sliding_window_pattern": None}, (16,) * 5 + (None, 16)),
        ("Phi3", {"sliding_window": 7}, (7, 7)),
        ("OPT", {}, (None, None)),
        ("Llama", {}, (None, None)),
    ],
)
def test_windows_of_the_layers(tmp_path, name, changes, windows):
    cfg = read_config(write(tmp_path, **family(name, **changes)), jnp.float32).cfg
    assert tuple(layer.window for layer in cfg.layers) == windows


def test_a_mistral_config_without_a_window_has_that_of_the_first_model(tmp_path):
    directory = write(tmp_path, drop=["sliding_window"], architectures=["MistralForCausalLM"])
    assert read_config(directory, jnp.float32).cfg.layers == (LayerSpec(window=4096, rope=rope.Rope(theta=1e4)),) * 2


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Mistral", {"attention_bias": True}, "attention_bias=True is not supported for this family"),
        ("Mistral", {"layer_types": ["full_attention"] * 2}, "layer_types=.* is not supported for this family"),
        ("Mistral", {"sliding_window": 0}, "sliding_window=0"),
        ("Qwen2", {"layer_types": ["full_attention"]}, "1 layer types or windows are given for 2 layers"),
        ("Qwen2", {"layer_types": ["chunked_attention"] * 2}, "layer_types has 'chunked_attention'"),
        ("Qwen2", {"max_window_layers": -1}, r"max_window_layers=-1 must be an integer in \[0"),
        ("Qwen2", {"max_window_layers": None}, "max_window_layers=None"),
        ("Qwen2", {"max_window_layers": 1.5}, "max_window_layers=1.5"),
        ("Qwen3", {"use_sliding_window": False}, "'sliding_attention', but sliding_window is not set or not used"),
        ("Gemma2", {"sliding_window": None}, "'sliding_attention', but sliding_window is not set"),
        ("Gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be a finite number"),
        ("Gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar=None must be a finite number"),
        ("Gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping=-1.0"),
        ("Gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported for this family"),
        ("Gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
        ("Gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, r"\['factor', 'rope_type'\], but this"),
        ("Gemma3", {"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention=3 must be an object"),
        ("Gemma3", {"rope_local_base_freq": 0.5}, r"rope_local_base_freq=0.5 must be a finite number in \[1, "),
        ("Phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not supported for this family"),
        ("Phi3", {"partial_rotary_factor": 0.2}, "turn 3 features of head_dim=16"),
        ("Phi3", {"partial_rotary_factor": 2.0}, "turn 32 features of head_dim=16"),
        ("OPT", {"ffn_dim": "48"}, "ffn_dim='48'"),
        ("OPT", {"activation_function": "tanh"}, "activation_function='tanh'"),
        ("OPT", {"enable_bias": 1}, "enable_bias=1 must be true or false"),
    ],
)
def test_what_a_family_does_not_have_is_refused(tmp_path, name, changes, message):
    with pytest.raises(ModelFormatError, match=message):
        read_config(write(tmp_path, **family(name, **changes)), jnp.float32)


@pytest.mark.parametrize(
    ("name", "key"), [("OPT", "ffn_dim"), ("Gemma2", "query_pre_attn_scalar"), ("Qwen2", "max_window_layers")]
)
def test_a_key_that_the_family_needs_is_named(tmp_path, name, key):
    directory = write(tmp_path, drop=[key], **family(name))
    with pytest.raises(ModelFormatError, match=f"lacks the key '{key}'"):
        read_config(directory, jnp.float32)


@pytest.mark.parametrize("key", ["architectures", "vocab_size", "max_position_embeddings"])
def test_missing_key_is_named(tmp_path, key):
    with pytest.raises(ModelFormatError, match=f"config.json lacks the key '{key}'"):
        read_config(write(tmp_path, drop=[key]), jnp.float32)


def test_bad_generation_config_is_named(tmp_path):
    with pytest.raises(ModelFormatError, match=r"generation_config.json: eos_token_id holds 4\.5"):
        read_config(write(tmp_path, {"eos_token_id": 4.5}), jnp.float32)


def test_missing_directory_and_missing_file(tmp_path):
    with pytest.raises(ModelFormatError, match="no-such/model is not a directory.*Hugging Face format"):
        read_config(tmp_path / "no-such/model", jnp.float32)
    with pytest.raises(ModelFormatError, match="config.json is missing"):
        read_config(tmp_path, jnp.float32)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff\xfe\x00", b"[1, 2]", b"3", b"[" * 100_000, b"9" * 10_000],
    ids=["empty", "cut", "bytes", "list", "number", "deep", "digits"],
)
def test_config_that_is_no_json_object(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelFormatError, match="config.json (is not valid JSON|holds an? .*, not a JSON object)"):
        read_config(tmp_path, jnp.float32)


def test_json_of_unbounded_size_is_refused(tmp_path):
    (tmp_path / "config.json").write_bytes(b" " * 10_000_001)
    with pytest.raises(ModelFormatError, match="config.json has more than 10000000 bytes"):
        read_config(tmp_path, jnp.float32)
    assert read_json(write(tmp_path) / "config.json") == HF


def test_code_in_the_directory_never_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    touched = tmp_path / "touched"
    (tmp_path / "modeling_x.py").write_text(f"open({str(touched)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "modeling_x.Config", "AutoModelForCausalLM": "modeling_x.Model"}
    assert read_config(write(tmp_path, auto_map=auto_map), jnp.float32).module is llama
    assert not touched.exists() and "modeling_x" not in sys.modules
