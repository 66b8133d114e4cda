"""Reads the header of GGUF files, which may be hostile: every length and count is checked before memory is taken."""

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxllm.checkpoint.files import GGUF_PART, check_no_pointer, gguf_parts
from jaxllm.checkpoint.gguf.blocks import BLOCKS, TYPE_NAMES
from jaxllm.checkpoint.gguf.metadata import Metadata
from jaxllm.checkpoint.tensors import StoredTensor
from jaxllm.errors import ModelFormatError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 2**28  # the largest vocabularies take some 20 MB
_MAX_STRINGS = 2**22  # of an array: an object each
_MAX_KEYS = 2**16
_MAX_DIMS = 4
_FLOAT, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}


def read_gguf(file: Path) -> tuple[Metadata, dict[str, StoredTensor]]:
    """Metadata and tensors, by their names in the file, of a model in one GGUF file or several, of which `file` is the
    first. No tensor's data is read. Raises `ModelFormatError`."""
    parts = find_parts(file)
    headers = [_read_part(part) for part in parts]
    metadata = headers[0][0]
    tensors: dict[str, StoredTensor] = {}
    for _, found in headers:
        for name, tensor in found.items():
            if name in tensors:
                raise ModelFormatError(f"{tensor.file}: the tensor {name!r:.100} is there twice; download it again")
            tensors[name] = tensor
    count = metadata.integer("split.count", 1) or 1
    if count != len(parts):
        raise metadata.error("split.count", f"does not fit the file's name, which makes it {len(parts)}")
    total = metadata.integer("split.tensors.count", len(tensors)) if len(parts) > 1 else len(tensors)
    if total != len(tensors):
        raise metadata.error("split.tensors.count", f"but the {len(parts)} parts hold {len(tensors)} tensors")
    return metadata, tensors


def find_parts(file: Path) -> list[Path]:
    """The files of the model that `file` is, or is the first part of. Raises `ModelFormatError` for a missing one."""
    names = gguf_parts(file.name)
    for name in names:
        if not file.with_name(name).is_file():
            raise ModelFormatError(f"{file.with_name(name)} is missing, or not a file; download it")
    return [file.with_name(name) for name in names]


def models_in(directory: Path) -> list[Path]:
    """The GGUF files in a directory; of one in parts the first."""
    files = sorted(file for file in directory.glob("*.gguf") if file.is_file())
    numbers = [(file, GGUF_PART.fullmatch(file.name)) for file in files]
    return [file for file, match in numbers if match is None or int(match["number"]) == 1]


def _read_part(file: Path) -> tuple[Metadata, dict[str, StoredTensor]]:
    try:
        with file.open("rb") as stream:
            return _FileHeader(file, stream).read()
    except OSError as error:
        raise ModelFormatError(f"{file} cannot be read ({error}); check its permissions") from error


