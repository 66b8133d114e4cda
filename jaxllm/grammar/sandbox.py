"""Checks grammars in a separate process before the engine compiles them: a hostile grammar may not terminate, or may
overflow the stack of the process that compiles it."""

import dataclasses
import hashlib
import json
import signal
import sys
import threading
from collections import OrderedDict
from pathlib import Path

from jaxllm.structured_outputs import StructuredOutputs
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.worker_process import WorkerProcess

_WORKER = Path(__file__).with_name("sandbox_worker.py")
_TIMEOUT_S = 30.0  # wall time; the process itself stops earlier, by processor time, unless it is starved
_KEPT = 4096  # grammars whose check is remembered


class GrammarSandbox(WorkerProcess):
    """Checks grammars for one tokenizer, and remembers what came of it."""

    def __init__(self, tokenizer: Tokenizer | None):
        super().__init__(_WORKER, timeout_s=_TIMEOUT_S)
        self._tokenizer = tokenizer
        self._checked: OrderedDict[bytes, str | None] = OrderedDict()  # digest -> what is wrong with it
        self._checked_lock = threading.Lock()

    def check(self, wanted: StructuredOutputs) -> None:
        """Raises ValueError with the reason if the grammar is invalid. It may take seconds."""
        line = _line(wanted)
        if self._recalls(line):
            return
        answer = self._request(line)
        error = _explain(answer) if isinstance(answer, int) else answer.get("error")
        if answer != -signal.SIGKILL:  # by the clock, which is the machine's load as well
            self._remember(line, error)
        if error is not None:
            raise ValueError(error)

    def knows(self, wanted: StructuredOutputs) -> bool:
        """Whether the grammar was found to be valid before. Raises ValueError as `check` did."""
        return self._recalls(_line(wanted))

    def _recalls(self, line: bytes) -> bool:
        key = hashlib.sha256(line).digest()
        with self._checked_lock:
            if key not in self._checked:
                return False
            self._checked.move_to_end(key)
            error = self._checked[key]
        if error is not None:
            raise ValueError(error)
        return True

    def _remember(self, line: bytes, error: str | None) -> None:
        with self._checked_lock:
            self._checked[hashlib.sha256(line).digest()] = error
            if len(self._checked) > _KEPT:
                self._checked.popitem(last=False)

    def _greeting(self) -> bytes:
        source = None if self._tokenizer is None else self._tokenizer.json
        return json.dumps(source).encode() + b"\n"


def _line(wanted: StructuredOutputs) -> bytes:
    return json.dumps(dataclasses.asdict(wanted)).encode()


def _explain(status: int) -> str:
    """What is wrong with a grammar that ended the process."""
    if status > 0:
        raise RuntimeError(f"{_WORKER} ended with status {status}; does it run with {sys.executable}?")
    too_long = status in (-signal.SIGXCPU, -signal.SIGKILL)
    what = "takes too long to compile" if too_long else "nests too deep, or needs too much memory"
    return f"the grammar {what}; simplify it"
