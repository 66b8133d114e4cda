"""Mixtures of experts from files: stacked or separate tensors, those that lack or are too many, and their plan."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import HuggingFaceDirectory
from jaxllm.checkpoint.loader import abstract_params, load_params
from jaxllm.checkpoint.tensors import StoredTensor
from jaxllm.errors import ModelFormatError
from jaxllm.models import registry
from jaxllm.sharding.mesh import make_mesh
from tests.checkpoints import load, rewrite
from tests.mixtures import (
    FAMILIES,
    config,
    form_table,
    loaded_values,
    random_values,
    tensors_of,
    write_config,
    write_mixture,
)

FORMS = [
    (family, form)
    for family in FAMILIES
    for form in range(len(registry.find(f"{family}ForCausalLM").EXPERTS))
    if (family, form) != ("GptOss", 1)  # MXFP4
]


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_every_form_of_files(tmp_path, family, form):
    want = write_mixture(tmp_path, family, form)
    got = loaded_values(load(tmp_path))
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("form", [0, 1])
def test_devices_hold_their_experts(tmp_path, form):
    want = write_mixture(tmp_path, "Qwen3Moe", form)
    got = loaded_values(load(tmp_path, mesh="expert=2"))
    shapes = {"layers.1.mlp.gate_up.weight": (2, 32, 2, 32), "layers.0.mlp.gate_up.weight": (32, 2, 16)}
    for name, shape in shapes.items():  # experts, and half of what is no expert's
        assert [shard.data.shape for shard in got[name].addressable_shards] == [shape] * 2
        np.testing.assert_array_equal(got[name], want[name])


EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"
UP = np.zeros((32, 32), np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({EXPERT.format(3): None}, r"missing model.layers.1.mlp.experts.3.up_proj.weight, unexpected none"),
        ({EXPERT.format(4): UP}, r"missing none, unexpected model.layers.1.mlp.experts.4.up_proj.weight"),
        ({"model.layers.0.mlp.experts.0.up_proj.weight": UP}, "unexpected model.layers.0.mlp.experts.0.up_proj"),
        ({"model.layers.1.mlp.up_proj.weight": UP}, "unexpected model.layers.1.mlp.up_proj.weight"),
        ({"model.layers.1.mlp.experts.gate_up_proj": np.zeros((4, 64, 32), np.float32)}, "unexpected .*gate_up_proj"),
        ({"model.layers.1.mlp.shared_expert.up_proj.weight": UP}, "unexpected .*shared_expert.up_proj"),
        ({EXPERT.format(1): UP[:16]}, r"experts.1.up_proj.weight has shape \[16, 32\], .* implies \[32, 32\]"),
    ],
)
def test_missing_and_surplus_tensors_are_named(tmp_path, changes, message):
    write_mixture(tmp_path, "Qwen3Moe")
    rewrite(tmp_path, changes)
    with pytest.raises(ModelFormatError, match=message):
        load(tmp_path)


def test_a_stacked_tensor_of_other_experts_is_named(tmp_path):
    write_mixture(tmp_path, "Qwen3Moe", form=1)
    rewrite(tmp_path, {"model.layers.1.mlp.experts.down_proj": np.zeros((5, 32, 32), np.float32)})
    with pytest.raises(ModelFormatError, match=r"down_proj has shape \[5, 32, 32\], .* implies \[4, 32, 32\]"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("Glm4Moe", "model.layers.2.mlp.experts.0.up_proj.weight"),
        ("Glm4Moe", "model.layers.2.eh_proj.weight"),
        ("Ernie4_5_Moe", "model.mtp_block.0.mlp.up_proj.weight"),
    ],
)
def test_layers_that_predict_further_are_passed_over(tmp_path, family, name):
    write_mixture(tmp_path, family)
    rewrite(tmp_path, {name: UP})
    load(tmp_path)
    rewrite(tmp_path, {name: None, "model.layers.3.eh_proj.weight": UP})  # not the first layer beyond
    with pytest.raises(ModelFormatError, match="unexpected model.layers.3.eh_proj.weight"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["Glm4Moe", "MiniMaxM2", "Ernie4_5_Moe"])
def test_what_stays_float32(tmp_path, family):
    """The correction of scores, and ERNIE's whole router."""
    want = write_mixture(tmp_path, family)
    for name, value in loaded_values(load(tmp_path, jnp.bfloat16)).items():
        stays = name.endswith(".correction") or family == "Ernie4_5_Moe" and ".router." in name
        assert value.dtype == (jnp.float32 if stays else jnp.bfloat16), name
        if stays:
            np.testing.assert_array_equal(value, want[name])


class Headers(HuggingFaceDirectory):
    """A checkpoint of headers alone."""

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, ...]]):
        super().__init__(folder)
        self._shapes = shapes

    def tensors(self):
        return {name: StoredTensor(self.path, name, "BF16", shape, 0) for name, shape in self._shapes.items()}


