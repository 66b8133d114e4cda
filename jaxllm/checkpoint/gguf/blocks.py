"""The block formats of GGUF tensors, and what their bytes stand for.

A row is cut into blocks of 32, 64 or 256 values. Each function here takes uint8 `[blocks, bytes]` and returns float32
`[blocks, values]`, in the order of operations of llama.cpp's reference, so that results are equal bit by bit.
"""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

_Bytes = np.ndarray  # uint8 [blocks, bytes]
_Values = np.ndarray  # float32 [blocks, values]

_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # e2m1, doubled
_UE4M3 = (np.arange(256, dtype=np.uint8) & 127).view(ml_dtypes.float8_e4m3fn).astype(np.float32) / 2  # for that
_UE4M3[[127, 255]] = 0, 240  # NaN counts as zero; with the sign that no scale has, as a number
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


class BlockType(NamedTuple):
    """A way to store `num_values` neighbours of a row in `num_bytes`."""

    num_values: int
    num_bytes: int
    values: Callable[[_Bytes], _Values]


def dequantize(dtype: str, data: np.ndarray) -> np.ndarray:
    """The values, float32 `[n]`, that the bytes `data`, uint8, stand for in the format `dtype`, a key of `BLOCKS`."""
    block = BLOCKS[dtype]
    with np.errstate(over="ignore", invalid="ignore"):  # damaged scales; whoever asked checks that all is finite
        return block.values(data.reshape(-1, block.num_bytes)).reshape(-1)


def half(blocks: _Bytes, start: int) -> np.ndarray:
    """The float16 at byte `start` of each block, as float32 `[blocks, 1]`."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def fields(data: np.ndarray, width: int, run: int) -> np.ndarray:
    """Fields of `width` bits, uint8 `[blocks, fields]`: of each `run` bytes the lowest field of all comes first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    fields = data.reshape(len(data), -1, 1, run) >> shifts & np.uint8(2**width - 1)
    return fields.reshape(len(data), -1)


def _scaled(scales: np.ndarray, quants: np.ndarray) -> _Values:
    """Each run of values times its scale; `scales` is float32 `[blocks, runs]`."""
    runs = quants.astype(np.float32).reshape(*scales.shape, -1)
    return (scales[..., None] * runs).reshape(len(scales), -1)


def _affine(scales: np.ndarray, quants: np.ndarray, minima: np.ndarray) -> _Values:
    values = _scaled(scales, quants).reshape(*scales.shape, -1)
    return (values - minima[..., None]).reshape(len(scales), -1)


def fifth_bits(data: np.ndarray) -> np.ndarray:
    """Bit i of each block's four bytes, in the place of bit 4: uint8 `[blocks, 32]`."""
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: _Bytes) -> _Values:
    return half(blocks, 0) * (fields(blocks[:, 2:], 4, 16).astype(np.float32) - np.float32(8))


def _q4_1(blocks: _Bytes) -> _Values:
    return half(blocks, 0) * fields(blocks[:, 4:], 4, 16).astype(np.float32) + half(blocks, 2)


def _q5_0(blocks: _Bytes) -> _Values:
    quants = fields(blocks[:, 6:], 4, 16) | fifth_bits(blocks[:, 2:6])
    return half(blocks, 0) * (quants.astype(np.float32) - np.float32(16))


def _q5_1(blocks: _Bytes) -> _Values:
    quants = fields(blocks[:, 8:], 4, 16) | fifth_bits(blocks[:, 4:8])
    return half(blocks, 0) * quants.astype(np.float32) + half(blocks, 2)


def _q8_0(blocks: _Bytes) -> _Values:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * half(blocks, 0)


def _q2_k(blocks: _Bytes) -> _Values:
    packed = blocks[:, :16]
    scales = half(blocks, 80) * (packed & np.uint8(15)).astype(np.float32)
    minima = half(blocks, 82) * (packed >> np.uint8(4)).astype(np.float32)
    return _affine(scales, fields(blocks[:, 16:80], 2, 32), minima)


