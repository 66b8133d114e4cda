"""Sends the same frames to all followers, in order, without keeping the caller: in a thread of the native library, or,
where that is not built, in one of Python for each follower. One that reads nothing keeps no other waiting."""

import ctypes
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxllm.pallas_kernels import native

log = logging.getLogger(__name__)


@runtime_checkable
class Sender(Protocol):
    """To connections, by their positions. Only `finish` waits. Any thread may call any of them, and `finish` one."""

    def push(self, data: bytes) -> int:
        """Has `data` sent to all; after `finish`, to nobody. How many bytes wait now: pushed and not sent to all."""
        ...

    def error(self, position: int) -> str | None:
        """Why nothing can be sent there any more; None while it can."""

    def finish(self, within_s: float) -> None:
        """Waits until all is sent, so long at the most; after it connections may be closed."""


def open_sender(connections: Sequence[socket.socket]) -> Sender:
    """OSError if the machine has no room for a pipe or a thread."""
    if native.exists():
        return NativeSender(connections)
    log.warning(
        "commands are sent by threads of Python, as the native library is not built: a step costs the leader more. "
        "With a compiler, python -m jaxllm.pallas_kernels.native.build builds it"
    )
    return ThreadSender(connections)


class NativeSender:
    """See native/sender_ops.cc."""

    def __init__(self, connections: Sequence[socket.socket]):
        self._library, holding = native.load(), native.load_holding_gil()
        self._library.jaxllm_sender_open.restype = ctypes.c_void_p
        sockets = (ctypes.c_int32 * len(connections))(*(each.fileno() for each in connections))
        opened = self._library.jaxllm_sender_open(sockets, ctypes.c_int32(len(sockets)))
        if opened is None:
            raise OSError("there is no pipe or thread to be had for sending commands")
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p(opened)
        self._lock = threading.Lock()  # of the handle
        # To give up the interpreter for a copy of a few kilobytes would have a step wait until it gets it back.
        self._push = holding.jaxllm_sender_push
        self._push.argtypes, self._push.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64), ctypes.c_int64

    def push(self, data: bytes) -> int:
        """See `Sender.push`."""
        with self._lock:
            return 0 if self._handle is None else self._push(self._handle, data, len(data))

    def error(self, position: int) -> str | None:
        """See `Sender.error`."""
        with self._lock:
            if self._handle is None:
                return None
            number = self._library.jaxllm_sender_error(self._handle, ctypes.c_int32(position))
            return os.strerror(number) if number else None

    def finish(self, within_s: float) -> None:
        """See `Sender.finish`."""
        with self._lock:
            handle, self._handle = self._handle, None
        self._library.jaxllm_sender_close(handle, ctypes.c_double(within_s))


class ThreadSender:
    """A thread for each connection."""

    def __init__(self, connections: Sequence[socket.socket]):
        self._links = [_ThreadLink(connection) for connection in connections]
        self._pushed_bytes = 0

    def push(self, data: bytes) -> int:
        """See `Sender.push`."""
        self._pushed_bytes += len(data)
        for link in self._links:
            link.waiting.put(data)
        return self._pushed_bytes - min((link.sent_bytes for link in self._links if not link.error), default=0)

    def error(self, position: int) -> str | None:
        """See `Sender.error`."""
        return self._links[position].error or None

    def finish(self, within_s: float) -> None:
        """See `Sender.finish`."""
        end = time.monotonic() + within_s
        for link in self._links:
            link.waiting.put(None)
        for link in self._links:
            link.thread.join(max(0.0, end - time.monotonic()))


class _ThreadLink:
    def __init__(self, connection: socket.socket):
        self.waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.sent_bytes, self.error = 0, ""
        self._connection = connection
        self.thread = threading.Thread(target=self._run, name="jaxllm-sender", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for data in iter(self.waiting.get, None):
                self._connection.sendall(data)
                self.sent_bytes += len(data)
        except OSError as error:
            self.error = str(error)
