"""NVIDIA ModelOpt: FP8 of tensors, NVFP4, and both in one model."""

from jaxllm.checkpoint.quantized.fp4 import nvfp4_headers, nvfp4_module
from jaxllm.checkpoint.quantized.fp8 import fp8_headers, fp8_module
from jaxllm.checkpoint.quantized.module import QuantizedModule
from jaxllm.checkpoint.quantized.options import Options, is_left_in
from jaxllm.checkpoint.quantized.scheme import Headers, Parts, Scheme

_ALGORITHMS = ("fp8", "nvfp4", "mixed_precision")


class ModelOpt(Scheme):
    """Scales multiply. Each module's tensors tell which of the two it is; `quant_algo` must agree."""

    name = "modelopt"
    kinds = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")

    def __init__(self, options: Options):
        super().__init__(options)
        self._algorithm = options.choice("quant_algo", _ALGORITHMS, None)
        self._group_size = options.integer("group_size", 16, least=1, most=2**20) or 16
        self._excluded = options.names("exclude_modules", "ignore") or ()
        layers = options.section("quantized_layers")
        self._layers: dict[str, str | None] | None = None
        if layers is not None:
            own = {name: layers.section(name) for name in layers.values}
            self._layers = {name: o and o.choice("quant_algo", _ALGORITHMS[:2], None) for name, o in own.items()}

    def says_quantized(self, name: str) -> bool | None:
        if self._layers is not None:
            return name in self._layers
        return is_left_in(self._excluded, name)

    def headers(self, name: str, shape: tuple[int, int], dtype: str) -> Headers:
        said = (self._layers or {}).get(name) or self._algorithm
        if said == "fp8":
            return fp8_headers(shape, "F32")
        if said == "nvfp4":
            return nvfp4_headers("weight", "weight_scale_2", shape, self._group_size)
        return super().headers(name, shape, dtype)

    def module(self, parts: Parts) -> QuantizedModule:
        algorithm = "nvfp4" if "weight_scale_2" in parts else "fp8"
        said = (self._layers or {}).get(parts.name) or self._algorithm
        if said not in ("mixed_precision", algorithm):
            raise parts.error(
                f"has the tensors of {algorithm}, but quant_algo is {said}", "take config and weights of one model"
            )
        if algorithm == "fp8":
            return fp8_module(parts, "weight_scale", input_scale="input_scale" if "input_scale" in parts else None)
        return nvfp4_module(parts, "weight", "weight_scale_2", "input_scale", divides=False, group=self._group_size)