def _q3_k(blocks: _Bytes) -> _Values:
    scales = fields(blocks[:, 96:104], 4, 8) | fields(blocks[:, 104:108], 2, 4) << np.uint8(4)
    scales = half(blocks, 108) * (scales.astype(np.float32) - np.float32(32))
    is_small = fields(blocks[:, :32], 1, 32) ^ np.uint8(1)  # a clear bit takes 4 off
    quants = fields(blocks[:, 32:96], 2, 32).astype(np.float32) - (is_small << np.uint8(2)).astype(np.float32)
    return _scaled(scales, quants)


def scales_and_minima(blocks: _Bytes) -> tuple[np.ndarray, np.ndarray]:
    """Of Q4_K and Q5_K, float32 `[blocks, 8]` each: six bits of either, in twelve bytes after two float16."""
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    top_bits = np.uint8(48)  # bits 6 and 7, in the places of 4 and 5
    scales = [low & np.uint8(63), high & np.uint8(15) | low >> np.uint8(2) & top_bits]
    minima = [mid & np.uint8(63), high >> np.uint8(4) | mid >> np.uint8(2) & top_bits]
    return (
        half(blocks, 0) * np.concatenate(scales, axis=1).astype(np.float32),
        half(blocks, 2) * np.concatenate(minima, axis=1).astype(np.float32),
    )


def _q4_k(blocks: _Bytes) -> _Values:
    scales, minima = scales_and_minima(blocks)
    return _affine(scales, fields(blocks[:, 16:], 4, 32), minima)


def _q5_k(blocks: _Bytes) -> _Values:
    scales, minima = scales_and_minima(blocks)
    quants = fields(blocks[:, 48:], 4, 32) | fields(blocks[:, 16:48], 1, 32) << np.uint8(4)
    return _affine(scales, quants, minima)


def _q6_k(blocks: _Bytes) -> _Values:
    scales = half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    quants = fields(blocks[:, :128], 4, 64) | fields(blocks[:, 128:192], 2, 32) << np.uint8(4)
    return _scaled(scales, quants.astype(np.float32) - np.float32(32))


def _iq4_nl(blocks: _Bytes) -> _Values:
    return half(blocks, 0) * _IQ4[fields(blocks[:, 2:], 4, 16)]


def _iq4_xs(blocks: _Bytes) -> _Values:
    high = fields(blocks[:, 2:4], 2, 1)
    scales = fields(blocks[:, 4:8], 4, 1) | high << np.uint8(4)
    scales = half(blocks, 0) * (scales.astype(np.float32) - np.float32(32))
    return _scaled(scales, _IQ4[fields(blocks[:, 8:], 4, 16)])


def _mxfp4(blocks: _Bytes) -> _Values:
    exponents = blocks[:, :1].astype(np.int32) - 128  # one less, as the code book is doubled
    return np.ldexp(np.float32(1), exponents) * _FP4[fields(blocks[:, 1:], 4, 16)]


def _nvfp4(blocks: _Bytes) -> _Values:
    return _scaled(_UE4M3[blocks[:, :4]], _FP4[fields(blocks[:, 4:], 4, 8)])


BLOCKS = {
    "F32": BlockType(1, 4, lambda data: data.view("<f4")),
    "F16": BlockType(1, 2, lambda data: data.view("<f2").astype(np.float32)),
    "BF16": BlockType(1, 2, lambda data: data.view(ml_dtypes.bfloat16).astype(np.float32)),
    "Q4_0": BlockType(32, 18, _q4_0),
    "Q4_1": BlockType(32, 20, _q4_1),
    "Q5_0": BlockType(32, 22, _q5_0),
    "Q5_1": BlockType(32, 24, _q5_1),
    "Q8_0": BlockType(32, 34, _q8_0),
    "Q2_K": BlockType(256, 84, _q2_k),
    "Q3_K": BlockType(256, 110, _q3_k),
    "Q4_K": BlockType(256, 144, _q4_k),
    "Q5_K": BlockType(256, 176, _q5_k),
    "Q6_K": BlockType(256, 210, _q6_k),
    "IQ4_NL": BlockType(32, 18, _iq4_nl),
    "IQ4_XS": BlockType(256, 136, _iq4_xs),
    "MXFP4": BlockType(32, 17, _mxfp4),
    "NVFP4": BlockType(64, 36, _nvfp4),
}
# By the number that a file has for a type. Those that `BLOCKS` lacks are known by name only.
TYPE_NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
