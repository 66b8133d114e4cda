"""How the members of a group come together: the leader listens, followers call."""

import contextlib
import ipaddress
import logging
import os
import socket
import threading
import time
from typing import NamedTuple

from jaxllm.cluster import handshake
from jaxllm.cluster.handshake import FrameKeys
from jaxllm.cluster.links import Link, Links
from jaxllm.cluster.membership import join_address, split_address
from jaxllm.errors import ClusterError

log = logging.getLogger(__name__)

_MEET_S = 5.0  # for a caller to prove that it knows the secret
_MOST_AT_ONCE = 16  # callers who have not proved anything yet
_MOST_WARNINGS = 10  # of strangers
_RETRY_S = 0.25
_NO_PLACE_S = 10.0  # in which a leader finds that the host that came before has gone


class Address(NamedTuple):
    """Where the leader listens."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> "Address":
        """Of HOST:PORT. `ClusterError` for what is none."""
        return cls(*split_address(text))

    def __str__(self) -> str:
        return join_address(*self)


def listen(address: Address, bind: str | None) -> socket.socket:
    """Where the leader listens: on `bind`, or the address by which the others know it. `ClusterError` if it can't."""
    host = bind or address.host
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(str(where[0]).partition("%")[0]).is_unspecified:
            raise ClusterError(f"{host} is every address of this host; give --bind the one that the others reach it by")
        listener = socket.socket(family, kind)
    except OSError as error:
        raise ClusterError(
            f"the leader can't listen at {host}: {error}; give --bind an address of this host"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ClusterError(
            f"the leader can't listen at {Address(str(where[0]), address.port)}: {error}; give an address of this host "
            "(--bind) and a free port (--coordinator)"
        ) from error
    return listener


def gather(listener: socket.socket, secret: bytes, num_hosts: int, timeout_s: float) -> Links:
    """Waits until every follower has called. `ClusterError` says which did not come."""
    return _Gathering(secret, num_hosts).run(listener, timeout_s)


class _Gathering:
    """The followers that are there so far. Each caller is met in a thread of its own.

    Who has proved nothing keeps nobody out: it has `_MEET_S`, and less where so many call that its place is needed.
    """

    def __init__(self, secret: bytes, num_hosts: int):
        self._secret, self._num_hosts = secret, num_hosts
        self._session = os.urandom(handshake.SESSION_BYTES)
        self._found: dict[int, Link] = {}
        self._unproven: dict[socket.socket, float] = {}  # to time.monotonic() when it has to go; the oldest first
        self._lock = threading.Lock()
        self._num_warnings = 0

    def run(self, listener: socket.socket, timeout_s: float) -> Links:
        end = time.monotonic() + timeout_s
        listener.settimeout(_RETRY_S)
        try:
            while len(self._found) < self._num_hosts - 1:
                if time.monotonic() > end:
                    missing = sorted(set(range(1, self._num_hosts)) - self._found.keys())
                    raise ClusterError(
                        f"of {self._num_hosts} hosts {missing} have not come within {timeout_s:.0f} s; start the same "
                        "command there, each with its --host-index"
                    )
                self._accept(listener)
                self._drop_lost()
                self._drop_unproven(_MOST_AT_ONCE)
        except BaseException:
            for link in self._found.values():
                link.connection.close()
            raise
        finally:
            self._drop_unproven(0)
        return Links([self._found[index] for index in sorted(self._found)])

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(TimeoutError):
            connection, (host, *_) = listener.accept()
            self._drop_unproven(_MOST_AT_ONCE - 1)
            with self._lock:
                self._unproven[connection] = time.monotonic() + _MEET_S
            threading.Thread(target=self._meet, args=(connection, host), daemon=True).start()

    def _drop_unproven(self, most: int) -> None:
        """Ends the connections of those whose time is over, and of the oldest until `most` are left: their threads then
        close them. Who was about to prove itself calls again."""
        with self._lock:
            now, num_too_many = time.monotonic(), len(self._unproven) - most
            for i, (connection, end) in enumerate(list(self._unproven.items())):
                if i < num_too_many or now > end:
                    del self._unproven[connection]
                    with contextlib.suppress(OSError):  # the caller has ended it
                        connection.shutdown(socket.SHUT_RDWR)

    def _meet(self, connection: socket.socket, host: str) -> None:
        try:
            connection.settimeout(_MEET_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            candidate = handshake.meet(connection, self._secret)
            with self._lock:
                self._unproven.pop(connection, None)  # if it was dropped meanwhile, it can't be answered
                verdict = self._judge(candidate)
                keys = handshake.answer(connection, self._secret, self._session, candidate, verdict)
                if verdict == handshake.TAKEN:
                    connection.settimeout(None)
                    self._found[candidate.index] = Link(candidate.index, connection, keys)
                    log.info("host %d of %d is there (%s)", candidate.index, self._num_hosts, host)
                    return
            raise ClusterError(f"it says that it is host {candidate.index} of {candidate.num_hosts}")
        except (OSError, ClusterError) as error:
            self._close(connection, host, error)

    def _close(self, connection: socket.socket, host: str, error: Exception) -> None:
        """Of who was not taken."""
        with self._lock:
            self._unproven.pop(connection, None)
            connection.close()
            self._num_warnings += 1
            level = logging.WARNING if self._num_warnings <= _MOST_WARNINGS else logging.DEBUG
        log.log(level, "a caller from %s was not taken: %s", host, error or type(error).__name__)

    def _judge(self, candidate: handshake.Candidate) -> int:
        if candidate.num_hosts != self._num_hosts:
            return handshake.WRONG_NUMBER
        is_free = 0 < candidate.index < self._num_hosts and candidate.index not in self._found
        return handshake.TAKEN if is_free else handshake.WRONG_INDEX

    def _drop_lost(self) -> None:
        """Makes room for those that came, went and will come again."""
        with self._lock:
            for index, link in list(self._found.items()):
                if _has_ended(link.connection):
                    log.warning("%s has gone again before all were there", link.host)
                    link.connection.close()
                    del self._found[index]


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed it; what it has sent stays there."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def call(
    address: Address, secret: bytes, index: int, num_hosts: int, timeout_s: float
) -> tuple[socket.socket, FrameKeys]:
    """A follower's connection to the leader, which may not be there yet. `ClusterError` if it does not come, or does
    not take this host."""
    start = time.monotonic()
    error: Exception = OSError("nobody listens")
    end = start + timeout_s
    while time.monotonic() < end:
        try:
            connection = socket.create_connection(address, timeout=_MEET_S)
        except OSError as failed:
            error = failed
            time.sleep(_RETRY_S)
            continue
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keys = handshake.introduce(connection, secret, index, num_hosts)
        except (OSError, handshake.NoPlaceError) as failed:  # it is busy, or ends
            connection.close()
            if isinstance(failed, ClusterError) and time.monotonic() > start + _NO_PLACE_S:
                raise
            error = failed
            time.sleep(_RETRY_S)
        except BaseException:
            connection.close()
            raise
        else:
            connection.settimeout(None)
            return connection, keys
    raise ClusterError(
        f"the leader at {address} did not answer within {timeout_s:.0f} s ({error}); is it started, and may this host "
        "reach it?"
    )
