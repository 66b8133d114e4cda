"""The leader's connections to its followers: what is sent to all, what they report, and whether they live."""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Hashable, Sequence, Set

from jaxllm.cluster import messages
from jaxllm.cluster.frames import BEAT, FrameReader, frame
from jaxllm.cluster.handshake import FrameKeys
from jaxllm.cluster.sender import open_sender
from jaxllm.engine.device.command_codec import parse_name
from jaxllm.errors import ClusterError, EngineDeadError, GroupLostError
from jaxllm.silence import SilenceMeter

log = logging.getLogger(__name__)

BEAT_S = 0.25
LATE_S = 1.0  # that a beat may be before there is trouble
SILENT_S = 8.0  # after which a member counts as hung: JAX's own watch takes longer, and gives no reason
END_S = 1.0  # for the others to hear that the group ends
_POLL_S = 0.1
_MOST_WAITING_BYTES = 64 << 20  # of commands that are not sent yet
_ROOM_S = 0.001  # between looks for room
_READ_BYTES = 1 << 16


class Link:
    """A follower."""

    def __init__(self, index: int, connection: socket.socket, keys: FrameKeys):
        self.index, self.connection, self.keys = index, connection, keys
        self.host = f"host {index} ({connection.getpeername()[0]})"
        self.reader = FrameReader(keys.reports, self.host)
        self.silence = SilenceMeter()
        self.compiled: set[Hashable] = set()
        self.failures: dict[Hashable, str] = {}  # executables that it can't compile, and why
        self.machine = ""
        self.memory: messages.HostMemory | None = None


