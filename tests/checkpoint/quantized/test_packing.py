"""Bit streams, against numbers of any length, and the offsets of centred codes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.checkpoint.quantized.packing import centered, centered_offsets, packed_size, unpack
from tests.checkpoint.quantized.make import words


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(1, 8), rows=st.integers(1, 4), count=st.integers(1, 150), seed=st.integers(0, 2**32 - 1))
def test_streams_of_any_width(bits, rows, count, seed):
    values = np.random.default_rng(seed).integers(0, 2**bits, (rows, count))
    packed = words(values, bits)
    assert packed.shape == (rows, packed_size(bits, count))
    unpacked = unpack(packed, bits, count)
    assert unpacked.dtype == np.uint8
    np.testing.assert_array_equal(unpacked, values)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_centred_codes_have_bytes_as_their_dtype_has(bits):
    codes = centered(np.arange(2**bits, dtype=np.uint8), bits)
    half = 2 ** (bits - 1)
    np.testing.assert_array_equal(codes.astype(np.float32), np.arange(-half, half))
    np.testing.assert_array_equal(codes.view(np.uint8), np.arange(-half, half).astype(codes.dtype).view(np.uint8))


@settings(max_examples=60, deadline=None)
@given(bits=st.sampled_from([2, 3, 4, 8]), seed=st.integers(0, 2**32 - 1))
def test_offsets_of_16_bit_scales_are_exact(bits, seed):
    """Up to the zero points of one more bit that GPTQ's first version has."""
    rng = np.random.default_rng(seed)
    scales = rng.integers(0, 0x7C00, 50).astype(np.uint16).view(np.float16)
    zeros, unsigned = rng.integers(0, 2**bits + 1, 50), rng.integers(0, 2**bits, 50).astype(np.uint8)
    offsets = centered_offsets(zeros, scales, bits)
    weight = centered(unsigned, bits).astype(np.float32) * scales.astype(np.float32) + offsets
    assert offsets.dtype == weight.dtype == np.float32
    np.testing.assert_array_equal(weight.astype(np.float64), (unsigned - zeros) * scales.astype(np.float64))
