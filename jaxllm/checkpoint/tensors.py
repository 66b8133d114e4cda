"""The tensors of a checkpoint: where they lie in its files, and how they are read, in parallel.

Those of safetensors are found here, those of GGUF files in `jaxllm.checkpoint.gguf`.
"""

import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxllm.checkpoint.explain import no_weights
from jaxllm.checkpoint.files import WEIGHTS, WEIGHTS_INDEX, check_no_pointer, read_json, shard_path
from jaxllm.checkpoint.gguf.blocks import BLOCKS
from jaxllm.errors import ModelFormatError

FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
DTYPES = (*FLOATS, *(name for name in BLOCKS if name not in FLOATS))  # of which tensors can be loaded
# What else the tensors of quantised modules are made of.
CODES = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "I64": np.dtype("<i8"),
}
_READ_BYTES = 2**24


class StoredTensor(NamedTuple):
    """The location of a tensor in a file, and how its values are stored there."""

    file: Path
    name: str  # in the file
    dtype: str  # "BF16", or the name of blocks of quantised values: "Q4_1"
    shape: tuple[int, ...]
    offset: int  # bytes from the file's start
    is_interleaved: bool = False  # whether the rows of a head that rope turns as a pair lie beside each other
    shift: float = 0.0  # to be added to each value
    data: Any = None  # what reads it where it lies in memory, by `read(start, num_bytes)`; None: it lies in the file
    # Of a part that lies in pieces: so many, so many bytes from each to the next, the outermost first.
    steps: tuple[tuple[int, int], ...] = ()
    is_part: bool = False  # whether it is less than what the file calls so

    @property
    def is_plain(self) -> bool:
        """Whether the bytes are the values, in their places."""
        return self.dtype in FLOATS and not self.is_interleaved and not self.shift

    @property
    def num_bytes(self) -> int:
        """Size in the file of a tensor whose dtype is in `DTYPES` or `CODES`."""
        return _num_bytes(self.dtype, math.prod(self.shape))

    @property
    def row_bytes(self) -> int:
        """Size of what is at one index of the first axis."""
        return _num_bytes(self.dtype, math.prod(self.shape[1:]))

    @property
    def piece_bytes(self) -> int:
        """Size of what lies together in the file."""
        return self.num_bytes // math.prod(count for count, _ in self.steps)

    def window(self, sizes: Sequence[int], box: Sequence[slice], shape: tuple[int, ...]) -> "StoredTensor":
        """The part `box` of a tensor in one piece, which gets this `shape`; the axes in both are the tensor's, or those
        that its axes are made of, with these `sizes`. A part of blocks must be of whole ones."""
        lengths = [part.stop - part.start for part in box]
        cut = [i for i, (length, size) in enumerate(zip(lengths, sizes, strict=True)) if length < size]
        if not cut:
            return self._replace(shape=shape)
        assert not self.steps, "a part of a part"
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        start = sum(part.start * stride for part, stride in zip(box, strides, strict=True))
        steps: list[tuple[int, int]] = []
        for length, stride in zip(lengths[: cut[-1]], strides, strict=False):
            if steps and steps[-1][1] == length * stride:
                steps[-1] = (steps[-1][0] * length, stride)
            elif length != 1:
                steps.append((length, stride))
        offset = self.offset + _num_bytes(self.dtype, start)
        in_bytes = tuple((count, _num_bytes(self.dtype, stride)) for count, stride in steps)
        return self._replace(shape=shape, offset=offset, steps=in_bytes, is_part=True)

    def cut(self, *box: slice) -> "StoredTensor":
        """The part of it at these indices, from and to which are given, of each axis."""
        shape = tuple(part.stop - part.start for part in box)
        return self.window(self.shape, box, shape)

    def not_finite(self, dtype: np.dtype) -> ModelFormatError:
        """The error of values that are not, as those of this dtype."""
        return ModelFormatError(
            f"{self.file}: {self.name} holds values that are not finite in {dtype}; download the file again, or choose "
            "a dtype of wider range"
        )

    def unreadable(self, reason: str) -> ModelFormatError:
        return ModelFormatError(f"{self.file} cannot be read ({reason}); check the disk")

    def shorter(self) -> ModelFormatError:
        """The error of a file that ends before its tensor does."""
        return ModelFormatError(f"{self.file} became shorter while it was read; download it again")


def _num_bytes(dtype: str, num_values: int) -> int:
    if dtype in CODES:
        return num_values * CODES[dtype].itemsize
    return num_values // BLOCKS[dtype].num_values * BLOCKS[dtype].num_bytes


