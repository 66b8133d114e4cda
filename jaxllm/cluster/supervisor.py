"""Keeps a follower running: starts its process again when the group is lost, and kills one that hangs."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from typing import Any

import msgspec

from jaxllm.cluster.member import EXIT_LOST, EXIT_REFUSED

log = logging.getLogger(__name__)

_TICK_S = 0.2
_UNHEARD_S = 8.0  # after which a process counts as stopped
_MOST_DEATHS, _WITHIN_S = 5, 900.0  # more than that many in that time are no accident
_PAUSE_S = 0.5  # before another start


def supervise(options: dict[str, Any]) -> int:
    """Follows a leader until that is closed; `options` are those of `build_engine`, and `cluster` as `Cluster.to_dict`
    makes it. Returns the exit status: 0 if the leader was closed, or after SIGTERM or Ctrl-C; 1 if the group was lost
    too often; 2 if this host can't be a member."""
    deaths: deque[float] = deque(maxlen=_MOST_DEATHS)
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopped.append(number))
    while not stopped:
        status = _Child(options).wait(stopped)
        if status in (0, EXIT_REFUSED) or stopped:
            return 0 if stopped else status
        now = time.monotonic()
        if len(deaths) == _MOST_DEATHS and now - deaths[0] < _WITHIN_S:
            log.error("the group was lost %d times in %.0f s; this host gives up", _MOST_DEATHS + 1, _WITHIN_S)
            return EXIT_LOST
        deaths.append(now)
        log.error("the follower's process %s, and is started again", _how(status))
        time.sleep(_PAUSE_S)
    return 0


def _how(status: int) -> str:
    if status == -signal.SIGABRT:  # its last words come from C++, and not always first
        return "was ended by JAX, which lost the leader's process or another"
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


class _Child:
    """A follower's process."""

    def __init__(self, options: dict[str, Any]):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jaxllm.cluster.member", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
                start_new_session=True,  # the terminal's Ctrl-C is for the supervisor
            )
        self._socket.send(msgspec.msgpack.encode(options))

    def wait(self, stopped: list[int]) -> int:
        """Its exit status. It is killed if it is silent for too long, or as soon as something is in `stopped`."""
        self._socket.settimeout(_TICK_S)
        unheard_s = 0.0
        with self._socket:
            while not stopped and unheard_s < _UNHEARD_S:
                try:
                    if not self._socket.recv(1):
                        break
                    unheard_s = 0.0
                except TimeoutError:
                    unheard_s += _TICK_S  # not by the clock: the whole machine may have been suspended
                except OSError:
                    break
            else:
                if not stopped:
                    log.error("the follower's process has been silent for %.0f s, and is killed", _UNHEARD_S)
                self._process.kill()
        return self._process.wait()
