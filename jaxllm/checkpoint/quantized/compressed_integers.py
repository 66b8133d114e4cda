"""The integers of compressed-tensors: packed ones of any width up to 8 bits, and int8."""

import math
from dataclasses import dataclass

import numpy as np

from jaxllm.checkpoint.quantized.module import QuantizedModule, Region, StoredWeight, per
from jaxllm.checkpoint.quantized.packing import centered, centered_dtype, centered_offsets, packed_size, unpack
from jaxllm.checkpoint.quantized.scheme import Headers, Parts, group_of_form
from jaxllm.checkpoint.quantized.values import SCALE_NAMES, check_ordinary, read_order, read_scales, wrong
from jaxllm.checkpoint.tensors import FLOATS, StoredTensor, read_array
from jaxllm.models.quantized import WeightForm


def packed_headers(
    shape: tuple[int, int], dtype: str, bits: int, group_size: int | None, is_symmetric: bool, has_order: bool
) -> Headers:
    """Of what `packed_module` reads."""
    (num_outputs, num_inputs), groups = shape, _num_groups(shape[1], group_size)
    found: Headers = {
        "weight_packed": ("I32", (num_outputs, packed_size(bits, num_inputs))),
        "weight_scale": (dtype, (num_outputs, groups)),
        "weight_shape": ("I64", (2,)),
    }
    if not is_symmetric:
        found["weight_zero_point"] = ("I32", (packed_size(bits, num_outputs), groups))
    return found | {"weight_g_idx": ("I32", (num_inputs,))} if has_order else found


def integer_headers(shape: tuple[int, int], dtype: str, group_size: int | None, is_symmetric: bool) -> Headers:
    """Of what `integer_module` reads."""
    scales = (shape[0], _num_groups(shape[1], group_size))
    found: Headers = {"weight": ("I8", shape), "weight_scale": (dtype, scales)}
    return found if is_symmetric else found | {"weight_zero_point": ("I8", scales)}


def _num_groups(num_inputs: int, group_size: int | None) -> int:
    return 1 if group_size in (None, -1) else num_inputs // group_size


def packed_module(parts: Parts, bits: int, group_size: int | None, is_symmetric: bool) -> QuantizedModule:
    """Codes are half the range less than in the file. In act-order (the file has `weight_g_idx`) they are in the order
    of the groups."""
    packed = parts.take("weight_packed", ("I32",), (None, None))
    num_outputs, words = packed.shape
    num_inputs = words * 32 // bits
    if group_size not in (None, -1) and num_inputs % group_size:  # the last word may have values to spare
        num_inputs -= num_inputs % group_size
    if packed_size(bits, num_inputs) != words:
        raise wrong(packed, f"has rows of {words} words, which no inputs in groups of {group_size} fill")
    group = parts.group(num_inputs, group_size)
    groups = num_inputs // group
    scales = _scales(parts, num_outputs, groups)
    zeros = None
    if not is_symmetric:
        dtypes = ("I32", "I8")
        zeros = parts.take("weight_zero_point", dtypes)
        rows = num_outputs if zeros.dtype == "I8" else packed_size(bits, num_outputs)
        parts.take("weight_zero_point", dtypes, (rows, groups))
    order = parts.take("weight_g_idx", ("I32",), (num_inputs,)) if "weight_g_idx" in parts else None
    form = WeightForm(
        codes=centered_dtype(bits),
        group=group_of_form(group, num_inputs, has_offsets=zeros is not None),
        scales=SCALE_NAMES[scales.dtype],
        has_offsets=zeros is not None,
        is_reordered=order is not None and groups > 1,
    )
    shape = parts.take("weight_shape", ("I64", "I32"), (2,))
    reader = _Packed(form, bits, group, (num_outputs, num_inputs), packed, shape, scales, zeros, order)
    per_word = 32 // math.gcd(32, bits)  # values whose words are theirs alone
    rows = per_word if zeros is not None and zeros.dtype == "I32" else 1
    columns = num_inputs if form.is_reordered else math.lcm(per_word, group if form.group else 1)
    return parts.module(form, (num_outputs, num_inputs), reader.read, (rows, columns))