def find_tensors(model_dir: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, by name, from the file headers; no data is read. Raises `ModelFormatError`."""
    found: dict[str, StoredTensor] = {}
    for file in _files(model_dir):
        for name, tensor in _read_header(file).items():
            if name in found:
                raise ModelFormatError(f"{name!r} is in both {found[name].file} and {file}; keep one")
            found[name] = tensor
    return found


def has_tensors(model_dir: Path) -> bool:
    """Whether all files that hold the checkpoint's tensors are there."""
    if not any((model_dir / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX)):
        return False
    return all(file.is_file() for file in _files(model_dir))


def _files(model_dir: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint."""
    if (model_dir / WEIGHTS).is_file():
        return [model_dir / WEIGHTS]
    index = model_dir / WEIGHTS_INDEX
    if not index.is_file():
        raise no_weights(model_dir)
    names = read_json(index, max_bytes=100_000_000).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelFormatError(f"{index}: weight_map must map tensors to files; download the index again")
    return [shard_path(index, name) for name in sorted(set(map(str, names.values())))]


def _read_header(file: Path) -> dict[str, StoredTensor]:
    check_no_pointer(file)
    try:
        with safe_open(file, framework="np"):
            pass  # opening checks sizes, shapes and offsets against the file
        with file.open("rb") as stream:
            num_bytes = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(num_bytes))
        header.pop("__metadata__", None)
        start = 8 + num_bytes
        return {
            name: StoredTensor(file, name, info["dtype"], tuple(info["shape"]), start + info["data_offsets"][0])
            for name, info in header.items()
        }
    except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelFormatError(
            f"{file} is not a sound safetensors file ({error}); it may be truncated: download it again"
        ) from error


def read(tensor: StoredTensor, memory: np.ndarray, pool: Executor) -> np.ndarray:
    """Reads the tensor's bytes, uint8 `[num_bytes]`, with all threads of `pool` into the start of `memory`.

    The file is not mapped, because mapped pages count as this process's memory.
    """
    data = memory[: tensor.num_bytes]
    if tensor.data is not None:
        data[:] = _in_memory(tensor)
        return data
    starts = range(0, len(data), _READ_BYTES)
    parts = [data[start : start + _READ_BYTES] for start in starts]
    try:
        complete = all(pool.map(partial(_read_into, tensor), starts, parts))
    except OSError as error:
        raise tensor.unreadable(str(error)) from error
    if not complete:
        raise tensor.shorter()
    return data


def read_bytes(tensor: StoredTensor) -> np.ndarray:
    """The tensor's bytes, uint8 `[num_bytes]`, read by this thread."""
    if tensor.data is not None:
        return _in_memory(tensor)
    data = np.empty(tensor.num_bytes, np.uint8)
    try:
        complete = _read_into(tensor, 0, data)
    except OSError as error:
        raise tensor.unreadable(str(error)) from error
    if not complete:
        raise tensor.shorter()
    return data


def read_array(tensor: StoredTensor) -> np.ndarray:
    """The tensor, whose dtype is in `FLOATS` or `CODES`, as an array of that dtype."""
    return read_bytes(tensor).view((FLOATS | CODES)[tensor.dtype]).reshape(tensor.shape)


def _read_into(tensor: StoredTensor, start: int, part: np.ndarray) -> bool:
    """Of the tensor's bytes those from `start` on. False if the file ends before."""
    with tensor.file.open("rb", buffering=0) as file:
        for offset, piece in _pieces(tensor, start, part):
            file.seek(offset)
            left = piece.data
            while left and (num_bytes := file.readinto(left)):
                left = left[num_bytes:]
            if left:
                return False
    return True


def _in_memory(tensor: StoredTensor) -> np.ndarray:
    span = tensor.piece_bytes + sum((count - 1) * step for count, step in tensor.steps)
    data = tensor.data.read(tensor.offset, span)
    if not tensor.steps:
        return data
    found = np.empty(tensor.num_bytes, np.uint8)
    for offset, piece in _pieces(tensor, 0, found):
        piece[:] = data[offset - tensor.offset :][: len(piece)]
    return found


def _pieces(tensor: StoredTensor, start: int, part: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Where in the file the tensor's bytes from `start` on lie, and which bytes of `part` they are."""
    size, at = tensor.piece_bytes, 0
    while at < len(part):
        piece, offset = divmod(start + at, size)
        end = min(len(part), at + size - offset)
        offset += tensor.offset
        for count, step in reversed(tensor.steps):
            piece, i = divmod(piece, count)
            offset += i * step
        yield offset, part[at:end]
        at = end
