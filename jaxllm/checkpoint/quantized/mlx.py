"""MLX: unsigned integers of 2 to 8 bits with a float for zero in each group."""

import math

import ml_dtypes
import numpy as np

from jaxllm.checkpoint.quantized.module import QuantizedModule, Region, StoredWeight, per
from jaxllm.checkpoint.quantized.options import Options
from jaxllm.checkpoint.quantized.packing import centered, unpack
from jaxllm.checkpoint.quantized.scheme import Headers, Parts, Place, Scheme
from jaxllm.checkpoint.quantized.values import SCALE_NAMES, read_finite, read_scales, wrong
from jaxllm.checkpoint.tensors import FLOATS, StoredTensor, read_array
from jaxllm.models.quantized import WeightForm

_BITS = (2, 3, 4, 5, 6, 8)


class Mlx(Scheme):
    """Codes stay unsigned, as offsets do not: uint4, or int8 below 128. Those of 8 bits are 128 less, and the offsets
    as much more: exact but for a float32's last bit where an offset is much smaller than its scale, or larger."""

    name = "MLX"
    kinds = ("scales", "biases")

    def __init__(self, options: Options):
        super().__init__(options)
        self._settings = self._read_settings(options, 64, 4)

    @staticmethod
    def _read_settings(options: Options, group_size: int, bits: int) -> tuple[int, int]:
        options.choice("mode", ("affine",), "affine")
        bits = options.integer("bits", bits, least=2, most=8) or bits
        if bits not in _BITS:
            raise options.error(f"bits={bits} is not supported; supported: {_BITS}")
        return options.integer("group_size", group_size, least=1, most=2**20) or group_size, bits

    def says_quantized(self, name: str) -> bool | None:
        """An object of the module's own, or false; others are as their tensors."""
        given = self.options.values.get(name)
        return given if isinstance(given, bool) else True if isinstance(given, dict) else None

    def expects(self, name: str, place: Place) -> bool:
        """All products and tables that the configuration does not exclude."""
        return self.says_quantized(name) is not False

    def headers(self, name: str, shape: tuple[int, int], dtype: str) -> Headers:
        (num_outputs, num_inputs), (group_size, bits) = shape, self._settings_of(name)
        if num_inputs % group_size:  # its writers leave these as they are
            return {}
        floats = (dtype, (num_outputs, num_inputs // group_size))
        return {"weight": ("U32", (num_outputs, num_inputs * bits // 32)), "scales": floats, "biases": floats}

    def _settings_of(self, name: str) -> tuple[int, int]:
        own = None if isinstance(self.options.values.get(name), bool) else self.options.section(name)
        return self._settings if own is None else self._read_settings(own, *self._settings)

    def module(self, parts: Parts) -> QuantizedModule:
        group_size, bits = self._settings_of(parts.name)
        weight = parts.take("weight", ("U32",), (None, None))
        num_outputs, num_words = weight.shape
        if num_words * 32 % bits:
            raise wrong(weight, f"has rows of {num_words} words of 32 bits, no whole number of values of {bits} bits")
        num_inputs = num_words * 32 // bits
        group = parts.group(num_inputs, group_size)
        scales = parts.take("scales", tuple(FLOATS), (num_outputs, num_inputs // group))
        biases = parts.take("biases", (scales.dtype,), scales.shape)
        form = WeightForm(
            codes="uint4" if bits <= 4 else "int8",
            group=group,
            scales=SCALE_NAMES[scales.dtype],
            has_offsets=True,
            offsets_as_scales=bits < 8,  # of which zero is not moved
        )

        def read(region: Region) -> StoredWeight:
            outputs, groups = region.outputs, per(region.inputs, group)
            words = weight.cut(outputs, per(region.inputs, 32, bits))
            return _read(bits, region.shape[1], words, scales.cut(outputs, groups), biases.cut(outputs, groups))

        return parts.module(form, (num_outputs, num_inputs), read, (1, math.lcm(group, 32 // math.gcd(32, bits))))


def _read(bits: int, num_inputs: int, weight: StoredTensor, scales: StoredTensor, biases: StoredTensor) -> StoredWeight:
    factors = read_scales(scales, largest_code=2**bits, can_be_negative=True)
    offsets = read_finite(biases)
    codes = unpack(read_array(weight), bits, num_inputs)
    if bits == 8:
        return StoredWeight(centered(codes, bits), factors, offsets + np.float32(128) * factors.astype(np.float32))
    return StoredWeight(codes.view(ml_dtypes.uint4 if bits <= 4 else np.int8), factors, offsets)
