"""GPTQ (AutoGPTQ, GPTQModel): integers of 2, 3, 4 or 8 bits, packed along the inputs, which may be in groups in an
order of their own (act-order)."""

import math
import re
from dataclasses import dataclass

import numpy as np

from jaxllm.checkpoint.quantized.module import QuantizedModule, Region, StoredWeight, per
from jaxllm.checkpoint.quantized.options import Options
from jaxllm.checkpoint.quantized.packing import centered, centered_dtype, centered_offsets, packed_size, unpack
from jaxllm.checkpoint.quantized.scheme import Headers, Parts, Place, Scheme, group_of_form
from jaxllm.checkpoint.quantized.values import SCALE_NAMES, check_ordinary, read_order, read_scales, wrong
from jaxllm.checkpoint.tensors import StoredTensor, read_array
from jaxllm.models.quantized import WeightForm


@dataclass(frozen=True, kw_only=True)
class _GptqSettings:
    """Those of a module."""

    bits: int
    group_size: int
    is_symmetric: bool  # all zero points are half the range; False: not by the configuration
    is_reordered: bool

    @classmethod
    def of(cls, options: Options, base: "_GptqSettings | None" = None) -> "_GptqSettings":
        bits = options.integer("bits", base and base.bits, least=2, most=8)
        if bits not in (2, 3, 4, 8):
            raise options.error(f"bits={bits} is not supported; supported: 2, 3, 4, 8")
        order = base is not None and base.is_reordered
        return cls(
            bits=bits,
            group_size=options.integer("group_size", base.group_size if base else 128, least=-1, most=2**20) or -1,
            is_symmetric=options.flag("sym", base is not None and base.is_symmetric),
            is_reordered=options.flag("desc_act", order) and not options.flag("static_groups", False),
        )


class Gptq(Scheme):
    """Codes are half the range less than in the file; of symmetric weights there are no offsets.

    The zero points of version 1 are one more than stored, and those of a form that is said to be symmetric are checked.
    With `desc_act`, the codes are in the order of the groups.
    """

    name = "gptq"
    kinds = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, options: Options):
        super().__init__(options)
        given = options.choice("checkpoint_format", ("gptq", "gptq_v2", None), None)
        self._is_version_2 = (given or options.choice("format", ("gptq", "gptq_v2"), "gptq")) == "gptq_v2"
        if options.flag("is_marlin_format", False):
            raise options.error("is_marlin_format is set, a layout for one kind of GPU, which is not supported")
        options.choice("pack_dtype", ("int32",), "int32")
        self._settings = _GptqSettings.of(options)
        self._has_head = options.flag("lm_head", False)
        self._names_some = options.values.get("modules_in_block_to_quantize") is not None
        self._rules: list[tuple[str, _GptqSettings | None]] = []
        if (dynamic := options.section("dynamic")) is not None:
            self._rules = [self._rule(dynamic, key) for key in dynamic.values]

    def _rule(self, dynamic: Options, key: str) -> tuple[str, _GptqSettings | None]:
        """A pattern of names, and the settings of the modules; None: those are not quantised."""
        sign, _, pattern = key.partition(":") if key[:2] in ("+:", "-:") else ("+", "", key)
        dynamic.check_pattern(key[:100], pattern)
        if sign == "-":
            return pattern, None
        own = dynamic.section(key)
        return pattern, _GptqSettings.of(own, self._settings) if own is not None else self._settings

    def _settings_of(self, name: str) -> _GptqSettings | None:
        rules = (settings for pattern, settings in self._rules if re.match(pattern, name))
        return next(rules, self._settings)

    def says_quantized(self, name: str) -> bool | None:
        if self._settings_of(name) is None:
            return False
        return None if self._names_some or name.endswith(("gate", "router")) else True

    def expects(self, name: str, place: Place) -> bool:
        return super().expects(name, place) and (place == "layer" or self._has_head and name == "lm_head")

    def headers(self, name: str, shape: tuple[int, int], dtype: str) -> Headers:
        settings = self._settings_of(name)
        assert settings is not None
        num_outputs, num_inputs = shape
        groups = 1 if settings.group_size == -1 else num_inputs // settings.group_size
        return {
            "qweight": ("I32", (packed_size(settings.bits, num_inputs), num_outputs)),
            "qzeros": ("I32", (groups, packed_size(settings.bits, num_outputs))),
            "scales": ("F16", (groups, num_outputs)),
            "g_idx": ("I32", (num_inputs,)),
        }

    def module(self, parts: Parts) -> QuantizedModule:
        settings = self._settings_of(parts.name)
        assert settings is not None
        qweight = parts.take("qweight", ("I32",), (None, None))
        bits, (num_words, num_outputs) = settings.bits, qweight.shape
        if num_words * 32 % bits:
            raise wrong(qweight, f"has {num_words} rows of 32 bits, no whole number of values of {bits} bits")
        num_inputs = num_words * 32 // bits
        group = parts.group(num_inputs, settings.group_size)
        groups = num_inputs // group
        scales = parts.take("scales", ("F16", "BF16", "F32"), (groups, num_outputs))
        qzeros = parts.take("qzeros", ("I32",), (groups, packed_size(bits, num_outputs)))
        is_reordered = settings.is_reordered and groups > 1
        g_idx = parts.take("g_idx", ("I32",), (num_inputs,)) if "g_idx" in parts or is_reordered else None
        form = WeightForm(
            codes=centered_dtype(bits),
            group=group_of_form(group, num_inputs, has_offsets=not settings.is_symmetric),
            scales=SCALE_NAMES[scales.dtype],
            has_offsets=not settings.is_symmetric,
            is_reordered=is_reordered,
        )
        reader = _GptqReader(form, bits, group, qweight, qzeros, scales, g_idx, plus=0 if self._is_version_2 else 1)
        per_word = 32 // math.gcd(32, bits)  # values whose words are theirs alone
        columns = num_inputs if is_reordered else math.lcm(per_word, group if form.group else 1)
        return parts.module(form, (num_outputs, num_inputs), reader.read, (per_word, columns))


