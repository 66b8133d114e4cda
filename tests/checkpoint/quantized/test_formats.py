"""Every format is read to the bit as it was made, in the form that its headers tell."""

from dataclasses import replace

import numpy as np
import pytest

from jaxllm.checkpoint.tensors import FLOATS
from jaxllm.models.quantized import WeightForm
from tests.checkpoint.quantized import make
from tests.checkpoint.quantized.make import compressed, method, open_made

INT4 = {"codes": "int4", "group": 8, "scales": "float16"}
FP8 = {"codes": "float8_e4m3fn", "group": None, "scales": "float32", "activations": "float8_e4m3fn"}
DYNAMIC_FP8 = {"type": "float", "num_bits": 8, "dynamic": True, "symmetric": True}


def gptq(made, form, **settings):
    return method("gptq", **settings), made, form


def fp8_by_channel(rng):
    made = make.fp8(rng, scales=(32,), dtype=make.BF16)
    made.tensors["weight_scale"] = made.tensors["weight_scale"][:, None]
    return made


def with_input_scale(made, kind="input_scale"):
    made.tensors[kind] = np.array([0.5], np.float32)
    return made


def int8(rng, groups=None, symmetric=True):
    made = make.packed(rng, 8, group=64 // (groups or 1), symmetric=symmetric)
    tensors = {"weight": made.tensors["weight_packed"].view(np.uint8) - np.uint8(128)}
    tensors = {"weight": tensors["weight"].view(np.int8), "weight_scale": made.tensors["weight_scale"]}
    if not symmetric:
        zeros = make.unwords(made.tensors["weight_zero_point"].T, 8, 16).T - 128
        tensors["weight_zero_point"] = np.ascontiguousarray(zeros).astype(np.int8)
    return make.Made(tensors, made.weight)


# Name -> what makes (configuration, module, what the form is).
CASES = {
    "awq": lambda rng: (method("awq", bits=4, group_size=8), make.awq(rng), INT4 | {"has_offsets": True}),
    "awq, whole inputs": lambda rng: (
        method("awq", group_size=-1, version="GEMM"),
        make.awq(rng, group=32),
        INT4 | {"group": 32, "has_offsets": True},
    ),
    "awq, symmetric": lambda rng: (method("awq", group_size=8, zero_point=False), make.awq(rng, zeros=8), INT4),
    "awq, symmetric, whole inputs, bf16": lambda rng: (
        method("awq", group_size=-1, zero_point=False),
        make.awq(rng, group=32, zeros=8, dtype=make.BF16),
        INT4 | {"group": None, "scales": "bfloat16"},
    ),
    **{
        f"gptq, {bits} bits": lambda rng, bits=bits: gptq(
            make.gptq(rng, bits),
            INT4 | {"codes": "int8" if bits == 8 else "int4", "group": 16, "has_offsets": True},
            bits=bits,
            group_size=16,
        )
        for bits in (2, 3, 4, 8)
    },
    "gptq, version 2": lambda rng: gptq(
        make.gptq(rng, version=2),
        INT4 | {"group": 16, "has_offsets": True},
        bits=4,
        group_size=16,
        sym=False,
        checkpoint_format="gptq_v2",
    ),
    "gptq, symmetric": lambda rng: gptq(
        make.gptq(rng, zeros=8), INT4 | {"group": 16}, bits=4, group_size=16, sym=True, format="gptq"
    ),
    "gptq, act-order": lambda rng: gptq(
        make.gptq(rng, zeros=8, order=True),
        INT4 | {"group": 16, "is_reordered": True},
        bits=4,
        group_size=16,
        sym=True,
        desc_act=True,
    ),
    "gptq, act-order, 3 bits, zero points": lambda rng: gptq(
        make.gptq(rng, 3, order=True),
        INT4 | {"group": 16, "is_reordered": True, "has_offsets": True},
        bits=3,
        group_size=16,
        desc_act=True,
    ),
    "gptq, static groups": lambda rng: gptq(
        make.gptq(rng, zeros=8),
        INT4 | {"group": 16},
        bits=4,
        group_size=16,
        sym=True,
        desc_act=True,
        static_groups=True,
    ),
    "gptq, act-order of one group": lambda rng: gptq(
        make.gptq(rng, zeros=8, group=64), INT4 | {"group": None}, bits=4, group_size=-1, sym=True, desc_act=True
    ),
    **{
        f"mlx, {bits} bits": lambda rng, bits=bits: (
            {"quantization": {"group_size": 32, "bits": bits}},
            make.mlx(rng, bits),
            INT4
            | {"codes": "uint4" if bits <= 4 else "int8", "group": 32}
            | {"has_offsets": True, "offsets_as_scales": bits < 8},
        )
        for bits in (2, 3, 4, 5, 6, 8)
    },
    **{
        f"W{bits}A16": lambda rng, bits=bits: (
            compressed("pack-quantized", num_bits=bits, strategy="group", group_size=16),
            make.packed(rng, bits),
            INT4 | {"codes": "int8" if bits > 4 else "int4", "group": 16, "scales": "bfloat16"},
        )
        for bits in (3, 4, 8)
    },
    "W4A16, asymmetric": lambda rng: (
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False),
        make.packed(rng, symmetric=False),
        INT4 | {"group": 16, "scales": "bfloat16", "has_offsets": True},
    ),
    "W4A16, act-order": lambda rng: (
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=16, actorder="group"),
        make.packed(rng, order=True),
        INT4 | {"group": 16, "scales": "bfloat16", "is_reordered": True},
    ),
    "W8A16, by channel": lambda rng: (
        compressed("pack-quantized", num_bits=8, strategy="channel"),
        make.packed(rng, 8, group=64, dtype=np.float16),
        INT4 | {"codes": "int8", "group": None},
    ),
    "W8A8": lambda rng: (
        compressed("int-quantized", num_bits=8, strategy="channel", activations={"num_bits": 8, "dynamic": True}),
        int8(rng),
        {"codes": "int8", "group": None, "scales": "bfloat16", "activations": "int8"},
    ),
    "W8A8, static": lambda rng: (
        compressed("int-quantized", num_bits=8, strategy="channel", activations={"num_bits": 8, "dynamic": False}),
        with_input_scale(int8(rng)),
        {"codes": "int8", "group": None, "scales": "bfloat16", "activations": "int8"},
    ),
    "W8A8, asymmetric activations": lambda rng: (
        compressed(
            "naive-quantized", num_bits=8, strategy="channel", activations={"dynamic": True, "symmetric": False}
        ),
        int8(rng),
        {"codes": "int8", "group": None, "scales": "bfloat16"},
    ),
    "W8A8, asymmetric groups": lambda rng: (
        compressed("int-quantized", num_bits=8, strategy="group", group_size=16, symmetric=False),
        int8(rng, 4, symmetric=False),
        {"codes": "int8", "group": 16, "scales": "bfloat16", "has_offsets": True},
    ),
    "FP8": lambda rng: (
        compressed(
            "float-quantized", type="float", num_bits=8, strategy="tensor", activations=DYNAMIC_FP8 | {"dynamic": False}
        ),
        with_input_scale(make.fp8(rng, scales=(1,))),
        FP8,
    ),
    "FP8_DYNAMIC": lambda rng: (
        compressed("float-quantized", type="float", num_bits=8, strategy="channel", activations=DYNAMIC_FP8),
        fp8_by_channel(rng),
        FP8 | {"scales": "bfloat16"},
    ),
    "FP8, weights only": lambda rng: (
        compressed("naive-quantized", type="float", num_bits=8, strategy="tensor"),
        make.fp8(rng, scales=(1,)),
        FP8 | {"activations": None},
    ),
    "FP8_BLOCK": lambda rng: (
        compressed(
            "float-quantized",
            type="float",
            num_bits=8,
            strategy="block",
            block_structure=[16, 32],
            activations=DYNAMIC_FP8,
        ),
        make.fp8(rng, block=(16, 32), dtype=make.BF16),
        FP8 | {"group": 32, "scales": "bfloat16"},
    ),
    "NVFP4": lambda rng: (
        compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16),
        make.nvfp4(rng),
        {"codes": "float4_e2m1fn", "group": 16, "scales": "float8_e4m3fn", "has_outer": True},
    ),
    "MXFP4": lambda rng: (
        compressed("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32),
        make.mxfp4(rng),
        {"codes": "float4_e2m1fn", "group": 32, "scales": "float8_e8m0fnu"},
    ),
    "fp8, blocks": lambda rng: (
        method("fp8", weight_block_size=[128, 128]),
        make.fp8(rng, 256, 256, block=(128, 128), kind="weight_scale_inv"),
        FP8 | {"group": 128},
    ),
    "fp8, 576 rows": lambda rng: (
        method("fp8", weight_block_size=[128, 128]),
        make.fp8(rng, 576, 256, block=(128, 128), dtype=make.BF16, kind="weight_scale_inv"),
        FP8 | {"group": 128, "scales": "bfloat16"},
    ),
    "fp8, 576 inputs": lambda rng: (
        method("fp8", weight_block_size=[128, 128]),
        make.fp8(rng, 130, 576, block=(128, 128), kind="weight_scale_inv"),
        FP8 | {"group": 64},
    ),
    "fp8, less than a block": lambda rng: (
        method("fp8", weight_block_size=[128, 128]),
        make.fp8(rng, 32, 48, block=(128, 128), kind="weight_scale_inv"),
        FP8,
    ),
    "fp8, powers of two": lambda rng: (
        method("fp8", weight_block_size=[32, 32], scale_fmt="ue8m0"),
        make.fp8(rng, 64, 64, block=(32, 32), dtype=make.E8M0, kind="weight_scale_inv"),
        FP8 | {"group": 32, "scales": "float8_e8m0fnu"},
    ),
    "fp8, tensor, static": lambda rng: (
        method("fp8", activation_scheme="static", weight_block_size=None),
        with_input_scale(make.fp8(rng, kind="weight_scale_inv"), "activation_scale"),
        FP8,
    ),
    "fp8, vLLM": lambda rng: (
        method("fp8", activation_scheme="static", ignored_layers=["lm_head"]),
        with_input_scale(make.fp8(rng)),
        FP8,
    ),
    "ModelOpt FP8": lambda rng: (
        method("modelopt", quant_algo="FP8", exclude_modules=["lm_head"]),
        with_input_scale(make.fp8(rng)),
        FP8,
    ),
    "ModelOpt NVFP4": lambda rng: (
        method("modelopt", quant_algo="NVFP4", group_size=16),
        make.nvfp4(rng, divides=False),
        {"codes": "float4_e2m1fn", "group": 16, "scales": "float8_e4m3fn", "has_outer": True},
    ),
    "bitsandbytes int8": lambda rng: (
        {"quantization_config": {"load_in_8bit": True}},
        make.bnb8(rng),
        {"codes": "int8", "group": None, "scales": "float32"},
    ),
    "bitsandbytes nf4": lambda rng: (method("bitsandbytes", load_in_4bit=True), make.bnb4(rng), None),
    "bitsandbytes nf4, nested": lambda rng: (method("bitsandbytes"), make.bnb4(rng, nested=True, block=32), None),
    "bitsandbytes nf4, part of a block": lambda rng: (method("bitsandbytes"), make.bnb4(rng, 5, 26), None),
    "bitsandbytes fp4, in bf16": lambda rng: (
        method("bitsandbytes"),
        make.bnb4(rng, kind="fp4", storage=make.BF16),
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_read_to_the_bit(case, tmp_path):
    rng = np.random.default_rng(list(case.encode()))
    config, made, form = CASES[case](rng)
    bias = {f"{make.NAME}.bias": np.ones(made.weight.shape[0], np.float16), "model.norm.weight": np.ones(4, "f4")}
    opened = open_made(tmp_path, config, made.tensors, **bias)
    assert opened.module.name == make.NAME and opened.module.shape == made.weight.shape
    assert opened.module.form == (None if form is None else WeightForm(**form))
    assert {tensor.name for tensor in opened.module.tensors} == {f"{make.NAME}.{kind}" for kind in made.tensors}
    assert opened.left.keys() == bias.keys()  # which are no part of it
    weight = opened.module.read()
    make.check_form(opened.module, weight)
    np.testing.assert_array_equal(make.dense(weight).view(np.uint32), made.weight.view(np.uint32))


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_implies_the_form_that_headers_tell(case, tmp_path):
    """But for the dtype of scales, where files of one format differ."""
    config, made, _ = CASES[case](np.random.default_rng(0))
    opened = open_made(tmp_path, config, made.tensors)
    floats = [opened.stored[f"{make.NAME}.{kind}"] for kind in ("weight_scale", "scales") if kind in made.tensors]
    dtype = next((tensor.dtype for tensor in floats if tensor.dtype in FLOATS), "BF16")
    assert opened.scheme.expects(make.NAME, "layer")
    implied, form = opened.scheme.expected(make.NAME, opened.module.shape, dtype), opened.module.form
    assert (implied is None) == (form is None)
    if implied is not None and form is not None:
        assert implied.shape == opened.module.shape
        assert replace(implied.form, scales="") == replace(form, scales="")
        assert implied.form.scales == form.scales or case in OTHER_SCALES


OTHER_SCALES = ("awq, symmetric, whole inputs, bf16", "fp8, 576 rows", "fp8, powers of two")
