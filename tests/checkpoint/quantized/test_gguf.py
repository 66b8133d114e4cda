"""Tensors of GGUF files that stay quantised, against llama.cpp's package, bit by bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.checkpoint.gguf.blocks import BLOCKS
from jaxllm.checkpoint.quantized import gguf as quantized_gguf
from jaxllm.checkpoint.tensors import StoredTensor
from jaxllm.errors import ModelFormatError
from jaxllm.models.quantized import WeightForm
from tests.checkpoint.quantized.make import check_form, dense
from tests.gguf_files import gguf, interleave, kind


def _form(**parts):
    return WeightForm(**parts, offsets_as_scales=parts.get("has_offsets", False), activations="int8_in_parts")


FORMS = {
    "Q4_0": _form(codes="int4", group=32, scales="float16"),
    "Q4_1": _form(codes="uint4", group=32, scales="float16", has_offsets=True),
    "Q5_0": _form(codes="int8", group=32, scales="float16"),
    "Q5_1": _form(codes="int8", group=32, scales="float16", has_offsets=True),
    "Q8_0": _form(codes="int8", group=32, scales="float16"),
    "Q4_K": _form(codes="uint4", group=32, scales="float32", has_offsets=True),
    "Q5_K": _form(codes="int8", group=32, scales="float32", has_offsets=True),
    "Q6_K": _form(codes="int8", group=16, scales="float32"),
}
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q6_K": (208,)}


def random_rows(name: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Any bytes, but for scales, which are small numbers."""
    rng, block = np.random.default_rng(seed), BLOCKS[name]
    data = rng.integers(0, 256, (rows, width // block.num_values, block.num_bytes)).astype(np.uint8)
    for start in HALVES.get(name, (0, 2)):
        scales = rng.uniform(-0.1, 0.1, data.shape[:2]).astype(np.float16)
        data[:, :, start : start + 2] = scales[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def store(path, name: str, data: np.ndarray, width: int, **changes) -> StoredTensor:
    (path / "tensor").write_bytes(b"xyz" + data.tobytes())
    return StoredTensor(path / "tensor", "blk.0.attn_q.weight", name, (len(data), width), 3, **changes)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(2, 3))
def test_the_weight_is_the_packages(name, tmp_path_factory, seed, blocks):
    width = blocks * BLOCKS[name].num_values
    data = random_rows(name, 6, width, seed)
    module = quantized_gguf.module("q", store(tmp_path_factory.mktemp("gguf"), name, data, width))
    assert module is not None and module.shape == (6, width) and module.form == FORMS[name]
    weight = module.read()
    check_form(module, weight)
    want = gguf.quants.dequantize(data, kind(name)).astype(np.float32)
    got = dense(weight)
    assert ((got.view(np.uint32) == want.view(np.uint32)) | (got == 0) & (want == 0)).all()


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_interleaved_rows_come_in_order(name, tmp_path):
    data, width = random_rows(name, 16, 256), 256
    plain = quantized_gguf.module("q", store(tmp_path, name, data, width)).read()
    stored = store(tmp_path, name, interleave(data, 2), width, is_interleaved=True)
    module = quantized_gguf.module("q", stored, head_dim=8)
    weight = module.read()
    check_form(module, weight)
    np.testing.assert_array_equal(dense(weight), dense(plain))
    for head_dim in (None, 3, 32):
        with pytest.raises(ModelFormatError, match=f"16 rows, but heads of {head_dim}"):
            quantized_gguf.module("q", stored, head_dim)


def test_one_block_a_row_has_one_scale_an_output(tmp_path):
    data = random_rows("Q8_0", 4, 32)
    module = quantized_gguf.module("q", store(tmp_path, "Q8_0", data, 32))
    assert module.form.group is None
    check_form(module, module.read())


def test_others_are_read_dense(tmp_path):
    data = random_rows("Q8_0", 4, 64)
    tensor = store(tmp_path, "Q8_0", data, 64)
    for other in ({"dtype": "Q2_K"}, {"dtype": "F16"}, {"dtype": "MXFP4"}, {"shape": (2, 2, 64)}, {"shift": -1.0}):
        assert quantized_gguf.module("q", tensor._replace(**other)) is None


@pytest.mark.parametrize("name", FORMS)
def test_scales_that_are_not_finite(name, tmp_path):
    data = random_rows(name, 2, 256)
    start = HALVES.get(name, (0, 2))[-1]
    data[1, start : start + 2] = np.float16(np.inf).view(np.uint16).reshape(1).view(np.uint8)
    with pytest.raises(ModelFormatError, match="tensor: blk.0.attn_q.weight holds scales that are not finite"):
        quantized_gguf.module("q", store(tmp_path, name, data, 256)).read()


def test_a_file_that_became_shorter(tmp_path):
    tensor = store(tmp_path, "Q8_0", random_rows("Q8_0", 4, 64), 64)
    tensor.file.write_bytes(b"x")
    with pytest.raises(ModelFormatError, match="became shorter"):
        quantized_gguf.module("q", tensor).read()
