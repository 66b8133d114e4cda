"""The engine's process: steps in its main thread, and beside it one thread that reads, one that writes, one that says
how it is. Started by `process_client`; its standard input and output are not used."""

import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from jaxllm.engine.loop import Delivery, EngineLoop
from jaxllm.errors import EngineDeadError, JaxLLMError
from jaxllm.outputs import RequestOutput
from jaxllm.pooling_outputs import PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.server.engine import wire
from jaxllm.server.engine.client import EngineCommand, EngineInfo

if TYPE_CHECKING:
    from concurrent.futures import Future

    from jaxllm.cluster.leader import LeaderGroup
    from jaxllm.engine.engine import Engine

log = logging.getLogger(__name__)

BEAT_S = 0.25
_MOST_UNSENT = 64  # messages to the server, above which heartbeats are left out
_LAST_WORDS_S = 1.0  # for the server and other hosts to hear why
_EXIT_S = 10.0  # for a step that runs when the server goes away


class EngineProcess:
    """What the threads share: the socket, what is to be sent, and the engine's loop once that is loaded."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.outbox: queue.SimpleQueue[wire.FromEngine | None] = queue.SimpleQueue()
        self.loop: EngineLoop | None = None
        self.group: LeaderGroup | None = None  # whose other hosts have parts of the engine

    def serve(self, engine: "Engine") -> None:
        """Until the server is gone; then the log says whether all blocks came back. Raises what kills the engine."""
        self.loop = EngineLoop(engine, self.deliver)
        info = EngineInfo.of(engine.config, engine.vocab, engine.intake.pooler)
        self.outbox.put(wire.Ready(info, engine.stats()))
        self.loop.run()
        engine.scheduler.check()
        stats = engine.stats()
        log.info(
            "the server has gone; %d of %d blocks are used, and the books are in order",
            stats.blocks_used,
            stats.num_blocks,
        )

    def load(self, options: dict[str, Any]) -> "Engine":
        """The engine that these arguments of `build_engine` are of; with `cluster`, over the hosts of a group."""
        from jaxllm.cli.common import setup_compilation_cache, setup_device_memory

        setup_device_memory(options.get("gpu_memory_utilization"))
        setup_compilation_cache()
        if (cluster := options.pop("cluster", None)) is not None:
            from jaxllm.cluster.leader import LeaderGroup
            from jaxllm.cluster.options import Cluster

            self.group = LeaderGroup(Cluster.of_dict(cluster), self._end)
        from jaxllm.engine.build import build_engine  # imports jax, while heartbeats are sent already

        with nullcontext() if self.group is None else self.group.building():
            engine = build_engine(**options, group=self.group)
        if engine.config.generates:
            threading.Thread(target=_warm_up, args=(engine,), daemon=True).start()
        return engine

    def _end(self, reason: str) -> None:
        """As the group is lost: a step may hang that can't be interrupted."""
        self.outbox.put(wire.Failed(f"the group is lost: {reason}", is_user_error=False))
        self.outbox.put(None)
        time.sleep(_LAST_WORDS_S)
        os._exit(1)

    def deliver(self, deliveries: list[Delivery]) -> list[str]:
        """Sends a step's outputs as one frame. Returns the ids of requests that are to be dropped. What kills the
        engine is told by `main`."""
        outputs: list[RequestOutput] = []
        pooled: list[wire.PooledOutput] = []
        gone: list[str] = []
        for request_id, _, news in deliveries:
            if isinstance(news, RequestOutput):
                if self._is_readable(news):
                    outputs.append(news)
                else:
                    gone.append(request_id)
            elif isinstance(news, PoolingRequestOutput):
                pooled.append(wire.PooledOutput.of(news))
            elif not isinstance(news, EngineDeadError):
                self.outbox.put(wire.Refused(request_id, str(news) if isinstance(news, ValueError) else None))
        if outputs:
            self.outbox.put(wire.Outputs(outputs))
        if pooled:
            self.outbox.put(wire.Pooled(pooled))
        return gone

    def _is_readable(self, output: RequestOutput) -> bool:
        """Makes its log-probabilities readable, as frames hold no functions. What fails there, a user's tokenizer say,
        ends this request alone."""
        try:
            for part in output.outputs:
                part.logprobs  # noqa: B018 - made when it is looked at
            output.prompt_logprobs  # noqa: B018
        except Exception:  # noqa: BLE001 - a tokenizer may raise anything
            log.exception("the log-probabilities of request %s can't be read", output.request_id)
            self.outbox.put(wire.Refused(output.request_id, None))
            return False
        return True

    def read(self) -> None:
        """The reader's thread. Without a server this process has no purpose: it ends, even in the middle of a step."""
        try:
            while (data := wire.read_frame(self.connection)) is not None:
                self._take(wire.from_server.decode(data))
        except (OSError, msgspec.MsgspecError):
            log.debug("the server's connection broke", exc_info=True)
        if self.loop is None:
            os._exit(1)  # it still loads, for nobody
        self.loop.stop()
        self.loop.engine.runner.compile_plan.abandon()  # for nobody, and in the way of the loop's end
        time.sleep(_EXIT_S)
        log.warning("the engine has not ended within %.0f s of the server's end, and its process does", _EXIT_S)
        os._exit(1)

    @property
    def _serving(self) -> EngineLoop:
        """The loop, once `Ready` was sent: the server asks for nothing before."""
        assert self.loop is not None
        return self.loop

    def _take(self, message: wire.FromServer) -> None:
        match message:
            case wire.Add() | wire.Pool():
                self._add(message)
            case wire.Abort(tells=True):
                self._serving.abort(message.request_id)
            case wire.Abort():
                self._serving.drop([message.request_id])
            case wire.Do():
                self._do(message)
            case wire.Close():
                if self.group is not None:
                    self.group.links.close()

    def _do(self, message: wire.Do) -> None:
        def tell(done: "Future[bool]") -> None:
            error = done.exception()
            text = None if error is None else str(error)
            if error is not None and not isinstance(error, ValueError):
                log.error("%s failed", message.command.name, exc_info=error)
            is_sleeping = error is None and done.result()
            self.outbox.put(wire.Done(message.number, is_sleeping, text, isinstance(error, ValueError)))

        try:
            self._serving.call(partial(_command, self._serving.engine, message.command)).add_done_callback(tell)
        except EngineDeadError:
            log.debug("a command came too late")

    def _add(self, message: wire.Add | wire.Pool) -> None:
        has_text = isinstance(message, wire.Add)
        options: dict[str, Any] = {"request_id": message.request_id, "priority": message.priority}
        try:
            params = wire.unpack_params(message.params) if has_text else PoolingParams(**message.params)
            self._serving.add(message.token_ids, params, stream=has_text, lean=True, **options)
        except ValueError as error:  # of the parameters
            self.outbox.put(wire.Refused(message.request_id, str(error)))
        except EngineDeadError:
            log.debug("a request came too late")

    def write(self) -> None:
        """The writer's thread."""
        try:
            while (message := self.outbox.get()) is not None:
                for data in frames(message):
                    self.connection.sendall(data)
        except OSError:  # the reader's thread ends the process
            log.debug("the server's connection broke", exc_info=True)
        except Exception:  # noqa: BLE001 - an engine that nobody hears is of no use
            log.exception("the engine can't say what it has to")
            os._exit(1)

    def beat(self) -> None:
        """The heartbeat's thread. Loading is no silence."""
        is_frozen = False
        while True:
            if self.outbox.qsize() < _MOST_UNSENT:  # a suspended server doesn't read, and beats would pile up
                loop, trouble = self.loop, None if self.group is None else self.group.links.trouble
                beat = wire.Beat(0.0, 0.0, None, trouble)
                if loop is not None:
                    beat = wire.Beat(loop.silent_s, loop.patience_s, loop.engine.stats(), trouble)
                self.outbox.put(beat)
                if not is_frozen and beat.stats is not None and beat.stats.is_compiled:
                    gc.freeze()  # what lives now lives on: while the collector searches it, each stream stands still
                    is_frozen = True
            time.sleep(BEAT_S)


