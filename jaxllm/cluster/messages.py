"""What the leader and a follower say to each other."""

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxllm.engine.device.command_codec import array_bytes, describe, parse
from jaxllm.engine.device.commands import Command


class JoinProcesses(msgspec.Struct, tag=True, array_like=True):
    """All are there: where JAX's coordination service will listen."""

    port: int  # on the host of the leader
    machines: list[str]  # of all members


class EngineHeader(msgspec.Struct, tag=True, array_like=True):
    """What the leader's engine is made of."""

    header: dict[str, Any]  # of a `Header`


class WantExecutables(msgspec.Struct, tag=True, array_like=True):
    """Executables to compile next."""

    names: list[Any]
    is_awaited: bool  # the leader waits for them


class EndOfGroup(msgspec.Struct, tag=True, array_like=True):
    """The group ends."""

    reason: str
    is_closed: bool  # as the leader wants it, and for no trouble


class HostBeat(msgspec.Struct, tag=True, array_like=True):
    """The sender lives."""


class HostIsHere(msgspec.Struct, tag=True, array_like=True):
    """What a follower says first."""

    machine: str


class HostMemory(msgspec.Struct, tag=True, array_like=True):
    """What a follower's devices have: the numbers of a `DeviceMemory`, where they are known."""

    memory: list[int] | None


class HostCompiled(msgspec.Struct, tag=True, array_like=True):
    """Executables that a follower has since it said so last."""

    names: list[Any]


class HostNotCompiled(msgspec.Struct, tag=True, array_like=True):
    """An executable that a follower has to do without."""

    name: Any
    reason: str


class HostFailed(msgspec.Struct, tag=True, array_like=True):
    """A follower can't go on."""

    reason: str


FromLeader = JoinProcesses | EngineHeader | WantExecutables | EndOfGroup | HostBeat
FromFollower = HostIsHere | HostMemory | HostCompiled | HostNotCompiled | HostFailed | HostBeat
_encoder = msgspec.msgpack.Encoder()
_from_leader = msgspec.msgpack.Decoder(FromLeader)
_from_follower = msgspec.msgpack.Decoder(FromFollower)
_described = msgspec.msgpack.Decoder()
_COMMANDS, _MESSAGE = b"C", b"M"
_LENGTH = struct.Struct("<I")
UNREADABLE = (ValueError, TypeError, struct.error, msgspec.MsgspecError)  # raised for a body that is no message
BEAT = _MESSAGE + _encoder.encode(HostBeat())


def encode_commands(commands: Sequence[Command]) -> bytes:
    """The body of a frame."""
    described = _encoder.encode(describe(commands))
    return b"".join((_COMMANDS, _LENGTH.pack(len(described)), described, *array_bytes(commands)))


def encode(message: FromLeader | FromFollower) -> bytes:
    """The body of a frame."""
    return _MESSAGE + _encoder.encode(message)


def decode_from_leader(body: bytes) -> list[Command] | FromLeader:
    """Commands, or a message. One of `UNREADABLE` for a body that is neither."""
    if body[:1] == _MESSAGE:
        return _from_leader.decode(body[1:])
    if body[:1] != _COMMANDS:
        raise ValueError(f"a frame begins with {body[:1]!r}")
    (length,) = _LENGTH.unpack_from(body, 1)
    start = 1 + _LENGTH.size
    return parse(_described.decode(body[start : start + length]), memoryview(body)[start + length :])


def decode_from_follower(body: bytes) -> FromFollower:
    """One of `UNREADABLE` for a body that is no message."""
    if body[:1] != _MESSAGE:
        raise ValueError(f"a frame begins with {body[:1]!r}")
    return _from_follower.decode(body[1:])
