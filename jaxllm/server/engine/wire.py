"""What the server and the engine's process say to each other: length-prefixed msgpack, and nothing that runs code."""

import dataclasses
import socket
import struct
from typing import Any

import msgspec
import numpy as np

from jaxllm.engine.stats import EngineStats
from jaxllm.outputs import RequestOutput
from jaxllm.pooling_outputs import PoolingOutput, PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.server.engine.client import EngineCommand, EngineInfo

MAX_FRAME_BYTES = 1 << 28
_LENGTH = struct.Struct(">I")
_POOLING = {field.name: field.default for field in dataclasses.fields(PoolingParams) if field.init}
_PARAMS = {field.name: field.default for field in dataclasses.fields(SamplingParams) if field.init}


class Start(msgspec.Struct, tag=True, array_like=True):
    options: dict[str, Any]  # of `build_engine`


class Add(msgspec.Struct, tag=True, array_like=True):
    request_id: str
    token_ids: list[int]
    params: dict[str, Any]
    priority: int


class Pool(msgspec.Struct, tag=True, array_like=True):
    request_id: str
    token_ids: list[int]
    params: dict[str, Any]  # of `PoolingParams`
    priority: int


class Abort(msgspec.Struct, tag=True, array_like=True):
    request_id: str
    tells: bool  # whether someone waits for the last output


class Do(msgspec.Struct, tag=True, array_like=True):
    number: int  # of the command, which its answer repeats
    command: EngineCommand


class Close(msgspec.Struct, tag=True, array_like=True):
    """The server needs the engine no more. (Without it the server has died, and others may start it again.)"""


class Ready(msgspec.Struct, tag=True, array_like=True):
    info: EngineInfo
    stats: EngineStats


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The model can't be served, or the engine died."""

    message: str
    is_user_error: bool


class Outputs(msgspec.Struct, tag=True, array_like=True):
    outputs: list[RequestOutput]


class PooledOutput(msgspec.Struct, array_like=True):
    """A `PoolingRequestOutput` without its prompt."""

    request_id: str
    data: bytes | None  # float32, little-endian
    num_cached_tokens: int
    queued_s: float
    error: str | None

    @classmethod
    def of(cls, output: PoolingRequestOutput) -> "PooledOutput":
        data = None if output.outputs is None else output.outputs.data.astype("<f4").tobytes()
        return cls(output.request_id, data, output.num_cached_tokens, output.queued_s, output.error)

    def to_output(self) -> PoolingRequestOutput:
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=None if self.data is None else PoolingOutput(data=np.frombuffer(self.data, "<f4")),
            num_cached_tokens=self.num_cached_tokens,
            queued_s=self.queued_s,
            error=self.error,
        )


class Pooled(msgspec.Struct, tag=True, array_like=True):
    outputs: list[PooledOutput]


class Refused(msgspec.Struct, tag=True, array_like=True):
    request_id: str
    message: str | None  # None: it is the engine's fault, and its log says what


class Done(msgspec.Struct, tag=True, array_like=True):
    """A command is done, or was not."""

    number: int
    is_sleeping: bool
    error: str | None
    is_user_error: bool


class Beat(msgspec.Struct, tag=True, array_like=True):
    """The process lives, and its engine made progress `silent_s` ago (0: it has nothing to do)."""

    silent_s: float
    patience_s: float
    stats: EngineStats | None
    trouble: str | None = None  # with another host of its group


FromServer = Start | Add | Pool | Abort | Do | Close
FromEngine = Ready | Failed | Outputs | Pooled | Refused | Done | Beat
_encoder = msgspec.msgpack.Encoder()
from_server = msgspec.msgpack.Decoder(FromServer)
from_engine = msgspec.msgpack.Decoder(FromEngine)


class FrameTooLargeError(Exception):
    """A message has more than `MAX_FRAME_BYTES`."""


def frame(message: FromServer | FromEngine) -> bytes:
    data = _encoder.encode(message)
    if len(data) > MAX_FRAME_BYTES:
        raise FrameTooLargeError(f"a frame of {len(data)} bytes")
    return _LENGTH.pack(len(data)) + data


def frame_length(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {length} bytes; the stream is broken")
    return length


HEAD_BYTES = _LENGTH.size


def read_frame(connection: socket.socket) -> bytes | None:
    """The next frame's content; None at the end of the stream."""
    head = _read(connection, HEAD_BYTES)
    return None if head is None else _read(connection, frame_length(head))


def _read(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            return None
        view = view[received:]
    return bytes(data)


def pack_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not the defaults; enums as their value, as msgpack has them."""
    given = {name: getattr(params, name) for name in _PARAMS}
    if params.structured_outputs is not None:
        given["structured_outputs"] = dataclasses.asdict(params.structured_outputs)
    return {name: value for name, value in given.items() if value != _PARAMS[name] and value not in ([], {})}


def pack_pooling(params: PoolingParams) -> dict[str, Any]:
    """The fields that are not the defaults."""
    return {name: value for name, default in _POOLING.items() if (value := getattr(params, name)) != default}


def unpack_params(fields: dict[str, Any]) -> SamplingParams:
    kind = RequestOutputKind(fields.get("output_kind", RequestOutputKind.CUMULATIVE.value))
    options: dict[str, Any] = fields | {"output_kind": kind}
    return SamplingParams(**options)
