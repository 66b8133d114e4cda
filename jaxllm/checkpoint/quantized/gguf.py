"""Quantised tensors of GGUF files, kept as they are where a block is integers of up to 8 bits and a scale or two."""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxllm.checkpoint.gguf.blocks import BLOCKS, fields, fifth_bits, half, scales_and_minima
from jaxllm.checkpoint.quantized.module import QuantizedModule, Region, StoredWeight
from jaxllm.checkpoint.quantized.packing import centered
from jaxllm.checkpoint.quantized.scheme import group_of_form
from jaxllm.checkpoint.quantized.values import check_scales, wrong
from jaxllm.checkpoint.tensors import StoredTensor, read_bytes
from jaxllm.models.quantized import IN_PARTS, WeightForm

_Blocks = np.ndarray  # uint8 [blocks, bytes]
_Split = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # of each block: codes, scales, offsets


class _BlockForm(NamedTuple):
    """A block format, as a form has it."""

    codes: str
    group: int
    scales: str
    has_offsets: bool
    split: Callable[[_Blocks], _Split]


def module(name: str, tensor: StoredTensor, head_dim: int | None = None) -> QuantizedModule | None:
    """The module `name`, whose weight is this tensor; None for one that is read dense: of another block format, not
    quantised at all, or not of two axes.

    Each head's `head_dim` rows are put in the order of Hugging Face's where the tensor has them interleaved.
    """
    if not is_kept(tensor):
        return None
    kind = _KINDS[tensor.dtype]
    num_outputs, num_inputs = tensor.shape
    if tensor.is_interleaved and (head_dim is None or head_dim % 2 or num_outputs % head_dim):
        raise wrong(
            tensor, f"has {num_outputs} rows, but heads of {head_dim} by the metadata", "take another file of the model"
        )
    form = WeightForm(
        codes=kind.codes,
        group=group_of_form(kind.group, num_inputs, has_offsets=kind.has_offsets),
        scales=kind.scales,
        has_offsets=kind.has_offsets,
        offsets_as_scales=kind.has_offsets,
        activations=IN_PARTS,  # as llama.cpp does
    )
    unit = (head_dim if tensor.is_interleaved and head_dim else 1, BLOCKS[tensor.dtype].num_values)

    def read(region: Region) -> StoredWeight:
        return _read(tensor.cut(*region), kind, form, head_dim)

    return QuantizedModule(name, (num_outputs, num_inputs), form, (tensor,), read, unit)


def _read(tensor: StoredTensor, kind: _BlockForm, form: WeightForm, head_dim: int | None) -> StoredWeight:
    num_outputs, num_inputs = tensor.shape
    rows = read_bytes(tensor).reshape(num_outputs, -1)
    if tensor.is_interleaved:
        assert head_dim is not None
        rows = rows.reshape(-1, head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2)
    codes, scales, offsets = kind.split(rows.reshape(-1, BLOCKS[tensor.dtype].num_bytes))
    scales = np.ascontiguousarray(scales).reshape(num_outputs, -1)
    for values in (scales,) if offsets is None else (scales, offsets):
        check_scales(tensor, values, largest_code=256, can_be_negative=True)
    return StoredWeight(
        codes.reshape(num_outputs, num_inputs),
        scales if form.group else scales[:, 0],
        None if offsets is None else offsets.reshape(num_outputs, -1),
    )


def _float16(blocks: _Blocks, start: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")


def _q4_0(blocks: _Blocks) -> _Split:
    return centered(fields(blocks[:, 2:], 4, 16), 4), _float16(blocks, 0), None


def _q4_1(blocks: _Blocks) -> _Split:
    return fields(blocks[:, 4:], 4, 16).view(ml_dtypes.uint4), _float16(blocks, 0), half(blocks, 2)


def _q5_0(blocks: _Blocks) -> _Split:
    return centered(fields(blocks[:, 6:], 4, 16) | fifth_bits(blocks[:, 2:6]), 5), _float16(blocks, 0), None


def _q5_1(blocks: _Blocks) -> _Split:
    quants = fields(blocks[:, 8:], 4, 16) | fifth_bits(blocks[:, 4:8])
    return quants.view(np.int8), _float16(blocks, 0), half(blocks, 2)


def _q8_0(blocks: _Blocks) -> _Split:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _float16(blocks, 0), None


def _q4_k(blocks: _Blocks) -> _Split:
    scales, minima = scales_and_minima(blocks)
    return fields(blocks[:, 16:], 4, 32).view(ml_dtypes.uint4), scales, -minima


def _q5_k(blocks: _Blocks) -> _Split:
    scales, minima = scales_and_minima(blocks)
    quants = fields(blocks[:, 48:], 4, 32) | fields(blocks[:, 16:48], 1, 32) << np.uint8(4)
    return quants.view(np.int8), scales, -minima


def _q6_k(blocks: _Blocks) -> _Split:
    scales = half(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    quants = fields(blocks[:, :128], 4, 64) | fields(blocks[:, 128:192], 2, 32) << np.uint8(4)
    return centered(quants, 6), scales, None


def is_kept(tensor: StoredTensor) -> bool:
    """Whether `module` makes one of it, if its shape fits."""
    return tensor.dtype in _KINDS and len(tensor.shape) == 2 and not tensor.shift


_KINDS = {
    "Q4_0": _BlockForm("int4", 32, "float16", False, _q4_0),
    "Q4_1": _BlockForm("uint4", 32, "float16", True, _q4_1),
    "Q5_0": _BlockForm("int8", 32, "float16", False, _q5_0),
    "Q5_1": _BlockForm("int8", 32, "float16", True, _q5_1),
    "Q8_0": _BlockForm("int8", 32, "float16", False, _q8_0),
    "Q4_K": _BlockForm("uint4", 32, "float32", True, _q4_k),
    "Q5_K": _BlockForm("int8", 32, "float32", True, _q5_k),
    "Q6_K": _BlockForm("int8", 16, "float32", False, _q6_k),
}
