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
from jaxllm.models import llama, qwen3

HF = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip


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
    assert spec.eos_token_ids == (2,) and spec.bos_token_id == 1


def test_architecture_picks_the_module(tmp_path):
    spec = read_config(write(tmp_path, architectures=["Qwen3ForCausalLM"]), jnp.float32)
    assert spec.module is qwen3 and spec.cfg.qk_norm


def test_whole_numbers_may_stand_for_floats(tmp_path):
    cfg = read_config(write(tmp_path, rope_theta=1000000, rope_parameters=ROPE | {"factor": 8}), jnp.float32).cfg
    assert (cfg.rope.theta, cfg.rope.factor) == (1e6, 8.0) and isinstance(cfg.rope.theta, float)


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
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MysteryForCausalLM"]}, "'Mystery.*LlamaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "architectures=.*list of names"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures=.*list of names"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
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
        ({"head_dim": 15}, "head_dim=15 is odd"),
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
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"eos_token_id": 64}, r"eos_token_id holds 64.*\[0, 64\)"),
        ({"eos_token_id": [2, -1]}, "eos_token_id holds -1"),
        ({"bos_token_id": "1"}, "bos_token_id holds '1'"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_with_file_and_field(tmp_path, changes, message):
    with pytest.raises(ModelFormatError, match=message) as error:
        read_config(write(tmp_path, **changes), jnp.float32)
    assert str(tmp_path / "config.json") in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(ROPE)), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from([*HF, "rope_parameters", "rope_scaling", "rope_theta", "hidden_act"]), value=JSON)
def test_any_value_is_refused_or_makes_a_usable_config(tmp_path, key, value):
    try:
        cfg = read_config(write(tmp_path, **{key: value}), jnp.float32).cfg
    except ModelFormatError as error:
        assert "config.json" in str(error)
    else:
        assert np.isfinite(cfg.rope.inv_freq(cfg.head_dim)).all()


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
    with pytest.raises(ModelFormatError, match="config.json (is not valid JSON|holds a .*, not a JSON object)"):
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
