"""Runs `worker.py` in an isolated process, without this one's environment, and ends it with this process."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxllm.errors import JaxLLMError, ModelFormatError
from jaxllm.interrupts import HeldSignals

_ROOT = str(Path(__file__).resolve().parents[2])
_BOOT = """
import json, sys
job = json.loads(sys.stdin.readline())
sys.path[:0] = job.pop("sys_path")
from jaxllm.convert.worker import main
main(job)
"""
_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT")


def require(*modules: str) -> None:
    """Raises `JaxLLMError` unless all are installed. Imports only their parent packages."""
    for name in modules:
        try:
            is_there = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            raise JaxLLMError(f"{name} is not installed, but converting this needs it; pip install 'jaxllm[convert]'")


def run(job: dict[str, Any], on_bytes: Callable[[int], None] = lambda count: None) -> Any:
    """The result of `job`; `on_bytes` gets the progress. Raises `ModelFormatError` for input that the worker refuses.

    `-I` keeps modules of the current directory out, and the environment, which may have secrets, is not passed on. The
    worker has its own session, so that Ctrl-C reaches this process alone, which then ends the worker.
    """
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    with tempfile.TemporaryFile() as errors:
        with HeldSignals(signal.SIGINT) as held:  # between its start and the name of it, nobody could end it
            worker = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment | {"CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,
                text=True,
                encoding="utf-8",
            )
        try:
            held.act()
            _send(worker, job | {"sys_path": _search_path()})
            for line in worker.stdout:
                message = json.loads(line)
                if "error" in message:
                    raise ModelFormatError(message["error"])
                if "result" in message:
                    return message["result"]
                on_bytes(message["bytes"])
            raise _died(worker.wait(), errors)
        finally:
            worker.kill()
            worker.wait()
            worker.stdout.close()


def _send(worker: subprocess.Popen, job: dict[str, Any]) -> None:
    try:
        with worker.stdin:
            worker.stdin.write(json.dumps(job) + "\n")
    except BrokenPipeError:
        pass  # it has died; its exit status says why


def _search_path() -> list[str]:
    """The import path of this process without its current directory."""
    here = os.path.realpath(os.getcwd())
    return [_ROOT, *(path for path in sys.path if path and os.path.realpath(path) != here and path != _ROOT)]


def _died(code: int, errors: Any) -> Exception:
    errors.seek(0)
    output = errors.read().decode(errors="replace").strip()
    if code < 0:
        return JaxLLMError(
            f"the converting process was ended by signal {-code}; there may be too little memory, or the file is "
            "damaged: free memory, or download it again"
        )
    return RuntimeError(f"the converting process failed with exit code {code}:\n{output}")
