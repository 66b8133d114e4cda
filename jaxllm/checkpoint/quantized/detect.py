"""Tells which quantised format a checkpoint has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.checkpoint.files import read_json
from jaxllm.checkpoint.formats import Checkpoint
from jaxllm.checkpoint.quantized.awq import Awq
from jaxllm.checkpoint.quantized.bitsandbytes import BitsAndBytes
from jaxllm.checkpoint.quantized.compressed_tensors import CompressedTensors
from jaxllm.checkpoint.quantized.fp8 import Fp8
from jaxllm.checkpoint.quantized.gptq import Gptq
from jaxllm.checkpoint.quantized.mlx import Mlx
from jaxllm.checkpoint.quantized.modelopt import ModelOpt
from jaxllm.checkpoint.quantized.mxfp4 import Mxfp4
from jaxllm.checkpoint.quantized.options import Options
from jaxllm.checkpoint.quantized.scheme import Scheme

_METHODS: Mapping[str, type[Scheme]] = {
    "awq": Awq,
    "gptq": Gptq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "sparseml": CompressedTensors,
    "fp8": Fp8,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
    "mxfp4": Mxfp4,
}
_GPTQ_FILE, _MODELOPT_FILE = "quantize_config.json", "hf_quant_config.json"
_WHY_NOT = {"torchao": "whose files describe classes of torch"}


def scheme_of(checkpoint: Checkpoint, hf: Mapping[str, Any]) -> Scheme | None:
    """The format of a checkpoint by its configuration `hf`, or by a file beside it; None if it is not quantised, and
    for GGUF files. ModelFormatError, by its name, for one that is not supported."""
    where, config = str(checkpoint.config_path), Options(str(checkpoint.config_path), hf)
    mlx = config.section("quantization")
    if mlx is not None and hf.get("quantization_config") in (None, mlx.values):
        return Mlx(mlx)
    for key in ("quantization_config", "compression_config"):
        if (found := config.section(key)) is not None:
            return _scheme(checkpoint, found, "compressed-tensors" if key == "compression_config" else None)
    if (file := _beside(checkpoint, _GPTQ_FILE)) is not None:
        return _scheme(checkpoint, Options(str(file), read_json(file)), "gptq")
    if (file := _beside(checkpoint, _MODELOPT_FILE)) is not None:
        return ModelOpt(_modelopt_options(checkpoint, Options(where, {})))
    return None


def _beside(checkpoint: Checkpoint, name: str) -> Path | None:
    file = checkpoint.path / name
    return file if checkpoint.path.is_dir() and file.is_file() else None


def _scheme(checkpoint: Checkpoint, options: Options, default: str | None) -> Scheme:
    method = options.values.get("quant_method") or default or _unnamed(options)
    if not isinstance(method, str):
        raise options.error(f"it has no quant_method that is a name, but {method!r:.100}")
    if (kind := _METHODS.get(method.lower())) is None:
        reason = f" ({_WHY_NOT[method]})" if method in _WHY_NOT else ""
        raise options.error(
            f"the weights are quantised by {method[:50]}{reason}, which is not supported",
            f"take them in one of {', '.join(_METHODS)}, or the original weights, or a GGUF file of the model",
        )
    return kind(_modelopt_options(checkpoint, options) if kind is ModelOpt else options)


def _unnamed(options: Options) -> str | None:
    """The method of older configurations, which do not name it."""
    if options.values.get("load_in_8bit") or options.values.get("load_in_4bit"):
        return "bitsandbytes"
    return "modelopt" if "quant_algo" in options.values else None


def _modelopt_options(checkpoint: Checkpoint, options: Options) -> Options:
    """Those under "quantization", here or in the file beside the configuration."""
    inner = options.section("quantization")
    if inner is None and "quant_algo" not in options.values:
        if (file := _beside(checkpoint, _MODELOPT_FILE)) is not None:
            options = Options(str(file), read_json(file))
            inner = options.section("quantization")
    return options if inner is None else inner
