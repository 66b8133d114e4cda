"""Commands in a file, for bug reports and tests: a frame for each call of `apply`, arrays by their bytes."""

import json
import struct
from collections.abc import Iterator, Sequence
from io import BufferedIOBase
from typing import Any

import numpy as np
from jaxtyping import Array

from jaxllm.engine.device.commands import Command
from jaxllm.engine.device.runner import CommandExecutor

MAGIC = b"jaxllm commands 1\n"
_LENGTH = struct.Struct("<I")
MAX_HEADER_BYTES = 16 << 20


class Recorder:
    """An executor that writes down what it is asked before it is done. Everything else is the other executor's."""

    def __init__(self, executor: CommandExecutor, file: BufferedIOBase):
        self._executor, self._file = executor, file
        file.write(MAGIC)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def apply(self, commands: Sequence[Command]) -> list[Array]:
        """See `Executor.apply`."""
        write_frame(self._file, commands)
        return self._executor.apply(commands)


def write_frame(file: BufferedIOBase, commands: Sequence[Command]) -> None:
    """Appends the commands of one call: a JSON header after its length, then the arrays, int32 in C order."""
    described = [[command.name, command.key, [list(x.shape) for x in command.arrays]] for command in commands]
    header = json.dumps(described).encode()
    file.write(_LENGTH.pack(len(header)) + header)
    for command in commands:
        for x in command.arrays:
            assert x.dtype == np.int32, "all that the host sends is int32"
            file.write(x.astype("<i4", copy=False).tobytes())


def read_frames(file: BufferedIOBase) -> Iterator[list[Command]]:
    """The commands of one call after the other. ValueError if the file is none of these, or is cut off."""
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError("this is no file of recorded commands, or one of another version")
    while length := file.read(_LENGTH.size):
        (size,) = _LENGTH.unpack(_whole(length, _LENGTH.size))
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"a frame's header has {size} bytes, more than the {MAX_HEADER_BYTES} that are read")
        described = json.loads(_whole(file.read(size), size))
        yield [
            Command(_name(name), tuple(_array(file, shape) for shape in shapes), key) for name, key, shapes in described
        ]


def _name(name: Any) -> Any:
    return tuple(name) if isinstance(name, list) else name


def _array(file: BufferedIOBase, shape: list[int]) -> np.ndarray:
    size = 4 * int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(_whole(file.read(size), size), "<i4").reshape(shape)


def _whole(data: bytes, size: int) -> bytes:
    if len(data) < size:
        raise ValueError("the file ends in the middle of a frame; was its engine stopped at once?")
    return data