@dataclass(frozen=True)
class _GptqReader:
    """Reads one module."""

    form: WeightForm
    bits: int
    group: int
    qweight: StoredTensor
    qzeros: StoredTensor
    scales: StoredTensor
    g_idx: StoredTensor | None
    plus: int  # added to stored zero points; the sum may have one bit more

    def read(self, region: Region) -> StoredWeight:
        num_outputs, num_inputs = region.shape
        groups, columns = per(region.inputs, self.group), per(region.outputs, 32, self.bits)
        scales, qzeros = self.scales.cut(groups, region.outputs), self.qzeros.cut(groups, columns)
        factors = read_scales(scales, largest_code=2**self.bits, can_be_negative=True)
        zeros = unpack(read_array(qzeros), self.bits, num_outputs).astype(np.int32) + self.plus
        if not self.form.has_offsets and (zeros != 2 ** (self.bits - 1)).any():
            raise wrong(
                self.qzeros,
                f"holds zero points from {zeros.min()} to {zeros.max()}, but the configuration has sym=true, for which "
                f"all are {2 ** (self.bits - 1)}",
                "take config and weights of one model",
            )
        words = read_array(self.qweight.cut(per(region.inputs, 32, self.bits), region.outputs))
        codes = centered(unpack(np.ascontiguousarray(words.T), self.bits, num_inputs), self.bits)
        order = self._order()
        codes = codes if order is None else np.take(codes, order, axis=1)
        factors = np.ascontiguousarray(factors.T)
        offsets = centered_offsets(zeros.T, factors, self.bits) if self.form.has_offsets else None
        return StoredWeight(codes, factors if self.form.group else factors[:, 0], offsets, order=order)

    def _order(self) -> np.ndarray | None:
        if self.g_idx is None:
            return None
        if self.form.is_reordered:
            return read_order(self.g_idx, self.group, self.g_idx.shape[0] // self.group)
        check_ordinary(self.g_idx, self.group)
        return None
