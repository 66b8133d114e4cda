"""Commands in a file, for bug reports and tests: a header, then a frame for each call of `apply`, with arrays by their
bytes, and one for its results' digests. Nothing in a file is run or unpickled, and nothing is read past its size."""

import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from io import BufferedIOBase
from typing import Any

import numpy as np

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.command_codec import array_bytes, describe, parse
from jaxllm.engine.device.commands import Command
from jaxllm.engine.schedule.cache_groups import CacheGroup

MAGIC = b"jaxllm commands 2\n"
MAX_DESCRIPTION_BYTES = 4 << 20  # of a frame, beside its arrays
_FRAME = struct.Struct("<cIIQ")  # kind, checksum of the rest, bytes of the description (JSON), bytes of the arrays
_HEADER, _COMMANDS, _RESULTS, _FAILURE = b"H", b"C", b"R", b"F"


@dataclass(frozen=True, kw_only=True)
class Header:
    """What an executor like the recorded one is made of."""

    jaxllm: str  # versions
    jax: str
    platform: str
    model: str  # its directory or file; "" for a model that the program brought
    config_digest: str  # of its configuration; "" if there is none
    params_digest: str  # of the parameters' names, shapes and dtypes
    dtype: str
    mesh: str  # as `make_mesh` takes it
    config: EngineConfig

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, fields: Any) -> "Header":
        """ValueError for what is no header."""
        names = cls.__dataclass_fields__.keys()
        if not isinstance(fields, dict) or fields.keys() != names or not isinstance(fields["config"], dict):
            raise ValueError(f"the header does not say {', '.join(names)}")
        texts = {name: value for name, value in fields.items() if name != "config"}
        if any(not isinstance(value, str) for value in texts.values()):
            raise ValueError("the header's fields are not all texts")
        try:
            groups = tuple(CacheGroup(*group) for group in fields["config"]["groups"])
            sizes: dict[str, Any] = {**fields["config"], "groups": groups}
            return cls(**texts, config=EngineConfig(**sizes))
        except (TypeError, KeyError) as error:
            raise ValueError(f"the header's config is not one of this version: {error}") from error


@dataclass(frozen=True)
class Applied:
    """Commands of one call of `apply`."""

    commands: list[Command]


@dataclass(frozen=True)
class FailedCall:
    """The call before raised."""

    error: str


@dataclass(frozen=True)
class CallResults:
    """What came of a call, counted from 0: a digest for each array that the host got."""

    call: int
    digests: list[str]


Frame = Applied | FailedCall | CallResults


def digest(result: np.ndarray) -> str:
    """Of an array's bytes."""
    return blake2b(result.tobytes(), digest_size=8).hexdigest()


def header_frame(header: Header) -> bytes:
    """What a file begins with."""
    return MAGIC + _frame(_HEADER, header.to_json())


def frame_bytes(frame: Frame) -> bytes:
    """A frame as it is in a file."""
    match frame:
        case Applied(commands):
            return _frame(_COMMANDS, describe(commands), b"".join(array_bytes(commands)))
        case FailedCall(error):
            return _frame(_FAILURE, error)
        case CallResults(call, digests):
            return _frame(_RESULTS, [call, digests])


def _frame(kind: bytes, described: Any, arrays: bytes = b"") -> bytes:
    text = json.dumps(described).encode()
    assert len(text) <= MAX_DESCRIPTION_BYTES
    checksum = zlib.crc32(arrays, zlib.crc32(text))
    return _FRAME.pack(kind, checksum, len(text), len(arrays)) + text + arrays


class CommandLog:
    """A file of recorded commands, open for reading. ValueError if it is none, is cut off or damaged."""

    def __init__(self, file: BufferedIOBase):
        self._file, self._size = file, file.seek(0, os.SEEK_END)
        file.seek(0)
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError("this is no file of recorded commands, or one of another version")
        kind, described, arrays = self._read("header")
        if kind != _HEADER or arrays:
            raise ValueError("the file does not begin with a header")
        self.header = Header.of_json(described)

    def frames(self) -> Iterator[Frame]:
        """One after the other. ValueError at the first that can't be read, when it comes."""
        number = 0
        while self._file.tell() < self._size:
            number += 1
            kind, described, arrays = self._read(f"frame {number}")
            try:
                yield _parse(kind, described, arrays)
            except (ValueError, TypeError, OverflowError) as error:
                raise ValueError(f"frame {number} can't be read: {error}") from error

    def _read(self, name: str) -> tuple[bytes, Any, bytes]:
        """Kind, description and arrays of the next frame."""
        kind, checksum, text_size, arrays_size = _FRAME.unpack(self._take(_FRAME.size, name))
        if text_size > MAX_DESCRIPTION_BYTES:
            raise ValueError(f"{name} is described in {text_size} bytes; at most {MAX_DESCRIPTION_BYTES} are read")
        text, arrays = self._take(text_size, name), self._take(arrays_size, name)
        if zlib.crc32(arrays, zlib.crc32(text)) != checksum:
            raise ValueError(f"{name} is damaged: its checksum is another")
        try:
            return kind, json.loads(text), arrays
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is not described in JSON: {error}") from error

    def _take(self, size: int, name: str) -> bytes:
        left = self._size - self._file.tell()
        data = self._file.read(size) if size <= left else b""
        if len(data) < size:
            raise ValueError(f"the file ends in the middle of {name}: it wants {size} bytes, and {left} are left")
        return data


def _parse(kind: bytes, described: Any, arrays: bytes) -> Frame:
    if kind == _COMMANDS:
        return Applied(parse(described, arrays))
    if arrays:
        raise ValueError("there are arrays in it, and only commands have some")
    if kind == _RESULTS:
        call, digests = described
        if not (type(call) is int and isinstance(digests, list) and all(isinstance(one, str) for one in digests)):
            raise ValueError("its results are no digests")
        return CallResults(call, digests)
    if kind != _FAILURE or not isinstance(described, str):
        raise ValueError(f"its kind {kind!r} is unknown")
    return FailedCall(described)
