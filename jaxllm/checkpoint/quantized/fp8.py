"""FP8: e4m3 codes with a scale for the tensor, each output, or each block; `quant_method: fp8` of DeepSeek, Qwen3-FP8
and vLLM."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.checkpoint.quantized.module import QuantizedModule, Region, StoredWeight, per
from jaxllm.checkpoint.quantized.options import Options, is_left_in
from jaxllm.checkpoint.quantized.scheme import Headers, Parts, Scheme, group_of_form
from jaxllm.checkpoint.quantized.values import SCALE_NAMES, read_e4m3, read_scales, wrong
from jaxllm.checkpoint.tensors import FLOATS, StoredTensor
from jaxllm.models.quantized import WeightForm

ACTIVATIONS = "float8_e4m3fn"
_LARGEST_CODE = 448
_LEAST_GROUP = 16
_SCALES = (*FLOATS, "F8_E8M0")


class Fp8(Scheme):
    """Scales multiply, those called `weight_scale_inv` too. The scale of a tensor becomes one of each output, and those
    of blocks become those of each output's groups of inputs."""

    name = "fp8"
    kinds = ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale")
    covers_heads = False

    def __init__(self, options: Options):
        super().__init__(options)
        options.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        options.choice("expert_dtype", ("fp8", None), None)
        self._is_static = options.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
        self._block = read_block(options, "weight_block_size")
        self._excluded = options.names("modules_to_not_convert", "ignored_layers")

    def says_quantized(self, name: str) -> bool | None:
        """Without a list of those that are not, only the tensors tell."""
        return is_left_in(self._excluded, name)

    def headers(self, name: str, shape: tuple[int, int], dtype: str) -> Headers:
        scales = ("weight_scale", ()) if self._block is None else ("weight_scale_inv", blocks_of(shape, self._block))
        static: Headers = {"input_scale": ("F32", ())} if self._is_static else {}
        return {"weight": ("F8_E4M3", shape), scales[0]: ("F32", scales[1])} | static

    def module(self, parts: Parts) -> QuantizedModule:
        scale = "weight_scale" if "weight_scale" in parts else "weight_scale_inv"
        input_scale = "activation_scale" if "activation_scale" in parts else "input_scale"
        return fp8_module(parts, scale, block=self._block, input_scale=input_scale if self._is_static else None)


def read_block(options: Options, key: str) -> tuple[int, int] | None:
    """Outputs and inputs of a block, also as "128x128"; None if there are no blocks."""
    given = options.values.get(key)
    if given is None:
        return None
    if isinstance(given, str) and re.fullmatch(r"\d{1,7}x\d{1,7}", given):
        given = [int(size) for size in given.split("x")]
    if isinstance(given, list) and len(given) == 2 and all(type(size) is int and 1 <= size <= 2**20 for size in given):
        return given[0], given[1]
    raise options.error(f"{key}={given!r:.100} must be two sizes of blocks, as [128, 128]", "download it again")


def blocks_of(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    """Of outputs and inputs, the last ones in part."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def fp8_headers(shape: tuple[int, int], dtype: str, block: tuple[int, int] | None = None) -> Headers:
    """Of a module with scales of `dtype` called "weight_scale": one, or those of blocks."""
    return {"weight": ("F8_E4M3", shape), "weight_scale": (dtype, () if block is None else blocks_of(shape, block))}


def fp8_module(
    parts: Parts,
    scale: str,
    *,
    block: tuple[int, int] | None = None,
    input_scale: str | None = None,
    activations: str | None = ACTIVATIONS,
) -> QuantizedModule:
    """The module whose scales are called `scale`: of these blocks, or else of the tensor or each output.

    `input_scale` is what the scale of activations is called, if there is one. It is not used: each row has its own.
    """
    weight = parts.take("weight", ("F8_E4M3",), (None, None))
    num_outputs, num_inputs = weight.shape
    scales = parts.take(scale, _SCALES)
    if input_scale:
        parts.take_scalar(input_scale, tuple(FLOATS))
    if block is not None:
        blocks = blocks_of(weight.shape, block)
        parts.take(scale, _SCALES, blocks)
        group = math.gcd(block[1], num_inputs) if blocks[1] > 1 else num_inputs
        if group < min(_LEAST_GROUP, block[1]):
            raise parts.error(f"has {num_inputs} inputs, which blocks of {block[1]} cut too finely", _OTHER_FORMAT)
        rows, columns = block[0], max(1, block[1] // group)
    elif scales.shape in ((), (1,), (1, 1), (num_outputs,), (num_outputs, 1)):
        group, rows, columns = num_inputs, 1 if math.prod(scales.shape) > 1 else num_outputs, 1
    else:
        want = f"it must be one scale, or {num_outputs}, one of each output"
        raise wrong(scales, f"has shape {list(scales.shape)}; {want}", "take config and weights of one model")
    has_group = group_of_form(group, num_inputs, has_offsets=False)
    form = WeightForm(
        codes="float8_e4m3fn",
        group=has_group,
        scales="float32" if has_group is None and scales.dtype == "F8_E8M0" else SCALE_NAMES[scales.dtype],
        activations=activations,
    )
    reader = _Fp8Reader(form, weight, scales, rows, columns)
    unit = (1 if block is None else rows, columns * group if form.group else 1)
    return parts.module(form, (num_outputs, num_inputs), reader.read, unit)


_OTHER_FORMAT = "take another quantised form of the model"


@dataclass(frozen=True)
class _Fp8Reader:
    """Reads one module."""

    form: WeightForm
    weight: StoredTensor
    scales: StoredTensor
    rows: int  # outputs that share a scale
    columns: int  # groups of inputs that do

    def read(self, region: Region) -> StoredWeight:
        num_outputs, num_inputs = region.shape
        scales = read_scales(self._scales(region), largest_code=_LARGEST_CODE, can_be_negative=False)
        if self.form.group is None:
            scales = np.repeat(scales.reshape(-1), self.rows)[:num_outputs]
            scales = scales.astype(np.float32) if self.scales.dtype == "F8_E8M0" else scales
        else:
            scales = np.repeat(np.repeat(scales, self.columns, axis=1), self.rows, axis=0)
            scales = np.ascontiguousarray(scales[:num_outputs, : num_inputs // self.form.group])
        return StoredWeight(read_e4m3(self.weight.cut(*region)), scales)

    def _scales(self, region: Region) -> StoredTensor:
        if math.prod(self.scales.shape) == 1:
            return self.scales
        rows = per(region.outputs, self.rows)
        if self.form.group is None:
            return self.scales.cut(rows, *(slice(0, 1) for _ in self.scales.shape[1:]))
        return self.scales.cut(rows, per(region.inputs, self.columns * self.form.group))
