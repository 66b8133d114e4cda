"""Unpacks integers of a few bits, and centres them."""

import ml_dtypes
import numpy as np


def unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """uint8 `[rows, count]`: each row of `words`, integers of any size, is a stream of bits with the lowest first, and
    value i is its bits from `i * bits` on. Values that are packed down a column: give the transpose."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets[:, :count]
    if 8 % bits == 0:
        each = np.arange(0, 8, bits, dtype=np.uint8)
        values = np.empty((*octets.shape, len(each)), np.uint8)
        for i, shift in enumerate(each):
            np.bitwise_and(octets >> shift, np.uint8(2**bits - 1), out=values[:, :, i])
        return values.reshape(len(octets), -1)[:, :count]
    return _unpack_odd(octets, bits, count)


def _unpack_odd(octets: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Of widths that do not divide 8: each `bits` bytes hold eight values."""
    runs = -(-count // 8)
    padded = np.zeros((len(octets), runs * bits + 1), np.uint8)
    used = min(octets.shape[1], runs * bits)
    padded[:, :used] = octets[:, :used]
    values = np.empty((len(octets), runs, 8), np.uint8)
    for i in range(8):
        first, shift = divmod(i * bits, 8)
        low = padded[:, first:-1:bits].astype(np.uint16)
        pair = low | padded[:, first + 1 :: bits][:, :runs].astype(np.uint16) << np.uint16(8)
        values[:, :, i] = pair >> np.uint16(shift) & np.uint16(2**bits - 1)
    return values.reshape(len(octets), -1)[:, :count]


def packed_size(bits: int, count: int) -> int:
    """How many words of 32 bits hold so many values."""
    return -(-count * bits // 32)


def centered(unsigned: np.ndarray, bits: int) -> np.ndarray:
    """Values of `bits` bits, uint8, less half their range: int4, or int8 for those of more than 4 bits."""
    values = unsigned - np.uint8(2 ** (bits - 1))
    if bits > 4:
        return values.view(np.int8)
    values &= np.uint8(15)  # as an int4 is held in a byte
    return values.view(ml_dtypes.int4)


def centered_dtype(bits: int) -> str:
    return "int4" if bits <= 4 else "int8"


def centered_offsets(zeros: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """float32: what centred values lack after scaling, where the zero points are `zeros` of the uncentred ones. Exact
    for scales of 16 bits, as is the sum."""
    return (2 ** (bits - 1) - zeros.astype(np.int32)).astype(np.float32) * scales.astype(np.float32)
