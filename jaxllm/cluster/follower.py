"""A follower's side of a group: it applies the leader's commands in their order, and never reads what comes of them."""

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from jaxllm.cluster import messages
from jaxllm.cluster.formation import call
from jaxllm.cluster.frames import BEAT, FrameReader, frame
from jaxllm.cluster.handshake import FrameKeys
from jaxllm.cluster.leader import EXIT_S
from jaxllm.cluster.links import BEAT_S, SILENT_S
from jaxllm.cluster.options import Cluster
from jaxllm.engine.device.command_codec import parse_name
from jaxllm.engine.device.commands import Command, kind_of
from jaxllm.engine.device.executor import Executor
from jaxllm.errors import ClusterError, GroupLostError

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_MOST_UNREAD = 64  # frames that wait to be applied
_MOST_STEPS = 2  # that are on the device's queue
_REPORT_S = 0.05  # between looks for executables that are there
_LAST_WORDS_S = 0.5

Item = list[Command] | messages.FromLeader


class Connection:
    """To the leader. What it says comes by `take`, in its order; from the first message on, silence ends the group."""

    def __init__(self, cluster: Cluster):
        """Calls until the leader is there. Raises `ClusterError`."""
        index, num_hosts, secret = cluster.host_index, cluster.num_hosts, cluster.secret()
        log.info("calling the leader at %s as host %d of %d", cluster.address, index, num_hosts)
        self._socket, keys = call(cluster.address, secret, index, num_hosts, cluster.timeout_s)
        self._keys: FrameKeys = keys
        self._lock, self._number = threading.Lock(), 0  # of what is written
        self._items: queue.Queue[Item | GroupLostError] = queue.Queue(_MOST_UNREAD)
        self._wants: list[messages.WantExecutables] = []  # that came before somebody listened
        self._on_want: Callable[[messages.WantExecutables], None] = self._wants.append
        self._is_over = False
        threading.Thread(target=self._read, name="jaxllm-leader", daemon=True).start()
        threading.Thread(target=self._beat, name="jaxllm-beat", daemon=True).start()

    def take(self) -> Item:
        """The next. `GroupLostError` if the group is lost."""
        item = self._items.get()
        if isinstance(item, GroupLostError):
            raise item
        return item

    def expect(self, kind: type) -> Any:
        """The next, which is to be of this kind. `GroupLostError` for any other."""
        item = self.take()
        if isinstance(item, messages.EndOfGroup):
            raise GroupLostError(f"the leader has ended: {item.reason}")
        if not isinstance(item, kind):
            raise GroupLostError(f"the leader sent {type(item).__name__}, and {kind.__name__} was expected")
        return item

    def hear_wants(self, on_want: Callable[[messages.WantExecutables], None]) -> None:
        """Calls `on_want` with what the leader wants to be compiled, and has wanted, in another thread."""
        self._on_want = on_want
        for want in self._wants:
            on_want(want)

    def send(self, message: messages.FromFollower) -> None:
        """OSError if the leader can't be reached."""
        with self._lock:
            number, self._number = self._number, self._number + 1
            self._socket.sendall(frame(self._keys.reports, number, messages.encode(message)))

    def fail(self, reason: str) -> None:
        """Tells the leader that this host can't go on, and ends the connection."""
        self._is_over = True
        self._say_failed(reason)
        self._socket.close()

    def _say_failed(self, reason: str) -> None:
        with contextlib.suppress(OSError):
            self._socket.settimeout(_LAST_WORDS_S)
            self.send(messages.HostFailed(reason))
            self._socket.shutdown(socket.SHUT_WR)
            time.sleep(_LAST_WORDS_S)  # what is unread here would take it with it

    def close(self) -> None:
        self._is_over = True
        self._socket.close()

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # the reader finds that out
            while not self._is_over:
                with self._lock:
                    self._socket.sendall(frame(self._keys.reports, BEAT, messages.BEAT))
                time.sleep(BEAT_S)

    def _read(self) -> None:
        reader, reason = FrameReader(self._keys.commands, "the leader"), "its process ended"
        try:
            while data := self._socket.recv(_READ_BYTES):
                for body in reader.feed(data):
                    self._hear(messages.decode_from_leader(body))
        except TimeoutError:
            reason = f"it has been silent for {SILENT_S:.0f} s: it hangs, or its network does"
        except OSError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing more can be read
            reason = f"what it says can't be read: {error}"
            self._say_failed(reason)
        self._lose(f"the leader has gone: {reason}")

    def _hear(self, item: Item) -> None:
        match item:
            case messages.JoinProcesses():  # now it beats
                self._socket.settimeout(SILENT_S)
                self._items.put(item)
            case messages.WantExecutables():
                self._on_want(item)
            case messages.EndOfGroup(is_closed=False, reason=reason):
                self._lose(reason)
            case messages.HostBeat():
                pass
            case _:
                self._items.put(item)
        if isinstance(item, messages.EndOfGroup):
            self._is_over = True

    def _lose(self, reason: str) -> None:
        """What this host is doing may hang for it: then the process ends."""
        if self._is_over:
            return
        self._is_over = True
        log.error("the group is lost: %s", reason)
        with contextlib.suppress(queue.Full):
            self._items.put_nowait(GroupLostError(f"the group is lost: {reason}"))
        time.sleep(EXIT_S)
        log.critical("the process ends, as its group is lost: %s", reason)
        os._exit(1)


class Follower:
    """Applies the leader's commands to `executor` until the leader is closed."""

    def __init__(self, connection: Connection, executor: Executor):
        self._connection, self._executor = connection, executor
        self._steps: deque[Any] = deque()  # what is there once a step is over, of those that may not be
        self._is_over = False
        connection.hear_wants(self._want)
        executor.compile_plan.stepped(is_stepping=False)
        threading.Thread(target=self._report, name="jaxllm-reports", daemon=True).start()

    def run(self) -> None:
        """Raises what makes it impossible: `GroupLostError`, or whatever fails here."""
        try:
            while not isinstance(item := self._connection.take(), messages.EndOfGroup):
                self._apply(item)
            log.info("%s", item.reason)
        finally:
            self._is_over = True

    def _want(self, want: messages.WantExecutables) -> None:
        self._executor.compile_plan.want(list(map(parse_name, want.names)), is_awaited=want.is_awaited)

    def _apply(self, item: Item) -> None:
        if not isinstance(item, list):
            raise ClusterError(f"the leader sent {type(item).__name__}, and commands were expected")
        for command in item:
            if kind_of(command).runs:
                self._executor.compile_plan.wait([command.name])
        results = self._executor.apply(item)
        self._executor.compile_plan.stepped(is_stepping=False)  # when it has not for a while, it compiles the rest
        if any(command.kind in ("step", "step_shared") for command in item):
            self._steps.append(results)
            if len(self._steps) > _MOST_STEPS:
                jax.block_until_ready(self._steps.popleft())

    def _report(self) -> None:
        """The thread's: says what is compiled."""
        plan, told, failed = self._executor.compile_plan, 0, set()
        with contextlib.suppress(OSError):  # the connection's reader finds that out
            while not self._is_over and told + len(failed) < plan.total:
                names, failures = plan.compiled[told:], plan.failures
                if names:
                    self._connection.send(messages.HostCompiled(names))
                    told += len(names)
                for name in failures.keys() - failed:
                    self._connection.send(messages.HostNotCompiled(name, str(failures[name])))
                    failed.add(name)
                time.sleep(_REPORT_S)