class Links:
    """To all followers, from when they are there until `close`. The first that is lost ends the group: then `lost` says
    why, and `on_lost` is called with that, once, in a thread of its own."""

    def __init__(self, links: list[Link]):
        self._links, self._number = links, 0
        self._key = links[0].keys.commands if links else b""
        self._compiled: set[Hashable] = set()
        self.lost: str | None = None
        self.on_lost: Callable[[str], None] = lambda reason: None
        self._is_closed = False
        self._sending = threading.Lock()
        self._sender = open_sender([link.connection for link in links])
        self._has_finished = threading.Event()  # sending
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="jaxllm-group", daemon=True)
        self._thread.start()

    def send(self, body: bytes) -> None:
        """One frame to every follower; waits only where so much waits to be sent that they don't keep up.
        `GroupLostError` if the group is lost."""
        self.check()
        with self._sending:
            number, self._number = self._number, self._number + 1
            waiting = self._sender.push(frame(self._key, number, body))
        while waiting > _MOST_WAITING_BYTES:
            time.sleep(_ROOM_S)
            self.check()
            waiting = self._sender.push(b"")

    def check(self) -> None:
        """Raises `GroupLostError` if the group is lost."""
        if self.lost is not None:
            raise GroupLostError(f"the group is lost: {self.lost}")

    @property
    def trouble(self) -> str | None:
        """What is wrong with a follower, if something is."""
        late = next((link for link in self._links if link.silence.silent_s > BEAT_S + LATE_S), None)
        return self.lost or (late and f"{late.host} has been silent for {late.silence.silent_s:.1f} s")

    @property
    def compiled(self) -> Set[Hashable]:
        """Executables that all followers have."""
        return self._compiled

    def want(self, names: Sequence[Hashable], *, is_awaited: bool) -> None:
        """Has followers compile `names` next."""
        self.send(messages.encode(messages.WantExecutables(list(names), is_awaited)))

    def wait_compiled(self, names: Sequence[Hashable], tick: Callable[[], None] = lambda: None) -> None:
        """Blocks until all followers have `names`. `EngineDeadError` if one can't compile one of them."""
        failures = [link.failures for link in self._links]

        def is_over() -> bool:
            found = [(name, each[name]) for each in failures for name in names if name in each]
            if found:
                raise EngineDeadError("compiling {} failed twice on {}".format(*found[0]))
            return self._compiled.issuperset(names)

        self._wait(is_over, tick)

    def _wait(self, condition: Callable[[], bool], tick: Callable[[], None] = lambda: None) -> None:
        """Blocks until what followers report makes `condition` true. `GroupLostError` if the group is lost."""
        with self._changed:
            while not condition():
                self.check()
                self._changed.wait(_POLL_S)
                tick()

    def machines(self) -> list[str]:
        """Where the followers are, once all have said so."""
        self._wait(lambda: all(link.machine for link in self._links))
        return [link.machine for link in self._links]

    def memories(self) -> list[messages.HostMemory]:
        """What the followers' devices have, once all have said so."""
        self._wait(lambda: all(link.memory is not None for link in self._links))
        return [link.memory for link in self._links if link.memory is not None]

    def lose(self, reason: str) -> None:
        """Ends the group: followers are told, as far as they can be without waiting."""
        with self._changed:
            if self.lost is not None or self._is_closed:
                return
            self.lost = reason
            self._changed.notify_all()
        log.error("the group is lost: %s", reason)
        self._say_end(reason, is_closed=False)
        threading.Thread(target=self.on_lost, args=(reason,), name="jaxllm-group-end", daemon=True).start()

    def close(self) -> None:
        """Tells the followers that the leader needs them no more."""
        with self._changed:
            was_well, self._is_closed = self.lost is None and not self._is_closed, True
            self._changed.notify_all()
        if was_well:
            self._say_end("the leader was closed", is_closed=True)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _say_end(self, reason: str, *, is_closed: bool) -> None:
        self._sender.push(frame(self._key, BEAT, messages.encode(messages.EndOfGroup(reason, is_closed))))
        self._sender.finish(END_S)
        for link in self._links:
            with contextlib.suppress(OSError):
                link.connection.shutdown(socket.SHUT_WR)
        self._has_finished.set()

    def _watch(self) -> None:
        """The thread's: reads, beats, and measures silence."""
        beat_at = 0.0
        with selectors.DefaultSelector() as selector:
            for link in self._links:
                selector.register(link.connection, selectors.EVENT_READ, link)
            while not self._is_closed and self.lost is None:
                for key, _ in selector.select(BEAT_S / 2):
                    self._read(key.data)
                for position, link in enumerate(self._links):
                    if error := self._sender.error(position):
                        self.lose(f"{link.host} can't be reached: {error}")
                    link.silence.tick()
                    if link.silence.silent_s > SILENT_S:
                        self.lose(f"{link.host} has been silent for {SILENT_S:.0f} s: it hangs, or its network does")
                if time.monotonic() > beat_at:
                    beat_at = time.monotonic() + BEAT_S
                    self._sender.push(frame(self._key, BEAT, messages.BEAT))
        self._has_finished.wait()
        for link in self._links:
            _drain(link.connection)

    def _read(self, link: Link) -> None:
        try:
            data = link.connection.recv(_READ_BYTES)
        except OSError as error:
            return self.lose(f"{link.host} has gone: {error}")
        if not data:
            return self.lose(f"{link.host} has gone: its process ended")
        link.silence.heard()
        try:
            for body in link.reader.feed(data):
                self._take(link, messages.decode_from_follower(body))
        except (ClusterError, *messages.UNREADABLE) as error:
            self.lose(f"what {link.host} says can't be read: {error}")

    def _take(self, link: Link, message: messages.FromFollower) -> None:
        match message:
            case messages.HostFailed(reason=reason):
                self.lose(f"{link.host} failed: {reason}")
            case messages.HostCompiled(names=names):
                link.compiled.update(map(parse_name, names))
                self._compiled = set.intersection(*(each.compiled for each in self._links))
            case messages.HostNotCompiled(name=name, reason=reason):
                link.failures[parse_name(name)] = f"{link.host}: {reason}"
            case messages.HostIsHere(machine=machine):
                link.machine = machine
            case messages.HostMemory():
                link.memory = message
        with self._changed:
            self._changed.notify_all()


def _drain(connection: socket.socket) -> None:
    """Closes it once the other side has: what is unread when a connection is closed takes what was sent with it."""
    with contextlib.suppress(OSError), connection:
        end = time.monotonic() + END_S
        while (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(_READ_BYTES):
                return
