"""FP4: e2m1 codes in groups of 16 with e4m3 scales and one of the tensor (NVFP4), or of 32 with powers of two (MXFP4),
as dense layers have them. All keep activations in 16 bits; scales for rounding those to 4 bits are not used."""

import math

import ml_dtypes
import numpy as np

from jaxllm.checkpoint.quantized.module import QuantizedModule, Region, StoredWeight, per
from jaxllm.checkpoint.quantized.packing import unpack
from jaxllm.checkpoint.quantized.scheme import Headers, Parts
from jaxllm.checkpoint.quantized.values import read_scale, read_scales, wrong
from jaxllm.checkpoint.tensors import FLOATS, StoredTensor, read_array
from jaxllm.models.quantized import WeightForm

_LARGEST_CODE = 6


def nvfp4_module(
    parts: Parts, weight: str, global_scale: str, input_scale: str, *, divides: bool, group: int = 16
) -> QuantizedModule:
    """The module whose tensors have these names; `divides`: by the global scale, which multiplies otherwise."""
    packed, shape = _packed(parts, weight)
    group = parts.group(shape[1], group)
    scales = parts.take("weight_scale", ("F8_E4M3",), (shape[0], shape[1] // group))
    overall = parts.take_scalar(global_scale, tuple(FLOATS))
    if input_scale in parts:
        parts.take_scalar(input_scale, tuple(FLOATS))
    form = WeightForm(codes="float4_e2m1fn", group=group, scales="float8_e4m3fn", has_outer=True)

    def read(region: Region) -> StoredWeight:
        outer = np.float32(read_scale(overall))
        with np.errstate(over="ignore"):
            outer = np.float32(1) / outer if divides else outer
        if not 0 < float(outer) * _LARGEST_CODE * 448 <= float(np.finfo(np.float32).max):
            raise wrong(overall, "is out of range; the weights would not be finite, or be nothing")
        codes, factors = _read(packed, scales, region, group)
        return StoredWeight(codes, factors, outer=np.full(region.shape[0], outer, np.float32))

    return parts.module(form, shape, read, (1, math.lcm(group, 2)))


def mxfp4_module(parts: Parts, weight: str, scale: str) -> QuantizedModule:
    """The module whose tensors have these names."""
    packed, shape = _packed(parts, weight)
    group = parts.group(shape[1], 32)
    scales = parts.take(scale, ("U8", "F8_E8M0"), (shape[0], shape[1] // group))
    form = WeightForm(codes="float4_e2m1fn", group=group, scales="float8_e8m0fnu")

    def read(region: Region) -> StoredWeight:
        return StoredWeight(*_read(packed, scales._replace(dtype="F8_E8M0"), region, group))

    return parts.module(form, shape, read, (1, math.lcm(group, 2)))


def nvfp4_headers(weight: str, global_scale: str, shape: tuple[int, int], group: int) -> Headers:
    """Of a module whose tensors have these names."""
    scales = ("F8_E4M3", (shape[0], shape[1] // group))
    return {weight: ("U8", (shape[0], shape[1] // 2)), "weight_scale": scales, global_scale: ("F32", ())}


def mxfp4_headers(weight: str, scale: str, shape: tuple[int, int]) -> Headers:
    """Of a module whose tensors have these names."""
    return {weight: ("U8", (shape[0], shape[1] // 2)), scale: ("U8", (shape[0], shape[1] // 32))}


def _packed(parts: Parts, kind: str) -> tuple[StoredTensor, tuple[int, int]]:
    """The tensor of two codes a byte, and the weight's shape."""
    packed = parts.take(kind, ("U8",), (None, None))
    return packed, (packed.shape[0], 2 * packed.shape[1])


def _read(packed: StoredTensor, scales: StoredTensor, region: Region, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales."""
    own = scales.cut(region.outputs, per(region.inputs, group))
    factors = read_scales(own, largest_code=_LARGEST_CODE, can_be_negative=False)
    octets = read_array(packed.cut(region.outputs, per(region.inputs, 2)))
    return unpack(octets, 4, region.shape[1]).view(ml_dtypes.float4_e2m1fn), factors