@dataclass(frozen=True)
class _Packed:
    """Reads one module."""

    form: WeightForm
    bits: int
    group: int
    shape: tuple[int, int]
    packed: StoredTensor
    said_shape: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None
    g_idx: StoredTensor | None

    def read(self, region: Region) -> StoredWeight:
        if (said := read_array(self.said_shape).tolist()) != list(self.shape):
            raise wrong(self.said_shape, f"is {said}, but {self.packed.name} holds {list(self.shape)}")
        num_outputs, num_inputs = region.shape
        groups = per(region.inputs, self.group)
        own_scales = _own_scales(self.scales, region.outputs, groups)
        scales = read_scales(own_scales, largest_code=2**self.bits, can_be_negative=True)
        scales = scales.reshape(-1, groups.stop - groups.start)
        words = self.packed.cut(region.outputs, per(region.inputs, 32, self.bits))
        codes = centered(unpack(read_array(words), self.bits, num_inputs), self.bits)
        order = None
        if self.form.is_reordered and self.g_idx is not None:
            order = read_order(self.g_idx, self.group, num_inputs // self.group)
            codes = np.take(codes, order, axis=1)
        elif self.g_idx is not None:
            check_ordinary(self.g_idx, self.group)
        if self.form.group is None:
            return StoredWeight(codes, np.broadcast_to(scales[:, 0], num_outputs).copy(), order=order)
        scales = np.broadcast_to(scales, (num_outputs, scales.shape[1])).copy()
        zeros = None if self.zeros is None else self._zeros(self.zeros, region.outputs, groups)
        offsets = None if zeros is None else centered_offsets(zeros, scales, self.bits)
        return StoredWeight(codes, scales, offsets, order=order)

    def _zeros(self, tensor: StoredTensor, outputs: slice, groups: slice) -> np.ndarray:
        """Those of uncentred values, `[out, groups]`."""
        half = 2 ** (self.bits - 1)
        if tensor.dtype == "I32":
            words = read_array(tensor.cut(per(outputs, 32, self.bits), groups))
            return np.ascontiguousarray(unpack(words.T, self.bits, outputs.stop - outputs.start).T)
        zeros = read_array(tensor.cut(outputs, groups)).astype(np.int32)
        if zeros.min() < -half or zeros.max() >= half:
            raise wrong(tensor, f"holds zero points from {zeros.min()} to {zeros.max()} of {self.bits} bits")
        return zeros + half


def integer_module(
    parts: Parts, group_size: int | None, is_symmetric: bool, activations: str | None, input_scale: str | None
) -> QuantizedModule:
    """A weight in int8. `input_scale` is what the scale of activations is called, if there is one; each row has its own
    instead."""
    weight = parts.take("weight", ("I8",), (None, None))
    num_outputs, num_inputs = weight.shape
    group = parts.group(num_inputs, group_size)
    scales = _scales(parts, num_outputs, num_inputs // group)
    zeros = None if is_symmetric else parts.take("weight_zero_point", ("I8", "I32"), scales.shape)
    if input_scale:
        parts.take_scalar(input_scale, tuple(FLOATS))
    form = WeightForm(
        codes="int8",
        group=group_of_form(group, num_inputs, has_offsets=zeros is not None),
        scales=SCALE_NAMES[scales.dtype],
        has_offsets=zeros is not None,
        activations=activations,
    )

    def read(region: Region) -> StoredWeight:
        groups = per(region.inputs, group)
        own, num_groups = _own_scales(scales, region.outputs, groups), groups.stop - groups.start
        factors = read_scales(own, largest_code=256, can_be_negative=True).reshape(-1, num_groups)
        factors = np.broadcast_to(factors, (region.shape[0], num_groups)).copy()
        offsets = None
        if zeros is not None:
            own = _own_scales(zeros, region.outputs, groups)
            negative = -read_array(own).astype(np.float32).reshape(-1, num_groups)
            if np.abs(negative).max() > 128:
                raise wrong(zeros, f"holds zero points up to {np.abs(negative).max():.0f}, which no int8 is")
            offsets = negative * factors.astype(np.float32)
        return StoredWeight(read_array(weight.cut(*region)), factors if form.group else factors[:, 0], offsets)

    return parts.module(form, (num_outputs, num_inputs), read, (1, group if form.group else 1))


def _own_scales(scales: StoredTensor, outputs: slice, groups: slice) -> StoredTensor:
    """Those of these outputs' groups, or the one of all."""
    if math.prod(scales.shape) == 1:
        return scales
    return scales.cut(*(outputs, groups)[: len(scales.shape)])


def _scales(parts: Parts, num_outputs: int, groups: int) -> StoredTensor:
    """Of each output's groups, or one of all."""
    dtypes = tuple(FLOATS)
    scales = parts.take("weight_scale", dtypes)
    if groups == 1 and scales.shape in ((), (1,), (1, 1), (num_outputs,)):
        return scales
    return parts.take("weight_scale", dtypes, (num_outputs, groups))
