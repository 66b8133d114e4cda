"""Converts a Hugging Face directory to one that the loader reads."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxllm.checkpoint.explain import not_a_checkpoint
from jaxllm.checkpoint.files import WEIGHTS, WEIGHTS_INDEX, is_gguf, read_json, shard_path
from jaxllm.checkpoint.tensors import find_tensors
from jaxllm.checkpoint.writing import check_is_new, whole_directory
from jaxllm.convert.names import canonical, is_tied
from jaxllm.convert.process import require, run
from jaxllm.convert.slow_tokenizer import write_tokenizer
from jaxllm.errors import ModelFormatError
from jaxllm.progress import disabled

_PICKLE, _PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_MAX_INDEX_BYTES = 100_000_000


def convert(
    src: Path, out: Path, *, dtype: str = "auto", max_shard_bytes: int = 5 * 10**9, quantization: str | None = None
) -> str:
    """Writes the model directory `src` to `out`: safetensors, `tokenizer.json`, configuration. Returns a summary.

    `out` appears when it is complete. `dtype` is the weights' new dtype, "auto" keeps it; `quantization` ("int8",
    "int4" or "fp8") what the products of its layers become, in the format of compressed-tensors. Raises `ValueError`
    for unusable directories, `ModelFormatError` for damaged or hostile files, and `JaxLLMError` if a package is
    missing or the worker died.
    """
    _check_directories(src, out)
    hf = read_json(src / _CONFIG)
    weights, index = _find_weights(src)
    with whole_directory(out) as folder:
        tokenizer = write_tokenizer(src, folder, hf)
        if quantization is not None:
            written = _quantize(src, folder, weights, quantization, dtype, max_shard_bytes)
        elif _is_ready(src, hf, weights, dtype):
            written = _link(src, folder, weights)
        else:
            written = _rewrite(folder, hf, weights, index, dtype, max_shard_bytes)
        find_tensors(folder)  # raises if they are not sound
        _copy_config(src, folder, hf, dtype, has_config=quantization is not None)
    return f"wrote {out}: {written}, {tokenizer}"


def _check_directories(src: Path, out: Path) -> None:
    if is_gguf(src) and src.is_file():
        raise ValueError(f"{src} is a GGUF file, which needs no conversion: give it as the model, --model {src}")
    if not (src / _CONFIG).is_file():
        raise not_a_checkpoint(src)
    if out.exists() and out.samefile(src):
        raise ValueError(f"{out} is the source itself; give another directory to write to")
    check_is_new(out)


def _find_weights(src: Path) -> tuple[list[Path], dict[str, list[str]]]:
    """The files with weights, and the tensors that the index places in each."""
    if (src / WEIGHTS).is_file() or (src / WEIGHTS_INDEX).is_file():
        return sorted({tensor.file for tensor in find_tensors(src).values()}), {}
    if (src / _PICKLE).is_file():
        return [src / _PICKLE], {}
    path = src / _PICKLE_INDEX
    if not path.is_file():
        raise ModelFormatError(f"{src} has neither {WEIGHTS} nor {_PICKLE}, nor an index of either; download them")
    places = read_json(path, max_bytes=_MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelFormatError(f"{path}: weight_map must map tensors to files; download the index again")
    index: dict[str, list[str]] = {}
    for name, file in places.items():
        index.setdefault(str(file), []).append(name)
    return [shard_path(path, file) for file in sorted(index)], index


def _is_ready(src: Path, hf: Mapping[str, Any], weights: list[Path], dtype: str) -> bool:
    if dtype != "auto" or weights[0].suffix == ".bin":
        return False
    return all(canonical(name, hf) in (name, None) for name in find_tensors(src))


def _link(src: Path, folder: Path, weights: list[Path]) -> str:
    index = [src / WEIGHTS_INDEX] if not (src / WEIGHTS).is_file() else []
    for file in (*weights, *index):
        try:
            os.link(file.resolve(), folder / file.name)
        except OSError:  # another file system, or no support for links
            shutil.copyfile(file, folder / file.name)
    return f"{_size(sum(file.stat().st_size for file in weights))} of weights, unchanged"


def _rewrite(
    folder: Path,
    hf: Mapping[str, Any],
    weights: list[Path],
    index: dict[str, list[str]],
    dtype: str,
    max_shard_bytes: int,
) -> str:
    require("torch")
    total = sum(file.stat().st_size for file in weights)
    job = {
        "task": "weights",
        "files": [str(file.absolute()) for file in weights],
        "index": index,
        "dtype": dtype,
        "config": {key: hf.get(key) for key in ("architectures",)},
        "is_tied": is_tied(hf),
        "out": str(folder.absolute()),
        "max_shard_bytes": max_shard_bytes,
    }
    with tqdm(total=total, desc="converting", unit="B", unit_scale=True, disable=disabled(), leave=False) as bar:
        # Tensors that share memory in the source are written and counted more than once.
        result = run(job, lambda count: bar.update(min(count, total - bar.n)))
    num_files = len(result["files"])
    return (
        f"{_size(result['bytes'])} of weights ({', '.join(result['dtypes'])}) in {num_files} "
        f"file{'s' if num_files > 1 else ''}"
    )


def _quantize(src: Path, folder: Path, weights: list[Path], name: str, dtype: str, max_shard_bytes: int) -> str:
    if weights[0].suffix == ".bin":
        raise ValueError(f"{src} has pickled weights; convert it without quantization first, and then what comes out")
    from jaxllm.checkpoint.quantized.write import write_quantized  # imports jax, which nothing else here needs

    return write_quantized(src, folder, name, dtype=dtype, max_shard_bytes=max_shard_bytes)


def _copy_config(src: Path, folder: Path, hf: Mapping[str, Any], dtype: str, *, has_config: bool) -> None:
    if (src / _GENERATION).is_file():
        shutil.copyfile(src / _GENERATION, folder / _GENERATION)
    if has_config:
        return
    if dtype == "auto":
        shutil.copyfile(src / _CONFIG, folder / _CONFIG)
        return
    stored = {key: dtype for key in ("torch_dtype", "dtype") if key in hf}
    (folder / _CONFIG).write_text(json.dumps({**hf, **stored}, indent=2) + "\n", encoding="utf-8")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