def count_calls(folder: Path, layers: int, experts: int) -> tuple[int, int]:
    """Tensors of a layout like DeepSeek-V3's, without one, and the calls of the loader's functions until that is
    named."""
    spec = write_config(folder, "Glm4Moe", num_hidden_layers=layers, n_routed_experts=experts, first_k_dense_replace=3)
    abstract = abstract_params(spec)
    shapes = {name: value.shape for name, value in tensors_of(random_values(spec), form_table(spec, 0)).items()}
    missing = f"model.layers.{layers - 1}.mlp.experts.{experts - 1}.up_proj.weight"
    del shapes[missing]
    checkpoint, mesh, calls = Headers(folder, shapes), make_mesh(None), 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call" and "/jaxllm/checkpoint/" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        with pytest.raises(ModelFormatError, match=missing):
            load_params(checkpoint, spec, abstract, mesh)
    finally:
        sys.setprofile(None)
    return len(shapes), calls


def test_the_plan_of_many_tensors_is_linear_work(tmp_path):
    """That of 46,848 tensors took 1.7 s of one core."""
    (few, some_calls), (many, more_calls) = count_calls(tmp_path, 6, 32), count_calls(tmp_path, 6, 256)
    assert many > 2300 and more_calls - some_calls < 12 * (many - few), (few, some_calls, many, more_calls)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Qwen3Moe", {"num_experts": 2**40}, "num_experts=1099511627776 must be"),
        ("Qwen3Moe", {"num_experts": "8"}, "num_experts='8' must be an int"),
        ("Qwen3Moe", {"num_experts": 0}, "2 experts a token can't be chosen of 0"),
        ("Qwen3Moe", {"num_experts_per_tok": 5}, "5 experts a token can't be chosen of 4"),
        ("Qwen3Moe", {"moe_intermediate_size": -1}, "moe_intermediate_size=-1 must be"),
        ("Qwen3Moe", {"moe_intermediate_size": None}, "lacks the key 'moe_intermediate_size'"),
        ("Qwen3Moe", {"num_experts": None}, "lacks the key 'num_experts'"),
        ("Ernie4_5_Moe", {"moe_layer_end_index": None, "moe_norm_min": None}, None),
        ("Llama4", {"moe_layers": None, "no_rope_layers": None, "attn_scale": None}, None),
        ("Qwen3Moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be"),
        ("Qwen3Moe", {"mlp_only_layers": "all"}, "mlp_only_layers='all' must be a list"),
        ("Qwen3Moe", {"mlp_only_layers": [None]}, "mlp_only_layers=None must be an int"),
        ("Qwen3Moe", {"norm_topk_prob": "yes"}, "norm_topk_prob='yes' must be true or false"),
        ("Mixtral", {"num_local_experts": 2**14, "num_hidden_layers": 9}, "in each of 9 layers are more than 131072"),
        ("Glm4Moe", {"n_group": 3}, "1 of 3 groups can't be taken of 4 experts"),
        ("Glm4Moe", {"routed_scaling_factor": float("nan")}, "routed_scaling_factor=nan must be"),
        ("Glm4Moe", {"first_k_dense_replace": 10**9}, "first_k_dense_replace=1000000000 must be"),
        ("Glm4Moe", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported for this family"),
        ("Glm4Moe", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported for this family, only 1"),
        ("MiniMaxM2", {"attn_type_list": [1, 0]}, "attn_type_list has 0"),
        ("Mixtral", {"capacity_factor": 1.25}, "capacity_factor=1.25 is not supported"),
        ("GptOss", {"swiglu_limit": []}, r"swiglu_limit=\[\] must be a finite number"),
        ("GptOss", {"layer_types": ["sliding_attention"]}, "1 layer types or windows are given for 2 layers"),
        ("Olmoe", {"clip_qkv": 0}, "clip_qkv=0 must be"),
        ("MiniMaxM2", {"rotary_dim": 16}, "rotary embeddings turn 16 features of head_dim=8"),
        ("Llama4", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 2 layers"),
        ("Llama4", {"attention_chunk_size": 0}, "attention_chunk_size=0 must be"),
        ("Ernie4_5_Moe", {"use_bias": True}, "use_bias=True is not supported for this family"),
        ("Ernie4_5_Moe", {"moe_num_experts": [64, 64]}, r"moe_num_experts=\[64, 64\] must be"),
        ("Mixtral", {"router_jitter_noise": 0.1}, None),  # of training
    ],
)
def test_configurations_that_can_not_be(tmp_path, family, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(config(family, **changes)))
    if message is None:
        read_config(tmp_path, jnp.float32)
        return
    with pytest.raises(ModelFormatError, match=message):
        read_config(tmp_path, jnp.float32)


def test_llama4_is_served_within_its_first_chunk(tmp_path):
    spec = write_config(tmp_path, "Llama4", attention_chunk_size=16)
    assert spec.cfg.max_len == 16
    everywhere = write_config(tmp_path, "Llama4", attention_chunk_size=16, layer_types=["full_attention"] * 2)
    assert everywhere.cfg.max_len == write_config(tmp_path, "Llama4", attention_chunk_size=None).cfg.max_len == 64
