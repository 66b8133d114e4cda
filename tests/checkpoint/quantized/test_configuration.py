"""Which format a checkpoint has, and modules that contradict its configuration."""

import json
import re

import numpy as np
import pytest

from jaxllm.checkpoint.quantized.options import Options, matches, matches_any, may_match_any
from jaxllm.checkpoint.quantized.scheme import spare_biases
from jaxllm.checkpoint.quantized.values import read_scale
from jaxllm.errors import ModelFormatError
from tests.checkpoint.quantized import make
from tests.checkpoint.quantized.make import NAME, compressed, find, method, open_made

DENSE = np.ones((16, 32), np.float16)
OTHER = "model.layers.0.mlp.down_proj"
FP8_LAYERS = {"quant_algo": "FP8"}


def rng():
    return np.random.default_rng(0)


def whole(made, name=NAME):
    return {f"{name}.{kind}": value for kind, value in made.tensors.items()}


# What is in the configuration -> the format.
DETECTED = {
    "awq": method("awq"),
    "gptq": method("gptq", bits=4),
    "fp8": method("fp8"),
    "modelopt": method("modelopt", quant_algo="NVFP4"),
    "bitsandbytes": {"quantization_config": {"load_in_4bit": True}},
    "MLX": {"quantization": {"bits": 4, "group_size": 64}},
    "compressed-tensors": compressed("int-quantized", num_bits=8),
}


@pytest.mark.parametrize("name", DETECTED)
def test_formats_by_configuration(name, tmp_path):
    scheme, _ = find(tmp_path, DETECTED[name], {"x": DENSE})
    assert scheme.name == name


def test_other_places_of_configurations(tmp_path):
    tensors = {"x": DENSE}
    assert find(tmp_path, {}, tensors)[0] is None
    older = compressed("int-quantized", num_bits=8)["quantization_config"]
    assert find(tmp_path, {"compression_config": older | {"quant_method": "sparseml"}}, tensors)[0].name == (
        "compressed-tensors"
    )
    both = {"bits": 4, "group_size": 64}
    assert find(tmp_path, {"quantization": both, "quantization_config": both}, tensors)[0].name == "MLX"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert find(tmp_path, {}, tensors)[0].name == "modelopt"
    assert find(tmp_path, method("modelopt"), tensors)[0].name == "modelopt"
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128}))
    assert find(tmp_path, {}, tensors)[0].name == "gptq"


def test_a_file_beside_the_configuration_is_read(tmp_path):
    made = make.gptq(rng(), zeros=8, order=True)
    (tmp_path / "quantize_config.json").write_text(
        json.dumps({"bits": 4, "group_size": 16, "sym": True, "desc_act": True})
    )
    opened = open_made(tmp_path, {}, made.tensors)
    np.testing.assert_array_equal(make.dense(opened.module.read()), made.weight)