def frames(message: wire.FromEngine) -> Iterator[bytes]:
    """The message's frame. Outputs that are too large for one come apart, and requests whose own is are refused."""
    try:
        yield wire.frame(message)
    except wire.FrameTooLargeError:
        if not isinstance(message, wire.Outputs):
            raise
        for output in message.outputs:
            try:
                yield wire.frame(wire.Outputs([output]))
            except wire.FrameTooLargeError as error:
                log.warning("the output of request %s is too large: %s", output.request_id, error)
                yield wire.frame(wire.Refused(output.request_id, "its output is too large; ask for less at once"))


def _command(engine: "Engine", command: EngineCommand) -> bool:
    """Does it; returns whether the engine sleeps."""
    match command.name:
        case "sleep":
            engine.sleep(command.level)
        case "wake_up":
            engine.wake_up(command.tags)
        case "reset_prefix_cache":
            engine.scheduler.forget_keys()
    return engine.is_sleeping


def main(path: str) -> int:
    from jaxllm.cli.environment import logging_level

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging_level(), format="%(levelname)s engine: %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)  # what it looked for and did not find is no news
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        first = wire.read_frame(connection)
    except OSError:
        first = None
    if first is None:  # the server was stopped before it began
        return 1
    start = wire.from_server.decode(first)
    assert isinstance(start, wire.Start), start
    process = EngineProcess(connection)
    writer, *others = (threading.Thread(target=run, daemon=True) for run in (process.write, process.read, process.beat))
    for thread in (writer, *others):
        thread.start()
    try:
        process.serve(process.load(start.options))
        return 0
    except Exception as error:  # noqa: BLE001 - the process's last act: the server is told
        is_user_error = isinstance(error, ValueError | OSError | JaxLLMError) and process.loop is None
        if not is_user_error:
            log.exception("the engine failed")
        process.outbox.put(wire.Failed(str(error), is_user_error))
        return 1
    finally:
        process.outbox.put(None)
        writer.join(timeout=_EXIT_S)
        logging.shutdown()


def _warm_up(engine: "Engine") -> None:
    """Beside the first compilations, as it would hold up steps later."""
    try:
        engine.intake.grammars.warm_up()
    except ValueError as error:  # who sends a grammar will be told
        log.info("%s", error)


if __name__ == "__main__":
    status = main(sys.argv[1])
    os._exit(status)  # a compilation can't be interrupted, and nobody waits for it any more
