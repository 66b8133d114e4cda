"""Commands as bytes: what describes them, and their arrays one after the other. Nothing that is parsed is run."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm.engine.device.commands import Command, check

_INT32 = np.dtype("<i4")


def describe(commands: Sequence[Command]) -> list[Any]:
    """Of numbers, texts and lists: the commands without their arrays' elements."""
    return [(name, key, source, [x.shape for x in arrays]) for name, arrays, key, source in commands]


def array_bytes(commands: Sequence[Command]) -> list[bytes]:
    """The elements of each array, little-endian int32."""
    arrays = [x for command in commands for x in command.arrays]
    assert all(x.dtype == _INT32 for x in arrays), "all that the host sends is int32"
    return [x.tobytes() for x in arrays]


def parse(described: Any, data: bytes | memoryview) -> list[Command]:
    """The commands that `describe` and `array_bytes` are of. ValueError or TypeError for what is none."""
    commands, at = [], 0
    for name, key, source, shapes in described:
        arrays = []
        for shape in shapes:
            if not all(type(size) is int and 0 < size < 2**31 for size in shape):
                raise ValueError(f"{shape} is no shape")
            count = math.prod(shape)
            if 4 * count > len(data) - at:
                raise ValueError("its arrays are cut off")
            arrays.append(np.frombuffer(data, _INT32, count, at).reshape(shape))
            at += 4 * count
        if type(key) is not int or not isinstance(source, str):
            raise ValueError(f"a command has the key {key!r} and the source {source!r}")
        commands.append(Command(parse_name(name), tuple(arrays), key, source))
        check(commands[-1])
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes of its arrays are nobody's")
    return commands


def parse_name(name: Any) -> str | tuple[str, int]:
    """A kind, or a pair of it and a size. ValueError for what is neither."""
    match name:
        case str():
            return name
        case [str(kind), int(size)]:
            return kind, size
    raise ValueError(f"{name!r} is no name of a command")