class _FileHeader:
    """The header of one open file."""

    def __init__(self, file: Path, stream: BinaryIO):
        self._file, self._stream = file, stream
        self._file_bytes = file.stat().st_size
        self._left = min(self._file_bytes, _MAX_HEADER_BYTES)

    def read(self) -> tuple[Metadata, dict[str, StoredTensor]]:
        check_no_pointer(self._file)
        if self._take(4, "the magic number") != _MAGIC:
            raise self._error("it does not begin with GGUF")
        version = self._integer("<I", "version")
        if version not in _VERSIONS:
            what = "is big-endian" if version in (v << 24 for v in _VERSIONS) else f"has version {version}"
            raise self._error(f"it {what}; little-endian versions {_VERSIONS} are read: convert the model again")
        num_tensors, num_keys = self._integer("<Q", "tensor count"), self._integer("<Q", "key count")
        self._check_count("the number of keys", num_keys, 13, _MAX_KEYS)
        values: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a key")
            if key in values:
                raise self._error(f"the key {key!r:.100} is there twice")
            values[key] = self._value(self._integer("<I", key), key)
        metadata = Metadata(self._file, values)
        self._check_count("the number of tensors", num_tensors, 32, _MAX_HEADER_BYTES)
        infos = [self._tensor() for _ in range(num_tensors)]
        start = self._data_start(metadata)
        tensors = {info.name: self._placed(info, start) for info in infos}
        if len(tensors) < num_tensors:
            raise self._error("two tensors have one name")
        self._check_apart(sorted(tensors.values(), key=lambda tensor: tensor.offset))
        return metadata, tensors

    def _tensor(self) -> StoredTensor:
        """As the header describes it, with the offset in the data."""
        name = self._string("a tensor's name")
        num_dims = self._integer("<I", name)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"the tensor {name!r:.100} has {num_dims} dimensions, not 1 to {_MAX_DIMS}")
        shape = tuple(self._integer("<Q", name) for _ in range(num_dims))[::-1]  # the fastest comes first
        kind, offset = self._integer("<I", name), self._integer("<Q", name)
        dtype = TYPE_NAMES.get(kind, f"number {kind}")
        if dtype not in BLOCKS:
            raise ModelFormatError(
                f"{self._file}: the tensor {name!r:.100} has type {dtype}, which is not supported; take a file with "
                f"{', '.join(BLOCKS)}"
            )
        unit = BLOCKS[dtype].num_values
        if shape[-1] % unit or 0 in shape or unit > 1 and num_dims == 1:
            rows = f"{dtype} has rows of blocks of {unit}"
            raise self._error(f"the tensor {name!r:.100} has shape {list(shape)}, but {rows}")
        return StoredTensor(self._file, name, dtype, shape, offset)

    def _placed(self, info: StoredTensor, start: int) -> StoredTensor:
        """The tensor with its offset from the file's start."""
        if start + info.offset + info.num_bytes > self._file_bytes:
            raise self._error(
                f"the tensor {info.name!r:.100} {list(info.shape)} {info.dtype} at offset {info.offset} ends behind "
                "the file's end"
            )
        return info._replace(offset=start + info.offset)

    def _check_apart(self, in_order: list[StoredTensor]) -> None:
        for one, after in pairwise(in_order):
            if one.offset + one.num_bytes > after.offset:
                raise self._error(f"the tensors {one.name!r:.100} and {after.name!r:.100} overlap")

    def _data_start(self, metadata: Metadata) -> int:
        alignment = metadata.integer("general.alignment", 32)
        if not (1 <= alignment <= 2**20 and alignment & (alignment - 1) == 0):
            raise metadata.error("general.alignment", f"must be a power of two up to {2**20}")
        return -(-self._stream.tell() // alignment) * alignment

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        value = self._numbers(kind, 1, key)[0]
        if kind == _FLOAT:  # as the shortest decimal number that is this float32: 1e-05 for 9.99999974e-06
            return float(str(value))
        return value.item()

    def _array(self, key: str) -> list[str] | np.ndarray:
        kind, count = self._integer("<I", key), self._integer("<Q", key)
        if kind == _ARRAY:
            raise self._error(f"{key} is an array of arrays, which no model has")
        if kind == _STRING:
            self._check_count(f"the length of {key}", count, 8, _MAX_STRINGS)
            return [self._string(key) for _ in range(count)]
        return self._numbers(kind, count, key)

    def _numbers(self, kind: int, count: int, key: str) -> np.ndarray:
        if kind not in _SCALARS:
            raise self._error(f"{key!r:.100} has a value of the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        self._check_count(f"the length of {key}", count, dtype.itemsize, _MAX_HEADER_BYTES)
        data = self._take(count * dtype.itemsize, key)
        if kind == _BOOL and data.strip(b"\0\1"):
            raise self._error(f"{key!r:.100} has a boolean that is neither 0 nor 1")
        return np.frombuffer(data, dtype)

    def _string(self, what: str) -> str:
        data = self._take(self._integer("<Q", what), what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what!r:.100} holds {data[:40]!r}, which is not UTF-8 ({error.reason})") from error

    def _integer(self, form: str, what: str) -> int:
        return struct.unpack(form, self._take(struct.calcsize(form), what))[0]

    def _check_count(self, what: str, count: int, least_bytes: int, most: int) -> None:
        """Each of them takes at least `least_bytes`."""
        if count > most or count * least_bytes > self._left:
            raise self._error(f"{what:.100} is {count}, more than the {self._left} bytes left of its header can hold")

    def _take(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > self._left:
            raise self._error(f"{what!r:.100} takes {num_bytes} bytes, but {self._left} are left of its header")
        self._left -= num_bytes
        data = self._stream.read(num_bytes)
        if len(data) < num_bytes:
            raise self._error("it became shorter while it was read")
        return data

    def _error(self, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self._file} is not a sound GGUF file: {what}; download it again")
