"""Writes down what an executor is asked, and digests of what it answers."""

import logging
import os
from collections import deque
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array

from jaxllm.engine.device.command_log import (
    Applied,
    CallResults,
    FailedCall,
    Frame,
    Header,
    digest,
    frame_bytes,
    header_frame,
)
from jaxllm.engine.device.commands import KINDS, Command
from jaxllm.engine.device.runner import CommandExecutor
from jaxllm.models.transformer import Params

log = logging.getLogger(__name__)


class _Unread(NamedTuple):
    """CallResults on their way."""

    call: int
    step: int  # before this many steps were begun
    arrays: list[Any]


class Recorder:
    """An executor that writes commands to `file` before another one applies them.

    Each frame is one write, so that what led to a crash is there. If the file can't be written any more, the log says
    so and the engine goes on.
    """

    def __init__(self, executor: CommandExecutor, file: FileIO, header: Header):
        self.executor, self._file = executor, file
        self.compile_plan, self.mesh, self.page_bytes = executor.compile_plan, executor.mesh, executor.page_bytes
        self.abstract_params = executor.abstract_params
        self._num_calls = self._num_steps = 0
        self._unread: deque[_Unread] = deque()
        self._is_writing = True
        file.write(header_frame(header))

    @property
    def leaves(self) -> list[Array]:
        """See `CommandExecutor`."""
        return self.executor.leaves

    def offer_params(self, version: int, params: Params) -> None:
        """See `Executor.offer_params`."""
        self.executor.offer_params(version, params)

    def lacks_params(self) -> bool:
        """See `Executor.lacks_params`."""
        return self.executor.lacks_params()

    def apply(self, commands: Sequence[Command]) -> list[Any]:
        """See `Executor.apply`."""
        self._write(Applied(list(commands)))
        call, self._num_calls = self._num_calls, self._num_calls + 1
        try:
            results = self.executor.apply(commands)
        except Exception as error:
            self._write(FailedCall(str(error)))
            raise
        self._num_steps += any(command.kind in ("step", "step_shared") for command in commands)
        if arrays := repeatable(commands, results):
            self._unread.append(_Unread(call, self._num_steps, arrays))
        # The host has read those of the step before the one before: here nobody waits for them.
        while self._unread and self._unread[0].step <= self._num_steps - 2:
            self._read(self._unread.popleft())
        return results

    def close(self) -> None:
        """Ends the file, and closes the executor."""
        while self._unread:
            self._read(self._unread.popleft())
        self.executor.close()
        self._file.close()

    def _read(self, unread: _Unread) -> None:
        try:
            digests = [digest(np.asarray(array)) for array in unread.arrays]
        except Exception as error:  # noqa: BLE001 - what the step raised, which the engine has seen
            log.debug("the results of call %d can't be read: %s", unread.call, error)
            return
        self._write(CallResults(unread.call, digests))

    def _write(self, frame: Frame) -> None:
        if not self._is_writing or self._file.closed:
            return
        try:
            data = frame_bytes(frame)
            if self._file.write(data) != len(data):
                raise OSError("only a part of a frame was written")
        except OSError as error:
            self._is_writing = False
            log.error("commands are not recorded any more, as the file can't be written: %s", error)


def repeatable(commands: Sequence[Command], results: Sequence[Any]) -> list[Any]:
    """Those of the commands' results that are the same each time."""
    kinds = [kind for command in commands for kind in [KINDS[command.kind]] * KINDS[command.kind].num_results]
    return [result for kind, result in zip(kinds, results, strict=True) if kind.is_repeatable]


def create(path: str | Path) -> FileIO:
    """A new file that its owner alone may read, as prompts are in it. ValueError if there is one already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"{path} exists; choose another file to record to, or remove it") from None
    return FileIO(descriptor, "w")
