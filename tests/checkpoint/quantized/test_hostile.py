"""Tensors with values, shapes and dtypes that no weight has are refused, with the tensor and the file."""

import json

import numpy as np
import pytest

from jaxllm.errors import ModelFormatError
from tests.checkpoint.quantized import make
from tests.checkpoint.quantized.make import NAME, compressed, method, open_made

NAN, INF = np.float32(np.nan), np.float32(np.inf)


def rng():
    return np.random.default_rng(0)


def with_first(array, value):
    array = array.copy()
    array.reshape(-1)[0] = value
    return array


GPTQ = method("gptq", bits=4, group_size=16, sym=True, desc_act=True)
BLOCK = method("fp8", weight_block_size=[32, 32])
PACKED = compressed("pack-quantized", num_bits=4, strategy="group", group_size=16)
NVFP4 = compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16)
MXFP4 = compressed("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32)
INT8 = compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False)
MLX = {"quantization": {"group_size": 32, "bits": 4}}

# What makes it -> the tensor, what it becomes of the old one (None: nothing), the message.
HEADERS = {
    "awq": (
        method("awq", group_size=8),
        make.awq,
        [
            ("qweight", lambda old: old.view(np.uint32), "qweight has dtype U32; it must be I32"),
            ("qweight", lambda old: old[None], r"qweight has shape \[1, 32, 2\]; it must be \['any', 'any'\]"),
            ("qweight", lambda old: old[:0], r"qweight has shape \[0, 2\]"),
            ("qweight", lambda old: old[:30], f"{NAME} has 30 inputs, which groups of 8 do not divide"),
            ("scales", lambda old: old[:3], r"scales has shape \[3, 16\]; it must be \[4, 16\]"),
            ("scales", lambda old: old.view(np.int8), "scales has dtype I8"),
            ("qzeros", lambda old: old.T, r"qzeros has shape \[2, 4\]; it must be \[4, 2\]"),
        ],
    ),
    "awq, huge groups": (
        method("awq", group_size=2**20),
        make.awq,
        [("scales", lambda old: old, "has 32 inputs, which groups of 1048576 do not divide")],
    ),
    "gptq": (
        GPTQ,
        lambda rng: make.gptq(rng, zeros=8, order=True),
        [
            ("g_idx", lambda old: old[:-1], r"g_idx has shape \[63\]; it must be \[64\]"),
            ("g_idx", lambda old: None, "but no g_idx"),
            ("qzeros", lambda old: old[:, :3], r"qzeros has shape \[4, 3\]"),
        ],
    ),
    "gptq, 3 bits": (
        method("gptq", bits=3, group_size=16),
        lambda rng: make.gptq(rng, 3),
        [("qweight", lambda old: old[:5], "qweight has 5 rows of 32 bits, no whole number of values of 3")],
    ),
    "mlx": (
        MLX,
        make.mlx,
        [
            ("biases", lambda old: old.astype(np.float32), "biases has dtype F32; it must be F16"),
            ("biases", lambda old: None, "has scales, weight, but no biases"),
            ("weight", lambda old: old[:, :5], "has 40 inputs, which groups of 32 do not divide"),
        ],
    ),
    "compressed-tensors": (
        PACKED,
        make.packed,
        [
            ("weight_shape", lambda old: old[:1], r"weight_shape has shape \[1\]"),
            ("weight_shape", lambda old: None, "but no weight_shape"),
            ("weight_packed", lambda old: old[:, :1], "rows of 1 words, which no inputs in groups of 16 fill"),
            ("weight_scale", lambda old: old[:, :2], r"weight_scale has shape \[16, 2\]; it must be \[16, 4\]"),
        ],
    ),
    "fp8 of blocks": (
        BLOCK,
        lambda rng: make.fp8(rng, 64, 64, block=(32, 32)),
        [
            ("weight", lambda old: old.view(np.int8), "weight has dtype I8; it must be F8_E4M3"),
            ("weight_scale", lambda old: old[:1], r"weight_scale has shape \[1, 2\]; it must be \[2, 2\]"),
            ("weight", lambda old: old[:, :36], f"{NAME} has 36 inputs, which blocks of 32 cut too finely"),
        ],
    ),
    "fp8": (
        method("fp8"),
        make.fp8,
        [("weight_scale", lambda old: np.ones((4, 8), np.float32), "it must be one scale, or 32, one of each output")],
    ),
    "nvfp4": (
        NVFP4,
        make.nvfp4,
        [
            ("weight_global_scale", lambda old: np.ones(8, np.float32), r"shape \[8\]; it must hold one value"),
            ("weight_scale", lambda old: old.view(np.uint8), "weight_scale has dtype U8; it must be F8_E4M3"),
            ("weight_packed", lambda old: old[:, :-1], "has 62 inputs, which groups of 16 do not divide"),
        ],
    ),
    "bitsandbytes": (
        method("bitsandbytes"),
        make.bnb4,
        [
            ("weight.absmax", lambda old: old[:-1], r"absmax has shape \[5\]; it must be \[6\]"),
            ("weight.quant_map", lambda old: old[:8], r"quant_map has shape \[8\]; it must be \[16\]"),
            ("weight", lambda old: old[:9], r"weight has 9 bytes, but .*nf4 has shape \[16, 24\]"),
        ],
    ),
}
VALUES = {
    "awq": (
        method("awq", group_size=8),
        make.awq,
        [
            ("scales", lambda old: with_first(old, NAN), "scales holds scales that are not finite"),
            ("scales", lambda old: with_first(old, INF), "scales holds scales that are not finite"),
            ("scales", lambda old: 0 * old, "scales holds scales that are all zero"),
            ("scales", lambda old: with_first(old.astype(np.float32), 1e38), r"scales up to 1e\+38; its weights would"),
        ],
    ),
    "gptq": (
        GPTQ,
        lambda rng: make.gptq(rng, zeros=8, order=True),
        [
            ("g_idx", lambda old: with_first(old, 4), "g_idx holds groups from 0 to 4; there are 4"),
            ("g_idx", lambda old: with_first(old, -1), "g_idx holds groups from -1 to 3; there are 4"),
            ("g_idx", lambda old: 0 * old, "g_idx puts 0 to 64 inputs into groups of 16"),
        ],
    ),
    "mlx": (MLX, make.mlx, [("biases", lambda old: with_first(old, NAN), "biases holds values that are not finite")]),
    "compressed-tensors": (
        PACKED,
        make.packed,
        [("weight_shape", lambda old: old - 8, r"weight_shape is \[8, 56\], but .*weight_packed holds \[16, 64\]")],
    ),
    "int8": (
        INT8,
        lambda rng: make.Made(
            {
                "weight": rng.integers(-128, 128, (8, 16)).astype(np.int8),
                "weight_scale": np.ones((8, 1), np.float32),
                "weight_zero_point": np.ones((8, 1), np.int32),
            },
            None,
        ),
        [("weight_zero_point", lambda old: old * 1000, "holds zero points up to 1000, which no int8 is")],
    ),
    "fp8": (
        BLOCK,
        lambda rng: make.fp8(rng, 64, 64, block=(32, 32)),
        [
            ("weight", lambda old: with_first(old, make.E4M3(NAN)), "weight holds NaN"),
            ("weight", lambda old: with_first(old.view(np.uint8), 255).view(make.E4M3), "weight holds NaN"),
            ("weight_scale", lambda old: -old, "weight_scale holds negative scales"),
            ("weight_scale", lambda old: with_first(old, 1e38), "its weights would not be finite"),
        ],
    ),
    "nvfp4": (
        NVFP4,
        make.nvfp4,
        [
            ("weight_scale", lambda old: with_first(old, make.E4M3(NAN)), "weight_scale holds scales that are not"),
            ("weight_scale", lambda old: with_first(old, make.E4M3(-1)), "weight_scale holds negative scales"),
            ("weight_global_scale", lambda old: old * 0, "weight_global_scale is 0; a scale must be positive"),
            ("weight_global_scale", lambda old: old * NAN, "weight_global_scale is nan; a scale must be"),
            ("weight_global_scale", lambda old: old * 0 + np.float32(1e-42), "weight_global_scale is out of range"),
            ("weight_global_scale", lambda old: old * 0 + np.float32(1e-36), "weight_global_scale is out of range"),
        ],
    ),
    "mxfp4": (
        MXFP4,
        make.mxfp4,
        [
            ("weight_scale", lambda old: with_first(old, 255), "weight_scale holds scales that are not finite"),
            ("weight_scale", lambda old: with_first(old, 254), "its weights would not be finite"),
        ],
    ),
    "bitsandbytes int8": (
        method("bitsandbytes"),
        make.bnb8,
        [
            ("weight_format", lambda old: old + 1, "weight_format is not 0: the weight is not in rows"),
            ("SCB", lambda old: with_first(old, NAN), "SCB holds scales that are not finite"),
        ],
    ),
    "bitsandbytes nf4": (
        method("bitsandbytes"),
        lambda rng: make.bnb4(rng, nested=True),
        [
            ("weight.quant_map", lambda old: with_first(old, INF), "quant_map holds values that are not finite"),
            ("weight.nested_absmax", lambda old: with_first(old, NAN), "nested_absmax holds values that are not"),
        ],
    ),
}


