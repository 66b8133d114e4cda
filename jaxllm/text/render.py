"""Renders Jinja templates that came with a model, which may be hostile, in a process with little memory and time."""

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).with_name("render_worker.py")


class Renderer:
    """A template process, started on first use. Thread-safe. It ends with this object, or with Python."""

    def __init__(self, *, timeout_s: float = 10.0):
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop = lambda: None

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """The text that `template` makes of `variables`, which must be what JSON can hold.

        Raises `ValueError` with the template's own message, or for a template that is wrong, doesn't end, or asks for
        too much memory.
        """
        request = {"template": template, "variables": variables}
        try:
            line = json.dumps(request, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"a chat template takes what JSON can hold, and this is not: {error}") from error
        with self._lock:
            answer = self._ask(line)
        if "error" in answer:
            raise ValueError(f"the chat template {answer['error']}")
        return answer["text"]

    def _ask(self, request: bytes) -> dict[str, str]:
        if self._process is not None and self._process.poll() is not None:
            self._discard()  # something ended it while it was idle
        process = self._process or self._start()
        timer = threading.Timer(self._timeout_s, process.kill)
        timer.start()
        try:
            process.stdin.write(request + b"\n")
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
        if status > 0:
            raise RuntimeError(f"{_WORKER} ended with status {status}; is minijinja installed for {sys.executable}?")
        if status == -signal.SIGKILL:
            return {"error": f"runs for more than {self._timeout_s:g} s"}
        return {"error": "needs too much memory"}

    def _start(self) -> subprocess.Popen[bytes]:
        # What can be imported here can be imported there. -P: the folder of the worker itself is none for modules.
        path = os.pathsep.join(folder for folder in sys.path if folder)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # the terminal's Ctrl-C is not for it
        )  # fmt: skip
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
