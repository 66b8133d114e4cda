"""Real processes of a group on this machine, one device each."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def until(condition: Callable[[], Any], within_s: float, what: str) -> Any:
    """What `condition` gives, once that is true."""
    end = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {within_s:.0f} s: {what}"
        time.sleep(0.05)
    return found


class Strangers:
    """Connections to a port of this machine that say nothing; one that is ended is made anew."""

    def __init__(self, port: int, count: int):
        self._port, self._count = port, count
        self._held: list[socket.socket] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep)

    def __enter__(self) -> "Strangers":
        self._call()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._is_over.set()
        self._thread.join()
        for connection in self._held:
            connection.close()

    def _call(self) -> None:
        while len(self._held) < self._count:
            self._held.append(socket.create_connection(("127.0.0.1", self._port), timeout=5))

    def _keep(self) -> None:
        while not self._is_over.wait(0.05):
            for connection in [each for each in self._held if _has_ended(each)]:
                self._held.remove(connection)
                connection.close()
            with contextlib.suppress(OSError):  # nobody listens any more
                self._call()


def _has_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class Process:
    """A command with one CPU device, what it writes, and its descendants."""

    def __init__(self, *command: str, environ: Mapping[str, str] = MappingProxyType({})):
        device = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # here it is not what is compiled that is tested
        env = {**os.environ, **device, **quick, "PYTHONPATH": str(ROOT), **environ}
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=env,
            cwd=ROOT,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout))
        self._reader.start()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def events(self) -> list[dict]:
        """The lines of JSON."""
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]

    def event(self, name: str, within_s: float = 90.0) -> Any:
        """The first with this name; fails with the log if the process ends before."""

        def found() -> Any:
            given = [event[name] for event in self.events if name in event]
            if not given and self.process.poll() is not None:
                self._reader.join()
                given = [event[name] for event in self.events if name in event]
                assert given, f"it ended with {self.process.returncode} before {name!r}:\n{self.text}"
            return given

        return until(found, within_s, f"{name!r} of:\n{self.text}")[0]

    def child(self, module: str) -> int:
        """The process id of a child that runs `module`; 0 if there is none."""
        pid = self.process.pid
        with contextlib.suppress(OSError):  # one of them has ended
            for found in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                if module in Path(f"/proc/{found}/cmdline").read_text():
                    return int(found)
        return 0

    def wait(self, within_s: float) -> int:
        """Its exit status."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended within {within_s:.0f} s:\n{self.text}") from None
        finally:
            self._reader.join(1)

    def close(self) -> None:
        for child in {self.child("jaxllm."), self.process.pid} - {0}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.process.wait()
        self._reader.join(5)
        self.process.stdout.close()


class Hosts:
    """Processes that are closed together."""

    def __init__(self) -> None:
        self.processes: list[Process] = []

    def start(self, *command: str, **environ: str) -> Process:
        self.processes.append(Process(*command, environ=environ))
        return self.processes[-1]

    def program(self, *, environ: Mapping[str, str] = MappingProxyType({}), **options: Any) -> Process:
        """`tests.cluster.program`."""
        return self.start("-m", "tests.cluster.program", json.dumps(options), **environ)

    def group(self, secret: Path, *, num_hosts: int = 2, **options: Any) -> list[Process]:
        """The programs of a group, the leader's first. What is given as a dictionary of indices is of these alone."""
        common = {"num_hosts": num_hosts, "secret_file": str(secret), "coordinator": f"127.0.0.1:{free_port()}"}
        made = []
        for index in range(num_hosts):
            own = {name: value.get(index) if _is_own(value) else value for name, value in options.items()}
            own = {name: value for name, value in own.items() if value is not None}
            made.append(self.program(**common | own, index=index))
        return made

    def close(self) -> None:
        for process in self.processes:
            process.close()


def _is_own(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, int) for key in value) and bool(value)
