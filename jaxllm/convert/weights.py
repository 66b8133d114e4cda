"""Converts pickled or safetensors files to new safetensors files. Runs in the worker, the only user of torch."""

import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from jaxllm.argument_checks import a_type
from jaxllm.convert.names import EMBEDDINGS, HEAD, canonical
from jaxllm.convert.shards import ShardWriter

Report = Callable[[int], None]  # called with the number of source bytes done since the last call

OLDEST_TORCH = (2, 10)  # older ones: crafted files corrupt memory despite weights_only (CVE-2026-24747)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def convert(job: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Writes the tensors of `job["files"]` to `job["out"]`, with one source file open at a time.

    Returns {"files": [names], "bytes": n, "dtypes": [names]}. Raises `ValueError` saying which file is bad.
    """
    _check_torch()
    dtype = DTYPES.get(job["dtype"])
    writer = ShardWriter(Path(job["out"]), job["max_shard_bytes"], report)
    for name, tensor in _untied(_renamed(job, report), job["is_tied"], report):
        writer.add(name, tensor, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)
    return writer.finish()


def _check_torch() -> None:
    version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if version < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        raise ValueError(
            f"torch {torch.__version__} is older than {wanted} and unsafe on files from others; "
            f"pip install 'torch>={wanted}'"
        )


def _renamed(job: Mapping[str, Any], report: Report) -> Iterator[tuple[str, Tensor]]:
    found: dict[str, str] = {}
    for file in job["files"]:
        tensors = _read_safetensors(file) if file.endswith(".safetensors") else read_pickle(file)
        missing = sorted(set(job["index"].get(os.path.basename(file), ())) - tensors.keys())
        if missing:
            raise ValueError(f"{file} lacks {missing[0]!r:.100}, which the index places there; download it again")
        for old, tensor in tensors.items():
            name = canonical(old, job["config"])
            if name is None:
                report(tensor.nbytes)
                continue
            if name in found:
                raise ValueError(f"{name!r:.100} is in both {found[name]} and {file}; keep one")
            found[name] = file
            yield name, tensor
    if not found:
        raise ValueError(f"{job['files'][0]} holds no tensors; download it again")


def _untied(tensors: Iterator[tuple[str, Tensor]], is_tied: bool, report: Report) -> Iterator[tuple[str, Tensor]]:
    """`tensors` without an output layer that is tied to the input embeddings and equal to them."""
    head = embedding = None
    for name, tensor in tensors:
        if name == HEAD and is_tied:
            head = tensor
            continue
        if name in EMBEDDINGS:
            embedding = tensor
        yield name, tensor
    if head is None:
        return
    if embedding is None:
        yield HEAD, head
    elif embedding.shape == head.shape and embedding.dtype == head.dtype and torch.equal(embedding, head):
        report(head.nbytes)
    else:
        raise ValueError(
            f"config.json ties {HEAD} to the input embeddings, but their values differ; if the file is right, put "
            '"tie_word_embeddings": false into config.json'
        )


def _read_safetensors(file: str) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}  # mapped, not read
    except SafetensorError as error:
        raise ValueError(f"{file} is not a sound safetensors file ({error}); download it again") from error


def read_pickle(file: str) -> dict[str, Tensor]:
    """The tensors of a file of `torch.save`, mapped where the format allows. No code in it runs."""
    is_zip = _check_zip(file)
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except MemoryError:
        raise
    except Exception as error:  # the unpickler raises many kinds
        raise ValueError(_refusal(file, str(error))) from error
    if not isinstance(tensors, dict):
        raise ValueError(f"{file} holds {a_type(tensors)}, not tensors by name; take the model's state_dict")
    for name, tensor in tensors.items():
        _check_tensor(file, name, tensor)
    # A crafted view can claim more bytes than the file has. Tied tensors legitimately count twice.
    claimed, size = sum(tensor.nbytes for tensor in tensors.values()), os.path.getsize(file)
    if claimed > 2 * size:
        raise ValueError(f"{file} has {size} bytes, but its tensors claim {claimed}; it is damaged or hostile")
    return tensors


def _check_zip(file: str) -> bool:
    """Whether the file is an archive, the format since torch 1.6."""
    with open(file, "rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            return False
    try:
        with zipfile.ZipFile(file) as archive:
            is_plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
    except zipfile.BadZipFile as error:
        raise ValueError(f"{file} is truncated or damaged ({error}); download it again") from error
    if not is_plain:
        raise ValueError(f"{file} is a compressed archive, which torch.save never writes; get it from a better source")
    return True


def _refusal(file: str, reason: str) -> str:
    asked_for = re.search(r"GLOBAL ([\w.]+)", reason)
    if asked_for:
        return (
            f"{file} asks for {asked_for[1]:.100}, which is no tensor, and loading that can run code: refused. Take "
            "the model as safetensors, or its bare state_dict"
        )
    line = re.sub(r"[^ -~]", " ", reason)[:200] or "it ends too early"
    return f"{file} is not a sound file of torch.save ({line}); it may be truncated: download it again"


def _check_tensor(file: str, name: Any, tensor: Any) -> None:
    if not isinstance(name, str) or type(tensor) not in (Tensor, torch.nn.Parameter):
        raise ValueError(
            f"{file}: {name!r:.100} is {a_type(tensor)}; only named tensors are converted, not whole "
            "training states: save the model's state_dict alone"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise ValueError(f"{file}: {name!r:.100} is sparse, quantised or empty; take the model's plain weights")
