"""Writes safetensors files of bounded size in small pieces, with little memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from jaxllm.checkpoint.files import WEIGHTS, WEIGHTS_INDEX

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_ELEMENTS = 2**22  # written at a time


class _Pending(NamedTuple):
    name: str
    source: torch.Tensor
    dtype: torch.dtype  # to write it in

    @property
    def num_bytes(self) -> int:
        return self.source.numel() * self.dtype.itemsize


class ShardWriter:
    """Files in `out`, of at most `max_bytes` unless a single tensor is larger. Call `add`, then `finish`."""

    def __init__(self, out: Path, max_bytes: int, report: Callable[[int], None]):
        self._out, self._max_bytes, self._report = out, max_bytes, report
        self._pending: list[_Pending] = []
        self._pending_bytes = 0
        self._written: list[list[str]] = []  # the names in each shard
        self._num_bytes = 0
        self._dtypes: set[str] = set()

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Raises `ValueError` if safetensors has no such dtype, or if `tensor` does not fit into `dtype`."""
        if dtype not in _NAMES:
            raise ValueError(f"{name!r:.100} has dtype {dtype}, which safetensors cannot hold; take plain weights")
        pending = _Pending(name, tensor, dtype)
        if self._pending and self._pending_bytes + pending.num_bytes > self._max_bytes:
            self._flush()
        self._pending.append(pending)
        self._pending_bytes += pending.num_bytes

    def finish(self) -> dict[str, Any]:
        """Writes the rest and, for several shards, the index."""
        self._flush()
        count = len(self._written)
        files = [WEIGHTS] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for i, file in enumerate(files):
            self._part(i).rename(self._out / file)
        if count > 1:
            places = {name: file for file, names in zip(files, self._written, strict=True) for name in names}
            index = {"metadata": {"total_size": self._num_bytes}, "weight_map": dict(sorted(places.items()))}
            (self._out / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n")
        return {"files": files, "bytes": self._num_bytes, "dtypes": sorted(self._dtypes)}

    def _part(self, i: int) -> Path:
        return self._out / f"part-{i}"  # the number of shards is known only at the end

    def _flush(self) -> None:
        # Wide elements first, so that each tensor is aligned to its element size.
        tensors = sorted(self._pending, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in tensors:
            start, end = end, end + tensor.num_bytes
            shape, dtype = list(tensor.source.shape), _NAMES[tensor.dtype]
            header[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            self._dtypes.add(dtype)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with self._part(len(self._written)).open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors:
                self._write(file, tensor)
        self._written.append([tensor.name for tensor in tensors])
        self._num_bytes += end
        self._pending, self._pending_bytes = [], 0

    def _write(self, file: Any, tensor: _Pending) -> None:
        for part in tensor.source.detach().contiguous().reshape(-1).split(_ELEMENTS):
            cast = part.to(tensor.dtype)
            if cast.dtype != part.dtype and not torch.isfinite(cast).all():
                raise ValueError(
                    f"{tensor.name!r:.100} holds values that are not finite in {_NAMES[tensor.dtype]}; choose a dtype "
                    "of wider range, or download the file again"
                )
            file.write(memoryview(cast.view(torch.uint8).numpy()))
            self._report(part.nbytes)
