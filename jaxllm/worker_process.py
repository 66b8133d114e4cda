"""A child process that answers each line of JSON with a line of JSON: for work that may not end, or not end well."""

import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any


class WorkerProcess:
    """Runs `script`, started on first use. Thread-safe. The process ends with this object, or with Python.

    An answer that takes longer than `timeout_s` is the process's end; the next request starts another.
    """

    def __init__(self, script: Path, *, timeout_s: float):
        self._script, self._timeout_s = script, timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop = lambda: None

    def _greeting(self) -> bytes:
        """What a new process is told before the first request; it doesn't answer that."""
        return b""

    def _request(self, line: bytes) -> dict[str, Any] | int:
        """The answer; or the status with which the process ended, negative for a signal."""
        with self._lock:
            return self._ask(line)

    def _ask(self, request: bytes) -> dict[str, Any] | int:
        if self._process is not None and self._process.poll() is not None:
            self._discard()  # something ended it while it was idle
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
        except BaseException:  # Ctrl-C: the answer comes when nobody waits for it any more
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
        # What can be imported here can be imported there. -P: the folder of the script itself is none for modules.
        path = os.pathsep.join(folder for folder in sys.path if folder)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(self._script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # the terminal's Ctrl-C is not for it
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
    except BrokenPipeError:  # what it has not read is nobody's loss
        pass