def spread(table):
    return [(case, i) for case, (_, _, changes) in table.items() for i in range(len(changes))]


def changed(config, make_one, change, path):
    kind, become, message = change
    tensors = make_one(rng()).tensors
    new = become(tensors.pop(kind))
    if new is not None:
        tensors[kind] = new
    return lambda: open_made(path, config, tensors), message


@pytest.mark.parametrize("case,i", spread(HEADERS))
def test_headers(case, i, tmp_path):
    config, make_one, changes = HEADERS[case]
    opening, message = changed(config, make_one, changes[i], tmp_path)
    with pytest.raises(ModelFormatError, match=message) as error:
        opening()
    assert str(tmp_path / "model.safetensors") in str(error.value)


@pytest.mark.parametrize("case,i", spread(VALUES))
def test_values(case, i, tmp_path):
    config, make_one, changes = VALUES[case]
    opening, message = changed(config, make_one, changes[i], tmp_path)
    module = opening().module
    with pytest.raises(ModelFormatError, match=message) as error:
        module.read()
    assert str(tmp_path / "model.safetensors") in str(error.value)


STATES = {
    "not JSON": (b"{", "does not describe a weight"),
    "a list": (b"[]", "does not describe a weight"),
    "no shape": (b'{"blocksize": 64}', "does not describe a weight"),
    "three axes": (b'{"blocksize": 64, "shape": [1, 2, 3]}', r"shape \[1, 2, 3\]"),
    "huge": (b'{"blocksize": 64, "shape": [1, 1e300]}', "does not describe a weight"),
    "negative": (b'{"blocksize": 64, "shape": [-16, -24]}', "does not describe a weight"),
    "blocks of none": (b'{"blocksize": 0, "shape": [16, 24]}', "blocksize 0"),
    "deep": (b"[" * 8000, "does not describe a weight"),
    "long": (b" " * 20000, "a description has at most 16384"),
    "offset": (b'{"blocksize": 64, "shape": [16, 24], "nested_offset": NaN}', "nested_offset nan"),
}


@pytest.mark.parametrize("case", STATES)
def test_descriptions_of_bitsandbytes(case, tmp_path):
    text, message = STATES[case]
    tensors = make.bnb4(rng()).tensors
    tensors["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(text, np.uint8)
    with pytest.raises(ModelFormatError, match=f"bitsandbytes__nf4 .*{message}"):
        open_made(tmp_path, method("bitsandbytes"), tensors)


def test_files_whose_tensors_overlap_are_not_read(tmp_path):
    """What finds tensors refuses them: no byte is part of two."""
    text = {f"{NAME}.{kind}": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]} for kind in ("qweight", "scales")}
    header = json.dumps(text).encode()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelFormatError, match="not a sound safetensors file"):
        make.open_checkpoint(tmp_path).tensors()


def test_a_file_that_became_shorter(tmp_path):
    module = open_made(tmp_path, method("fp8"), make.fp8(rng()).tensors).module
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelFormatError, match="became shorter"):
        module.read()
