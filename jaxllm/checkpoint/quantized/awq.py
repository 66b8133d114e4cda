"""AWQ (AutoAWQ's "gemm" layout): integers of 4 bits with zero points, packed along the outputs in an odd order."""

import numpy as np

from jaxllm.checkpoint.quantized.module import QuantizedModule, Region, StoredWeight, per
from jaxllm.checkpoint.quantized.options import Options, is_left_in
from jaxllm.checkpoint.quantized.packing import centered, centered_offsets
from jaxllm.checkpoint.quantized.scheme import Headers, Parts, Scheme, group_of_form
from jaxllm.checkpoint.quantized.values import SCALE_NAMES, read_scales, wrong
from jaxllm.checkpoint.tensors import StoredTensor, read_array
from jaxllm.models.quantized import WeightForm

_BITS = 4
_PER_WORD = 8  # outputs
_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # of a word; that of each of its eight outputs


class Awq(Scheme):
    """Codes are 8 less than in the file. `zero_point: false` says that all zero points are 8: there are no offsets."""

    name = "awq"
    kinds = ("qweight", "qzeros", "scales")
    covers_heads = False

    def __init__(self, options: Options):
        super().__init__(options)
        options.integer("bits", _BITS, least=_BITS, most=_BITS)
        options.choice("version", ("gemm",), "gemm")
        self._group_size = options.integer("group_size", 128, least=-1, most=2**20) or -1
        self._is_symmetric = not options.flag("zero_point", True)
        self._excluded = options.names("modules_to_not_convert") or ()

    def says_quantized(self, name: str) -> bool | None:
        said = is_left_in(self._excluded, name)
        return None if said and name.endswith(("gate", "router")) else said

    def headers(self, name: str, shape: tuple[int, int], dtype: str) -> Headers:
        num_outputs, num_inputs = shape
        groups = 1 if self._group_size == -1 else num_inputs // self._group_size
        words = num_outputs // _PER_WORD
        return {
            "qweight": ("I32", (num_inputs, words)),
            "qzeros": ("I32", (groups, words)),
            "scales": ("F16", (groups, num_outputs)),
        }

    def module(self, parts: Parts) -> QuantizedModule:
        qweight = parts.take("qweight", ("I32",), (None, None))
        num_inputs, num_outputs = qweight.shape[0], _PER_WORD * qweight.shape[1]
        group = parts.group(num_inputs, self._group_size)
        scales = parts.take("scales", ("F16", "BF16", "F32"), (num_inputs // group, num_outputs))
        qzeros = parts.take("qzeros", ("I32",), (num_inputs // group, num_outputs // _PER_WORD))
        has_offsets = not self._is_symmetric
        form = WeightForm(
            codes="int4",
            group=group_of_form(group, num_inputs, has_offsets=has_offsets),
            scales=SCALE_NAMES[scales.dtype],
            has_offsets=has_offsets,
        )

        def read(region: Region) -> StoredWeight:
            words, groups = per(region.outputs, _PER_WORD), per(region.inputs, group)
            return _read(
                form, qweight.cut(region.inputs, words), qzeros.cut(groups, words), scales.cut(groups, region.outputs)
            )

        return parts.module(form, (num_outputs, num_inputs), read, (_PER_WORD, group if form.group else 1))


def _read(form: WeightForm, qweight: StoredTensor, qzeros: StoredTensor, scales: StoredTensor) -> StoredWeight:
    factors = np.ascontiguousarray(read_scales(scales, largest_code=16, can_be_negative=True).T)
    zeros = _unpack(read_array(qzeros))
    offsets = centered_offsets(zeros, factors, _BITS) if form.has_offsets else None
    if offsets is None and (zeros != 2 ** (_BITS - 1)).any():
        raise wrong(qzeros, "holds zero points other than 8, but the configuration has zero_point=false")
    codes = centered(_unpack(read_array(qweight)), _BITS)
    return StoredWeight(codes, factors if form.group else factors[:, 0], offsets)


def _unpack(words: np.ndarray) -> np.ndarray:
    """int32 `[rows, out / 8]` -> uint8 `[out, rows]`."""
    octets = np.ascontiguousarray(words.T).view(np.uint8).reshape(words.shape[1], -1, 4)
    values = np.empty((words.shape[1], 8, words.shape[0]), np.uint8)
    for i, nibble in enumerate(_NIBBLES):
        np.bitwise_and(octets[:, :, nibble // 2] >> np.uint8(4 * (nibble % 2)), np.uint8(15), out=values[:, i])
    return values.reshape(-1, words.shape[0])
