"""Every block format, against llama.cpp's package, bit by bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.checkpoint.gguf.blocks import BLOCKS, TYPE_NAMES, dequantize
from tests.gguf_files import gguf, kind


def test_names_and_sizes_are_the_packages():
    assert {value: name for value, name in TYPE_NAMES.items()} == {t.value: t.name for t in gguf.GGMLQuantizationType}
    for name, block in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[kind(name)] == (block.num_values, block.num_bytes)


@pytest.mark.parametrize("name", BLOCKS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_blocks=st.integers(1, 60))
def test_any_bytes_become_the_same_numbers(name, seed, num_blocks):
    data = np.random.default_rng(seed).integers(0, 256, num_blocks * BLOCKS[name].num_bytes, np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(data.reshape(1, -1), kind(name)).reshape(-1).astype(np.float32)
    got = dequantize(name, data)
    assert got.dtype == np.float32 and got.shape == want.shape
    both_nan = np.isnan(got) & np.isnan(want)
    assert (both_nan | (got.view(np.uint32) == want.view(np.uint32))).all()


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4", "IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K", "Q6_K"])
def test_every_byte_value_is_seen(name):
    """One byte after the other takes all its values, the others being 1."""
    size = BLOCKS[name].num_bytes
    data = np.ones((size, 256, size), np.uint8)
    data[np.arange(size)[:, None], np.arange(256), np.arange(size)[:, None]] = np.arange(256)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(data.reshape(1, -1), kind(name)).reshape(-1).astype(np.float32)
    got = dequantize(name, data.reshape(-1))
    both_nan = np.isnan(got) & np.isnan(want)
    assert (both_nan | (got.view(np.uint32) == want.view(np.uint32))).all()
