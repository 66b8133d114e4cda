"""Renders a model's Jinja templates, which may be hostile, in a process with bounded memory and time."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

from jaxllm.worker_process import WorkerProcess

_WORKER = Path(__file__).with_name("sandbox_worker.py")


class TemplateSandbox(WorkerProcess):
    """A template process, started on first use. Thread-safe. It ends with this object or with Python."""

    def __init__(self, *, timeout_s: float = 10.0):
        super().__init__(_WORKER, timeout_s=timeout_s)

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """Renders `template` with `variables`, which must be JSON values.

        Raises `ValueError` with the template's own message, or if the template is invalid, does not terminate, or
        needs too much memory.
        """
        request = {"template": template, "variables": variables}
        try:
            line = json.dumps(request, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"a chat template takes JSON values only: {error}") from error
        answer = self._request(line)
        if isinstance(answer, int):
            answer = {"error": self._cause(answer)}
        if "error" in answer:
            raise ValueError(f"the chat template {answer['error']}")
        return answer["text"]

    def _cause(self, status: int) -> str:
        if status > 0:
            raise RuntimeError(f"{_WORKER} ended with status {status}; is minijinja installed for {sys.executable}?")
        return f"runs for more than {self._timeout_s:g} s" if status == -signal.SIGKILL else "needs too much memory"
