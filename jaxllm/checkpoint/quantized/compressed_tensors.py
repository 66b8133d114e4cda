"""compressed-tensors (llm-compressor, RedHatAI): packed integers, int8, FP8 and FP4, each module by the group of the
configuration that it is in."""

from dataclasses import dataclass

from jaxllm.checkpoint.quantized.compressed_integers import (
    integer_headers,
    integer_module,
    packed_headers,
    packed_module,
)
from jaxllm.checkpoint.quantized.fp4 import mxfp4_headers, mxfp4_module, nvfp4_headers, nvfp4_module
from jaxllm.checkpoint.quantized.fp8 import ACTIVATIONS, fp8_headers, fp8_module, read_block
from jaxllm.checkpoint.quantized.module import QuantizedModule
from jaxllm.checkpoint.quantized.options import Options, is_left_in, matches
from jaxllm.checkpoint.quantized.scheme import Headers, Parts, Scheme

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_MAX_GROUPS = 1000


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A group of the configuration."""

    targets: tuple[str, ...]
    format: str
    bits: int
    is_float: bool
    is_symmetric: bool
    group_size: int | None  # None: a scale of each output, of the tensor, or of a block
    block: tuple[int, int] | None
    activations: str | None  # what they may be rounded to
    has_input_scale: bool  # in the files, whether used or not
    has_order: bool  # in the files

    @classmethod
    def of(cls, options: Options, weights: Options, default_format: str | None) -> "_Group":
        strategy = weights.choice("strategy", _STRATEGIES, "group" if weights.values.get("group_size") else "tensor")
        bits = weights.integer("num_bits", 8, least=2, most=8) or 8
        group_size = weights.integer("group_size", None, least=-1, most=2**20)
        block = read_block(weights, "block_structure")
        if strategy == "block" and block is None or strategy in ("group", "tensor_group") and group_size in (None, 0):
            raise weights.error(f"strategy={strategy} lacks its size", "download it again")
        is_float = weights.choice("type", ("int", "float"), "int") == "float"
        activations, has_input_scale = _activations(options)
        return cls(
            targets=options.names("targets") or (),
            format=options.choice("format", _FORMATS, default_format) or "",
            bits=bits,
            is_float=is_float,
            is_symmetric=weights.flag("symmetric", True),
            group_size=group_size if strategy in ("group", "tensor_group") else None,
            block=block if strategy == "block" else None,
            activations=activations,
            has_input_scale=has_input_scale,
            has_order=weights.values.get("actorder") in (True, "group"),
        )


def _activations(options: Options) -> tuple[str | None, bool]:
    """What rows may be rounded to, and whether the files have a scale for that. Those with a zero point, and those of
    fewer bits, stay as they are."""
    given = options.section("input_activations")
    if given is None:
        return None, False
    is_float, bits = (
        given.choice("type", ("int", "float"), "int") == "float",
        given.integer("num_bits", 8, least=2, most=16),
    )
    is_dynamic = given.values.get("dynamic") not in (False, None)  # "local" is in part
    if bits != 8 or not given.flag("symmetric", True):
        return None, not is_dynamic
    return ACTIVATIONS if is_float else "int8", not is_dynamic


class CompressedTensors(Scheme):
    """Zero points become offsets. The global scale of NVFP4 divides."""

    name = "compressed-tensors"
    kinds = (
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "weight_global_scale",
        "input_scale",
        "input_zero_point",
        "input_global_scale",
    )

    def __init__(self, options: Options):
        super().__init__(options)
        for key in ("sparsity_config", "transform_config"):
            given = options.section(key)
            if given is not None and given.values and given.values.get("format") != "dense":
                raise options.error(f"{key} is set, which is not supported")
        options.choice("quantization_status", ("compressed",), "compressed")
        default = options.choice("format", (*_FORMATS, "mixed-precision", None), None)
        groups = options.section("config_groups")
        is_of_cache = options.section("kv_cache_scheme") is not None  # which may be all that is quantised
        if groups is None or not (0 if is_of_cache else 1) <= len(groups.values) <= _MAX_GROUPS:
            raise options.error(f"config_groups must have 1 to {_MAX_GROUPS} groups", "download it again")
        self._groups: list[_Group] = []
        for key in groups.values:
            group = groups.section(key)
            weights = None if group is None else group.section("weights")
            if group is not None and weights is not None:
                self._groups.append(_Group.of(group, weights, None if default == "mixed-precision" else default))
        self._ignored = options.names("ignore") or ()

    def says_quantized(self, name: str) -> bool | None:
        said = is_left_in(self._ignored, name)
        return self._group_of(name) is not None if said else said

    def _group_of(self, name: str) -> _Group | None:
        """That which names the module, or else has a pattern for it, or else all linear layers."""
        patterns = [(target, group) for group in self._groups for target in group.targets]
        for wanted in (
            lambda target: not target.startswith("re:") and matches(target, name),
            lambda target: target.startswith("re:") and matches(target, name),
            lambda target: target == "Linear",
        ):
            for target, group in patterns:
                if wanted(target):
                    return group
        return None

    def headers(self, name: str, shape: tuple[int, int], dtype: str) -> Headers:
        group = self._group_of(name)
        if group is None:
            return {}
        static: Headers = {"input_scale": ("F32", ())} if group.has_input_scale and group.activations else {}
        if group.format == "pack-quantized":
            return packed_headers(shape, dtype, group.bits, group.group_size, group.is_symmetric, group.has_order)
        if group.format == "nvfp4-pack-quantized":
            return nvfp4_headers("weight_packed", "weight_global_scale", shape, group.group_size or 16)
        if group.format == "mxfp4-pack-quantized":
            return mxfp4_headers("weight_packed", "weight_scale", shape)
        if not group.is_float:
            return integer_headers(shape, dtype, group.group_size, group.is_symmetric) | static
        block = group.block if group.group_size is None else (1, group.group_size)
        return fp8_headers(shape, dtype, block) | static

    def module(self, parts: Parts) -> QuantizedModule:
        group = self._group_of(parts.name)
        if group is None:
            raise parts.error(f"is in no group of {self.options.where}", "take config and weights of one model")
        if group.has_input_scale:
            _take_unused(parts, group)
        input_scale = "input_scale" if group.has_input_scale and group.activations else None
        if group.format == "pack-quantized":
            return packed_module(parts, group.bits, group.group_size, group.is_symmetric)
        if group.format == "nvfp4-pack-quantized":
            size = group.group_size or 16
            names = ("weight_packed", "weight_global_scale", "input_global_scale")
            return nvfp4_module(parts, *names, divides=True, group=size)
        if group.format == "mxfp4-pack-quantized":
            return mxfp4_module(parts, "weight_packed", "weight_scale")
        if group.bits != 8:
            raise self.options.error(f"format={group.format} with num_bits={group.bits} is not supported")
        if not group.is_float:
            size, symmetric = group.group_size, group.is_symmetric
            return integer_module(parts, size, symmetric, group.activations, input_scale)
        block = group.block if group.group_size is None else (1, group.group_size)
        return fp8_module(parts, "weight_scale", block=block, activations=group.activations, input_scale=input_scale)


def _take_unused(parts: Parts, group: _Group) -> None:
    """The scales of activations that stay as they are."""
    floats = ("F32", "F16", "BF16")
    if "input_zero_point" in parts:
        parts.take_scalar("input_zero_point", ("I8", "F8_E4M3", "I32", *floats))
    if group.activations is None and "input_scale" in parts:
        parts.take_scalar("input_scale", floats)
