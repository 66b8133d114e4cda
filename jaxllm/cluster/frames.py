"""Frames of a stream between two members: each has its number, and a checksum that only they can make.

A frame is its head (number, length of the body, checksum) and its body. The checksum is a keyed BLAKE2b of all the
rest, so that what was damaged, left out, repeated or sent by a stranger is noticed before any of it is read.
"""

import socket
import struct
from collections.abc import Iterator
from hashlib import blake2b
from hmac import compare_digest

from jaxllm.errors import ClusterError

MAX_BODY_BYTES = 1 << 30
BEAT = 2**64 - 1  # the number of frames that may be left out and repeated
_START = struct.Struct("<QI")
_CHECKSUM_BYTES = 16
HEAD_BYTES = _START.size + _CHECKSUM_BYTES
_CHUNK_BYTES = 1 << 20  # that a body's buffer grows by: nobody makes it large by a length alone


def frame(key: bytes, number: int, body: bytes) -> bytes:
    """`body` as the frame of this number."""
    assert len(body) <= MAX_BODY_BYTES
    start = _START.pack(number, len(body))
    return b"".join((start, _checksum(key, start, body), body))


def _checksum(key: bytes, start: bytes, body: bytes | bytearray | memoryview) -> bytes:
    digest = blake2b(start, digest_size=_CHECKSUM_BYTES, key=key)
    digest.update(body)
    return digest.digest()


class FrameReader:
    """Reads the frames of one direction of a stream, which are numbered from 0. `sender` is how errors call it."""

    def __init__(self, key: bytes, sender: str):
        self._key, self._sender = key, sender
        self._number = 0  # of the next
        self._data = bytearray()  # that came and is not read yet

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Takes what came of the stream; yields the bodies of the frames that are whole now. `ClusterError` for what is
        no frame, or not the next one."""
        self._data += data
        while len(self._data) >= HEAD_BYTES:
            number, length = _START.unpack_from(self._data)
            if number not in (self._number, BEAT) or length > MAX_BODY_BYTES:
                raise ClusterError(
                    f"frame {number} of {length} bytes came from {self._sender}, and {self._number} was expected"
                )
            if len(self._data) < HEAD_BYTES + length:
                return
            body = bytes(memoryview(self._data)[HEAD_BYTES : HEAD_BYTES + length])
            start, checksum = bytes(self._data[: _START.size]), bytes(self._data[_START.size : HEAD_BYTES])
            if not compare_digest(checksum, _checksum(self._key, start, body)):
                raise ClusterError(f"frame {number} from {self._sender} is damaged: its checksum is another")
            del self._data[: HEAD_BYTES + length]
            self._number += number != BEAT
            yield body


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes. ConnectionError if the stream ends before."""
    data = bytearray()
    while len(data) < count:
        more = connection.recv(min(count - len(data), _CHUNK_BYTES))
        if not more:
            raise ConnectionError(f"the connection ended after {len(data)} of {count} bytes")
        data += more
    return bytes(data)
