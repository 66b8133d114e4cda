"""A child process that answers each line of JSON with a line of JSON, for work that may hang or crash."""

import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any


class WorkerProcess:
    """Runs `script`, started on first use. Thread-safe. The process ends with this object or with Python.

    A process that does not answer within `timeout_s` is killed; the next request starts another.
    """

    def __init__(self, script: Path, *, timeout_s: float):
        self._script, self._timeout_s = script, timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop = lambda: None

    def _greeting(self) -> bytes:
        """What a new process reads before the first request, without answering."""
        return b""

    def _request(self, line: bytes) -> dict[str, Any] | int:
        """The answer, or the exit status if the process ended: negative for a signal."""
        with self._lock:
            return self._ask(line)

    def _ask(self, request: bytes) -> dict[str, Any] | int:
        if self._process is not None and self._process.poll() is not None:
            self._discard()  # it ended while idle
        greeting = self._greeting() if self._process is None else b""
        process = self._process or self._start()
        timer = threading.Timer(self._timeout_s, process.kill)
        timer.start()
        try:
            process.stdin.write(greeting + request + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        except BaseException:  # Ctrl-C: the late answer would be taken for the next request's
            self._discard()
            raise
        finally:
            timer.cancel()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        status = process.wait()
        self._discard()
        return status

    def _start(self) -> subprocess.Popen[bytes]:
        # The child imports what this process can import. -P: the script's own folder is not on its path.
        path = os.pathsep.join(folder for folder in sys.path if folder)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(self._script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # the terminal's Ctrl-C does not reach it
        )
        self._stop = weakref.finalize(self, _stop, self._process)
        return self._process

    def _discard(self) -> None:
        self._process = None
        self._stop()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    process.stdout.close()
    try:
        process.stdin.close()
    except BrokenPipeError:  # it did not read all of its input
        pass
