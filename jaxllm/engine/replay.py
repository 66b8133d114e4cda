"""Applies recorded commands to an executor like the one they were recorded on, and compares what comes of them."""

import logging
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxllm.checkpoint.placement import check_mesh
from jaxllm.engine.device import memory
from jaxllm.engine.device.command_log import Applied, CallResults, CommandLog, FailedCall, Header, digest
from jaxllm.engine.device.commands import Command, kind_of
from jaxllm.engine.device.executor import Executor
from jaxllm.engine.device.lowering import Lowering
from jaxllm.engine.device.model_shape import model_shape, with_config
from jaxllm.engine.device.recorder import repeatable
from jaxllm.engine.host_memory import machine_bytes
from jaxllm.engine.model_source import EMBEDDED, ModelSource, model_source
from jaxllm.engine.recording import header_of
from jaxllm.errors import OutOfMemoryError
from jaxllm.sharding.mesh import make_mesh, platform_of

log = logging.getLogger(__name__)

_MAX_KEPT = 64  # calls whose results wait for their digests: a recorder is two steps behind
_FIRST_VERSION = 1  # of the parameters: the model's own


@dataclass
class ReplayReport:
    """How far a replay got, and what it found."""

    commands: int = 0
    steps: int = 0
    compared: int = 0  # calls whose results were recorded
    difference: str | None = None  # the first
    ends_early: str | None = None  # why not all could be replayed

    @property
    def is_equal(self) -> bool:
        return self.difference is None and self.ends_early is None

    def __str__(self) -> str:
        found = [f"{self.commands} commands, {self.steps} steps", self.difference or "equal"]
        return ", ".join(found) + (f"; {self.ends_early}" if self.ends_early else "")


def replay(file: BufferedIOBase, model: Any = None) -> ReplayReport:
    """Replays a file that `LLM(record=...)` has written. `model` is what `LLM` takes (None: the recorded directory).

    Raises `ValueError` for a file that can't be read to its end, or a model that is not the recorded one.
    """
    recorded = CommandLog(file)
    executor = Replayed(recorded.header, model)
    try:
        return compare(recorded, executor)
    finally:
        executor.close()


def compare(recorded: CommandLog, executor: Executor) -> ReplayReport:
    """Applies the commands, up to the first difference. The executor has the model's parameters as version 1."""
    return _Replay(executor).run(recorded)


class Replayed(Executor):
    """An executor as a header describes it; the model's parameters are its first version."""

    def __init__(self, header: Header, model: Any = None):
        mesh = make_mesh(header.mesh)
        source = _source(header, model, platform_of(mesh))
        source.expand(mesh)
        source = source.in_panels(mesh)
        graph, state = nnx.split(source.model)
        check_mesh(state, mesh)
        shape = with_config(model_shape(source.cfg, graph, state, mesh), source.model, header.config)
        if shape.cache_layout(header.config, mesh).groups != header.config.groups:
            raise ValueError(f"the model's layers do not share a pool as the recorded ones do, {header.config.groups}")
        _check_room(memory.leaf_bytes([*shape.leaves, *jax.tree.leaves(Lowering(shape, header.config, mesh).state())]))
        _compare(header, header_of(source, header.config, mesh, state))
        super().__init__(shape, header.config, mesh)
        try:
            self.offer_params(_FIRST_VERSION, source.place(state, mesh))
        except BaseException:
            self.close()
            raise


def _source(header: Header, model: Any, platform: str) -> ModelSource:
    if model is None and not header.model:
        raise ValueError("the recorded model was an object of the program; give its directory with --model")
    if model is None:
        model = None if header.model == EMBEDDED else header.model
    is_directory = model is None or isinstance(model, str)
    return model_source(model, header.dtype if is_directory else "auto", platform, None)


def _check_room(num_bytes: int) -> None:
    most = machine_bytes()
    if num_bytes > most:
        raise OutOfMemoryError(
            f"the recorded engine's parameters and state take {num_bytes / 1e9:.1f} GB, more than the "
            f"{most / 1e9:.1f} GB of this machine; replay it on one like the recorded one"
        )


def _compare(recorded: Header, ours: Header) -> None:
    """ValueError if the model is another; a warning where results may differ by other things."""
    digests = (recorded.config_digest, ours.config_digest)
    if recorded.params_digest != ours.params_digest or all(digests) and digests[0] != digests[1]:
        raise ValueError(
            f"the model is not the recorded one ({recorded.model or 'an object of the program'}): its config.json, or "
            "its parameters' names, shapes or dtypes are others; give the recorded one with --model"
        )
    for name in ("jaxllm", "jax", "platform"):
        was, now = getattr(recorded, name), getattr(ours, name)
        if was != now:
            log.warning("recorded with %s %s, replayed with %s: results may differ for that", name, was, now)


class _Replay:
    """Goes through a file once."""

    def __init__(self, executor: Executor):
        self._executor, self._report = executor, ReplayReport()
        self._num_calls = 0
        self._unread: dict[int, tuple[list[Command], list[Any]]] = {}  # results, by call
        self._error: Exception | None = None  # of the last call

    def run(self, recorded: CommandLog) -> ReplayReport:
        report = self._report
        for frame in recorded.frames():
            error, self._error = self._error, None
            if error is not None and not isinstance(frame, FailedCall):
                report.difference = f"call {self._num_calls} fails here, and did not when it was recorded: {error}"
            elif isinstance(frame, Applied):
                self._apply(frame.commands)
            elif isinstance(frame, CallResults):
                self._check_results(frame)
            elif error is None:
                report.difference = (
                    f"call {self._num_calls} failed when it was recorded, and does not here: {frame.error}"
                )
            if not report.is_equal:
                return report
        if self._error is not None:
            report.difference = f"call {self._num_calls}, the last, fails: {self._error}"
        return report

    def _apply(self, commands: list[Command]) -> None:
        for command in commands:
            if command.kind == "update_params" and command.key != _FIRST_VERSION:
                self._report.ends_early = (
                    f"then come parameters of version {command.key} that the program brought, which are not recorded"
                )
                return
        try:
            for command in commands:
                if kind_of(command).runs:
                    self._executor.compile_plan.wait([command.name])
            results = repeatable(commands, self._executor.apply(commands))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
            self._error, results = error, []
        self._unread[self._num_calls] = commands, results
        self._unread.pop(self._num_calls - _MAX_KEPT, None)
        self._num_calls += 1
        self._report.commands += len(commands)
        self._report.steps += sum(command.kind in ("step", "step_shared") for command in commands)

    def _check_results(self, frame: CallResults) -> None:
        report, (commands, results) = self._report, self._unread.pop(frame.call, ([], []))
        where = f"call {frame.call} ({', '.join(str(command.name) for command in commands)}), step {report.steps}"
        try:
            ours = [digest(np.asarray(result)) for result in results]
        except Exception as error:  # noqa: BLE001 - as above
            report.difference = f"the results of {where} can't be read: {error}"
            return
        report.compared += 1
        if ours != frame.digests:
            report.difference = f"the first difference is in the results of {where}: {ours}, recorded {frame.digests}"