REFUSED = {
    "unknown": (method("hqq"), "quantised by hqq, which is not supported; take them in one of awq, gptq"),
    "torchao": (method("torchao"), "torchao .*classes of torch"),
    "no name": ({"quantization_config": {}}, "no quant_method that is a name, but None"),
    "not a name": (method([1]), r"no quant_method that is a name, but \[1\]"),
    "not an object": ({"quantization_config": 3}, "quantization_config=3 must be an object"),
    "awq gemv": (method("awq", version="gemv"), "version='gemv' is not supported; supported: .'gemm'"),
    "awq, 8 bits": (method("awq", bits=8), "bits=8 must be between 4 and 4"),
    "gptq marlin": (method("gptq", bits=4, checkpoint_format="marlin"), "checkpoint_format='marlin' is not"),
    "gptq marlin, older": (method("gptq", bits=4, is_marlin_format=True), "is_marlin_format"),
    "gptq, 5 bits": (method("gptq", bits=5), "bits=5 is not supported"),
    "gptq, no bits": (method("gptq"), "bits=None is not supported"),
    "gptq, flag": (method("gptq", bits=4, sym="yes"), "sym='yes' must be true or false"),
    "huge groups": (method("awq", group_size=2**40), "group_size=1099511627776 must be between -1 and"),
    "groups, not a number": (method("awq", group_size=True), "group_size=True must be an integer"),
    "fp8 e5m2": (method("fp8", fmt="e5m2"), "fmt='e5m2' is not supported"),
    "fp8 blocks": (method("fp8", weight_block_size=[128, 0]), r"weight_block_size=\[128, 0\] must be two sizes"),
    "fp8 experts": (method("fp8", expert_dtype="fp4"), "expert_dtype='fp4' is not"),
    "modelopt awq": (method("modelopt", quant_algo="W4A16_AWQ"), "quant_algo='w4a16_awq' is not supported"),
    "marlin-24": (compressed("marlin-24", num_bits=4), "format='marlin-24' is not supported"),
    "no groups": (method("compressed-tensors", format="pack-quantized"), "config_groups must have 1 to 1000"),
    "group without a size": (compressed("pack-quantized", strategy="group"), "strategy=group lacks its size"),
    "transforms": (
        method("compressed-tensors", config_groups={"g": {}}, transform_config={"a": {}}),
        "transform_config is set",
    ),
    "mlx mode": ({"quantization": {"mode": "nvfp4"}}, "mode='nvfp4' is not supported"),
    "names": (method("awq", modules_to_not_convert=["a", 3]), r"must be a list of names"),
    "pattern": (compressed("pack-quantized", ignore=["re:("], num_bits=4), r"'\(' is no pattern"),
    "endless pattern": (compressed("int-quantized", ignore=["re:(a|aa)+$"]), "may take for ever"),
    "endless rule": (method("gptq", bits=4, dynamic={"-:(x+x+)+y": {}}), "may take for ever"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_that_are_refused(case, tmp_path):
    config, message = REFUSED[case]
    with pytest.raises(ModelFormatError, match=message) as error:
        find(tmp_path, config, {"x": DENSE})
    assert str(tmp_path / "config.json") in str(error.value)


def awq(**settings):
    return method("awq", group_size=8, **settings)


CONTRADICTIONS = {
    "dense, of a quantised model": (
        awq(),
        lambda: whole(make.awq(rng())) | {f"{OTHER}.weight": DENSE},
        f"{OTHER}.weight is F16, but quantised by .*quantization_config",
    ),
    "quantised, but excluded": (
        awq(modules_to_not_convert=["self_attn"]),
        lambda: whole(make.awq(rng())),
        f"{NAME}.qweight is of a quantised module, but .* excludes {NAME}",
    ),
    "nothing quantised": (awq(), lambda: {"lm_head.weight": DENSE}, "it says awq, but no weight is quantised"),
    "no scales": (
        awq(),
        lambda: {name: value for name, value in whole(make.awq(rng())).items() if "scales" not in name},
        f"{NAME} has qweight, qzeros, but no scales",
    ),
    "scales of a dense weight": (
        method("fp8"),
        lambda: {f"{NAME}.weight": DENSE, f"{NAME}.weight_scale_inv": np.ones((1, 1), np.float32)},
        f"{NAME}.weight has dtype F16; it must be F8_E4M3",
    ),
    "zero points of a symmetric format": (
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=16),
        lambda: whole(make.packed(rng(), symmetric=False)),
        f"{NAME}.weight_zero_point is not in this format",
    ),
    "static, without scales": (
        method("fp8", activation_scheme="static"),
        lambda: whole(make.fp8(rng())),
        f"{NAME} has weight, weight_scale, but no input_scale",
    ),
    "dynamic, with scales": (
        method("fp8", activation_scheme="dynamic"),
        lambda: whole(make.fp8(rng())) | {f"{NAME}.input_scale": np.ones((), np.float32)},
        f"{NAME}.input_scale is not in this format",
    ),
    "rotated": (
        method("modelopt", quant_algo="FP8"),
        lambda: whole(make.fp8(rng())) | {f"{NAME}.pre_quant_scale": np.ones(64, np.float32)},
        f"{NAME}.pre_quant_scale is not in this format",
    ),
    "another algorithm": (
        method("modelopt", quant_algo="FP8"),
        lambda: whole(make.nvfp4(rng(), divides=False)),
        f"{NAME} has the tensors of nvfp4, but quant_algo is fp8",
    ),
    "in no group": (
        compressed("float-quantized", type="float", targets=["re:.*mlp.*"], strategy="tensor"),
        lambda: whole(make.fp8(rng(), scales=(1,))),
        f"is of a quantised module, but .* excludes {NAME}",
    ),
    "act-order, but not said": (
        method("gptq", bits=4, group_size=16, sym=True),
        lambda: whole(make.gptq(rng(), zeros=8, order=True)),
        f"{NAME}.g_idx puts inputs into groups in another order than theirs",
    ),
    "not symmetric": (
        method("gptq", bits=4, group_size=16, sym=True),
        lambda: whole(make.gptq(rng())),
        f"{NAME}.qzeros holds zero points from 1 to 16, but .* sym=true, for which all are 8",
    ),
    "version 1, said to be 2": (
        method("gptq", bits=4, group_size=16, sym=True, checkpoint_format="gptq_v2"),
        lambda: whole(make.gptq(rng(), zeros=8)),
        f"{NAME}.qzeros holds zero points from 7 to 7",
    ),
    "awq, not symmetric": (
        awq(zero_point=False),
        lambda: whole(make.awq(rng())),
        f"{NAME}.qzeros holds zero points other than 8",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_modules_that_contradict_the_configuration(case, tmp_path):
    config, tensors, message = CONTRADICTIONS[case]
    scheme, stored = find(tmp_path, config, tensors())
    with pytest.raises(ModelFormatError, match=message) as error:
        scheme.modules(stored)[0][NAME].read()
    assert str(tmp_path) in str(error.value)


def test_lists_excuse_what_is_dense_in_any_dialect(tmp_path):
    """Also routers, whose "gate" must not be taken for "gate_proj", embeddings and heads."""
    made = make.awq(rng())
    others = {f"{name}.weight": DENSE for name in (OTHER, "model.layers.0.mlp.gate", "model.embed_tokens", "lm_head")}
    scheme, stored = find(
        tmp_path,
        awq(modules_to_not_convert=["gate", "0.mlp.down"]),
        whole(made, "model.layers.0.mlp.gate_proj") | others,
    )
    modules, left = scheme.modules(stored)
    assert list(modules) == ["model.layers.0.mlp.gate_proj"] and left.keys() == others.keys()


def test_biases_of_zeros_are_told(tmp_path):
    """Older files of GPTQ have them in all modules, whatever the model is."""
    biases = {NAME: np.zeros(32, np.float16), OTHER: np.array([0] * 31 + [1], np.float16)}
    tensors = {f"{name}.bias": bias for name, bias in biases.items()} | {"model.norm.bias": np.zeros(4, np.float16)}
    for name in biases:
        tensors |= whole(make.gptq(rng(), zeros=8), name)
    scheme, stored = find(tmp_path, method("gptq", bits=4, group_size=16, sym=True), tensors)
    assert spare_biases(*scheme.modules(stored)) == {f"{NAME}.bias"}


def test_rules_of_gptq_by_module(tmp_path):
    """The first rule that matches counts; what it does not say is as for all."""
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(3)]
    tensors = whole(make.gptq(rng(), 8, group=32, zeros=128), names[0]) | whole(make.gptq(rng(), zeros=8), names[1])
    rules = {r"-:.*\.2\..*": {}, r"+:.*\.0\..*": {"bits": 8, "group_size": 32}, r".*\.(0|1)\.": {"desc_act": False}}
    config = method("gptq", bits=4, group_size=16, sym=True, dynamic=rules)
    scheme, stored = find(tmp_path, config, tensors | {f"{names[2]}.weight": DENSE})
    modules, left = scheme.modules(stored)
    assert [modules[name].form.codes for name in names[:2]] == ["int8", "int4"]
    assert [modules[name].form.group for name in names[:2]] == [32, 16]
    assert list(left) == [f"{names[2]}.weight"]


def test_mixed_precision_by_group(tmp_path):
    """A name counts more than a pattern, and that more than all linear layers."""
    int4 = {"num_bits": 4, "strategy": "group", "group_size": 16}
    fp8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    groups = {
        "all": {"format": "pack-quantized", "targets": ["Linear"], "weights": int4},
        "some": {"format": "float-quantized", "targets": ["re:.*down_proj$"], "weights": fp8},
        "one": {"format": "pack-quantized", "targets": [OTHER.replace("0", "1")], "weights": int4 | {"group_size": 32}},
        "cache": {"targets": ["re:.*k_proj"], "weights": None, "output_activations": fp8},
    }
    tensors = (
        whole(make.packed(rng()))
        | whole(make.fp8(rng(), scales=(1,)), OTHER)
        | whole(make.packed(rng(), group=32), OTHER.replace("0", "1"))
    )
    config = method("compressed-tensors", format="mixed-precision", ignore=["lm_head"], config_groups=groups)
    modules = find(tmp_path, config, tensors)[0].modules(find(tmp_path, config, tensors)[1])[0]
    forms = {name: module.form for name, module in modules.items()}
    assert [form.codes for form in forms.values()] == ["int4", "float8_e4m3fn", "int4"]
    assert forms[NAME].group == 16 and forms[OTHER.replace("0", "1")].group == 32


def test_settings_of_mlx_by_module(tmp_path):
    """Embeddings are quantised too."""
    config = {"quantization": {"group_size": 32, "bits": 4, NAME: {"bits": 8, "group_size": 64}, OTHER: False}}
    embed = "model.embed_tokens"
    tensors = whole(make.mlx(rng(), 8, group=64)) | whole(make.mlx(rng()), embed) | {f"{OTHER}.weight": DENSE}
    scheme, stored = find(tmp_path, config, tensors)
    modules, left = scheme.modules(stored)
    assert (modules[NAME].form.codes, modules[NAME].form.group) == ("int8", 64)
    assert (modules[embed].form.codes, modules[embed].form.group) == ("uint4", 32)
    assert list(left) == [f"{OTHER}.weight"]
    scheme, stored = find(tmp_path, config, tensors | whole(make.mlx(rng()), OTHER))
    with pytest.raises(ModelFormatError, match=f"excludes {OTHER}"):
        scheme.modules(stored)


def test_both_kinds_of_modelopt_in_one_model(tmp_path):
    layers = {NAME: {"quant_algo": "FP8"}, OTHER: {"quant_algo": "NVFP4", "group_size": 16}}
    config = method("modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers)
    tensors = whole(make.fp8(rng())) | whole(make.nvfp4(rng(), divides=False), OTHER)
    scheme, stored = find(tmp_path, config, tensors | {"model.layers.1.mlp.down_proj.weight": DENSE})
    modules, _ = scheme.modules(stored)
    assert [modules[name].form.codes for name in (NAME, OTHER)] == ["float8_e4m3fn", "float4_e2m1fn"]


@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        ("self_attn.kv_scale",),
    ],
)
def test_scales_of_the_kv_cache(names, tmp_path):
    made = make.fp8(rng())
    scales = {f"model.layers.11.{name}": np.array([0.5 + i], np.float32) for i, name in enumerate(names)}
    opened = open_made(tmp_path, method("fp8"), made.tensors, **scales)
    assert not opened.left
    assert [read_scale(one) for one in opened.scheme.kv_scales(opened.stored)[11]] == [0.5, 0.5 + len(names) - 1]


def test_scales_of_the_kv_cache_that_are_refused(tmp_path):
    made, layer = make.fp8(rng()), "model.layers.0.self_attn"
    one = np.ones(1, np.float32)
    for scales, message in (
        ({"k_scale": one}, "k_scale is the scale of k alone; keys and values must both"),
        ({"k_scale": one, "v_scale": np.ones(4, np.float32)}, r"v_scale has dtype F32 and shape \[4\]"),
        ({"k_scale": one, "k_proj.k_scale": one}, "is the same scale as"),
    ):
        scheme, stored = find(
            tmp_path, method("fp8"), whole(made) | {f"{layer}.{name}": value for name, value in scales.items()}
        )
        with pytest.raises(ModelFormatError, match=message):
            scheme.kv_scales(stored)
    scales = {"k_scale": one * np.nan, "v_scale": -one}
    opened = open_made(tmp_path, method("fp8"), made.tensors, **{f"{layer}.{k}": v for k, v in scales.items()})
    for tensor in opened.scheme.kv_scales(opened.stored)[0]:
        with pytest.raises(ModelFormatError, match="a scale must be positive and finite"):
            read_scale(tensor)


def test_dialects_of_lists():
    name = "model.layers.1.mlp.gate_proj"
    for entry in (name, "mlp.gate_proj", "layers.1", "model", "re:.*gate", "*.gate_proj"):
        assert matches(entry, name) and matches_any((entry,), name) and may_match_any(("x", entry), name)
    for entry in ("gate", "layers.11", "re:gate", "gate*", "model.layers.1.mlp.gate", "1.m", ""):
        assert not matches(entry, name) and not matches_any((entry,), name)
    assert may_match_any(("gate",), name) and may_match_any(("1.m",), name)
    assert not may_match_any(("router",), name) and not may_match_any(("",), name)


@pytest.mark.parametrize(
    "pattern", [r".*\.layers\.\d+\.mlp\.(gate|up)_proj$", r"^(?!.*experts).*gate$", r"model\.[ab+*]+x", "a{2}b?"]
)
def test_patterns_that_are_taken(pattern):
    Options("config.json", {}).check_pattern("ignore", pattern)
    re.compile(pattern)


@pytest.mark.parametrize(
    "pattern", ["(a*)*b", "((a|b))+", "(?:a+)+", "(a?){9}", ".*a.*b.*c.*d.*e.*f", "x" * 2000, "a{99999999999999999999}"]
)
def test_patterns_that_may_take_for_ever(pattern):
    with pytest.raises(ModelFormatError, match="config.json: ignore: "):
        Options("config.json", {}).check_pattern("ignore", pattern)
