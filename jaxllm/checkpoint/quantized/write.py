"""Writes the products of a model's layers quantised, as compressed-tensors does, which other engines read too."""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from jaxllm.checkpoint.config import read_spec
from jaxllm.checkpoint.formats import HuggingFaceDirectory
from jaxllm.checkpoint.quantized.make import quantize_model
from jaxllm.checkpoint.quantized.quantize import form_of, quantize
from jaxllm.checkpoint.tensors import FLOATS, StoredTensor, find_tensors, read
from jaxllm.checkpoint.weights_table import weights_table
from jaxllm.checkpoint.writing import FileShards
from jaxllm.errors import ModelFormatError
from jaxllm.models import transformer
from jaxllm.models.quantized import QuantizedLinear, WeightForm
from jaxllm.progress import disabled

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write_quantized(src: Path, folder: Path, name: str, *, dtype: str, max_shard_bytes: int) -> str:
    """Writes the weights of the directory `src` to `folder`, in the form that `--quantization` calls `name`, and its
    configuration. `dtype` is that of the others ("auto": as stored). Returns a summary.

    `ModelFormatError` for weights that can't be quantised: they are already, or no product of a known family.
    """
    checkpoint = HuggingFaceDirectory(src)
    hf = checkpoint.config()
    if found := [key for key in ("quantization_config", "compression_config", "quantization") if hf.get(key)]:
        raise ModelFormatError(f"{checkpoint.config_path} has {found[0]}: the weights are quantised already")
    stored = find_tensors(src)
    names = _products(checkpoint, name, stored)
    if stacked := [one for one in names if one in stored and len(stored[one].shape) != 2]:
        raise ModelFormatError(
            f"{src}: {min(stacked)} stacks the weights of several experts; those are quantised as they load "
            f"(--quantization {name}), but written only from a checkpoint with a tensor for each"
        )
    if missing := sorted(names - stored.keys()):
        raise ModelFormatError(f"{src} has no tensor {missing[0]}, which its configuration implies")
    group = math.gcd(*(stored[one].shape[1] for one in names))
    form = form_of(name, group)
    writer = FileShards(folder, max_shard_bytes)
    total = sum(tensor.num_bytes for tensor in stored.values())
    with (
        ThreadPoolExecutor(8) as pool,
        tqdm(total=total, desc="quantising", unit="B", unit_scale=True, disable=disabled(), leave=False) as bar,
    ):
        for one, tensor in stored.items():
            values = _values(tensor, pool)
            if one in names:
                writer.add_all(_quantized(one.removesuffix(".weight"), values, form, tensor))
            else:
                writer.add_all([(one, values if dtype == "auto" else values.astype(FLOATS[_DTYPES[dtype]]))])
            bar.update(tensor.num_bytes)
    num_bytes, num_files = writer.finish()
    config = hf | {"quantization_config": _description(form, _left_dense(stored, names))}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    files = f"{num_files} file{'s' if num_files > 1 else ''}"
    return f"{num_bytes / 1e9:.2f} GB of weights in {files}, {len(names)} of them {name}"


def _products(checkpoint: HuggingFaceDirectory, name: str, stored: Collection[str]) -> set[str]:
    """The tensors of products that are quantised."""
    spec = read_spec(checkpoint, jnp.float32)
    model = transformer.abstract(spec.module.Model, spec.cfg)
    quantize_model(model, "int8" if name == "int4" else name)  # whose groups are another matter in files
    nodes = {".".join(map(str, path)): node for path, node in nnx.iter_graph(model)}
    paths = {f"{path}.weight" for path, node in nodes.items() if isinstance(node, QuantizedLinear)}
    table = weights_table(spec, stored)
    return {tensor for tensor, pieces in table.items() if all(piece.path in paths for piece in pieces)}


def _values(tensor: StoredTensor, pool: ThreadPoolExecutor) -> np.ndarray:
    if tensor.dtype not in FLOATS:
        raise ModelFormatError(f"{tensor.file}: {tensor.name} has dtype {tensor.dtype}; take the unquantised model")
    data = read(tensor, np.empty(tensor.num_bytes, np.uint8), pool)
    return data.view(FLOATS[tensor.dtype]).reshape(tensor.shape)


def _quantized(
    module: str, values: np.ndarray, form: WeightForm, tensor: StoredTensor
) -> Iterator[tuple[str, np.ndarray]]:
    try:
        weight = quantize(values, form)
    except ValueError as error:
        raise ModelFormatError(f"{tensor.file}: {tensor.name}: {error}") from error
    scales = np.asarray(weight.scales)
    yield f"{module}.weight_scale", scales.reshape(len(scales), -1)
    if form.codes == "float8_e4m3fn":
        yield f"{module}.weight", weight.codes
        return
    bits = jnp.iinfo(form.codes).bits
    codes = (weight.codes.astype(np.int32) + 2 ** (bits - 1)).astype(np.uint32)
    yield f"{module}.weight_packed", _packed(codes, bits)
    yield f"{module}.weight_shape", np.array(values.shape, np.int64)


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Words of 32 bits along the inputs, the first code lowest; the last word is filled with zeros."""
    count = 32 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % count))).reshape(len(codes), -1, count)
    words = np.zeros(codes.shape[:2], np.uint32)
    for i in range(count):
        words |= codes[..., i] << np.uint32(bits * i)
    return words.view(np.int32)


def _left_dense(stored: Mapping[str, StoredTensor], names: Collection[str]) -> list[str]:
    """The products of layers that stay as they are: those of routers."""
    matrices = [name for name, tensor in stored.items() if len(tensor.shape) == 2 and name.endswith(".weight")]
    return [name.removesuffix(".weight") for name in matrices if ".layers." in name and name not in names]


def _description(form: WeightForm, left_dense: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of such products."""
    is_float = form.codes == "float8_e4m3fn"
    weights = {
        "num_bits": 8 if is_float else int(jnp.iinfo(form.codes).bits),
        "type": "float" if is_float else "int",
        "symmetric": True,
        "strategy": "channel" if form.group is None else "group",
        "group_size": form.group,
        "dynamic": False,
    }
    rows = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    kind = "float-quantized" if is_float else "pack-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows if is_float else None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head", *left_dense],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group | {"output_activations": None, "format": kind}},
    }
