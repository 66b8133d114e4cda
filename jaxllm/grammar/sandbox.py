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
_KEPT = 4096  # digests of valid grammars


class GrammarSandbox(WorkerProcess):
    """Checks grammars for one tokenizer and remembers the valid ones."""

    def __init__(self, tokenizer: Tokenizer | None):
        super().__init__(_WORKER, timeout_s=_TIMEOUT_S)
        self._tokenizer = tokenizer
        self._good: OrderedDict[bytes, None] = OrderedDict()  # digests
        self._good_lock = threading.Lock()

    def check(self, wanted: StructuredOutputs) -> None:
        """Raises ValueError with the reason if the grammar is invalid."""
        line = json.dumps(dataclasses.asdict(wanted)).encode()
        key = hashlib.sha256(line).digest()
        with self._good_lock:
            if key in self._good:
                self._good.move_to_end(key)
                return
        answer = self._request(line)
        if isinstance(answer, int):
            if answer > 0:
                raise RuntimeError(f"{_WORKER} ended with status {answer}; does it run with {sys.executable}?")
            too_long = answer in (-signal.SIGXCPU, -signal.SIGKILL)
            what = "takes too long to compile" if too_long else "nests too deep, or needs too much memory"
            raise ValueError(f"the grammar {what}; simplify it")
        if "error" in answer:
            raise ValueError(answer["error"])
        with self._good_lock:
            self._good[key] = None
            if len(self._good) > _KEPT:
                self._good.popitem(last=False)

    def _greeting(self) -> bytes:
        source = None if self._tokenizer is None else self._tokenizer.json
        return json.dumps(source).encode() + b"\n"
