"""The engine's process: steps in its main thread, and beside it one thread that reads, one that writes, one that says
how it is. Started by `process_client`; its standard input and output are not used."""

import dataclasses
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from jaxllm.errors import EngineDeadError, JaxLLMError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.engine import wire
from jaxllm.server.engine.client import EngineInfo

log = logging.getLogger(__name__)

BEAT_S = 0.25
STATS_S = 0.25
_PATIENCE, _MOST_PATIENCE_S = 5, 120.0  # times the longest of the last steps; a step that hung once is no measure
_GRAMMAR_THREADS = 2
_MOST_UNSENT = 64  # messages to the server, above which heartbeats are left out
_EXIT_S = 5.0  # for a step that runs when the server goes away


class Pulse:
    """When the engine last made progress. The engine's thread writes, the heartbeat's reads."""

    def __init__(self) -> None:
        self.is_busy = True  # it loads
        self.engine: Any = None
        self.stats: Any = None
        self._at = time.monotonic()
        self._steps_s: deque[float] = deque(maxlen=64)

    def progress(self, *, is_busy: bool, step_s: float | None = None) -> None:
        if step_s is not None:
            self._steps_s.append(step_s)
        self.is_busy, self._at = is_busy, time.monotonic()

    def beat(self) -> wire.Beat:
        at = self._at if self.engine is None else max(self._at, self.engine.runner.compile_plan.waited_at)
        is_loading = self.engine is None
        silent_s = time.monotonic() - at if self.is_busy and not is_loading else 0.0
        longest_s = max(self._steps_s.copy(), default=0.0)
        return wire.Beat(silent_s, min(_PATIENCE * longest_s, _MOST_PATIENCE_S), self.stats)


class Compiled(NamedTuple):
    """A request whose grammar a thread has compiled, or has found fault with."""

    message: wire.Add
    params: SamplingParams
    grammar: Any
    error: str | None


class EngineLoop:
    """Takes requests from `inbox`, steps, and hands every step's news to the writer as one frame."""

    def __init__(
        self, engine: Any, pulse: Pulse, inbox: "queue.SimpleQueue[wire.FromServer | Compiled | None]", send: Any
    ):
        self._engine, self._pulse, self._inbox, self._send = engine, pulse, inbox, send
        self._has_prompt_logprobs: set[str] = set()  # requests whose prompt's were sent
        self._stats_at = 0.0
        self._compiling: dict[str, wire.Abort | None] = {}  # requests by id, with an abort that came meanwhile
        self._threads = ThreadPoolExecutor(_GRAMMAR_THREADS, thread_name_prefix="jaxllm-grammar")

    def run(self) -> None:
        """Until the server is gone; then the log says whether all blocks came back. Raises what kills the engine."""
        while True:
            is_busy = self._engine.has_work()
            if not is_busy:
                self._tell_stats(now=True)
                self._pulse.progress(is_busy=False)
            if not self._take(wait=not is_busy):
                break
            if self._engine.has_work():
                start = time.monotonic()
                self._pulse.progress(is_busy=True)
                news = self._engine.step()
                self._pulse.progress(is_busy=True, step_s=time.monotonic() - start)
                self._tell_stats(now=False)
                if news:
                    self._send(wire.Outputs([self._lean(output) for output in news]))

        self._engine.scheduler.check()
        stats = self._engine.stats()
        log.info(
            "the server has gone; %d of %d blocks are used, and the books are in order",
            stats.blocks_used,
            stats.num_blocks,
        )

    def _take(self, *, wait: bool) -> bool:
        """Does what has been asked for; with `wait`, at least one thing. False if there is no server any more."""
        while wait or not self._inbox.empty():
            try:
                message = self._inbox.get(timeout=None if self._is_compiled else STATS_S)
            except queue.Empty:
                self._tell_stats(now=True)  # what compiles meanwhile
                continue
            if message is None:
                return False
            wait = False
            if isinstance(message, wire.Add):
                self._receive(message)
            elif isinstance(message, Compiled):
                self._add_compiled(message)
            elif isinstance(message, wire.Abort):
                self._abort(message)
        return True

    def _receive(self, message: wire.Add) -> None:
        try:
            params = wire.unpack_params(message.params)
        except ValueError as error:
            self._send(wire.Refused(message.request_id, str(error)))
            return
        if params.structured_outputs is None:
            self._add(message, params)
        else:  # steps go on meanwhile
            self._compiling[message.request_id] = None
            self._threads.submit(self._compile, message, params)

    def _compile(self, message: wire.Add, params: SamplingParams) -> None:
        try:
            self._inbox.put(Compiled(message, params, self._engine.compile_grammar(params), None))
        except ValueError as error:
            self._inbox.put(Compiled(message, params, None, str(error)))
        except Exception as error:  # noqa: BLE001 - one request's failure; whoever sent it must hear of it
            log.exception("compiling a grammar failed")
            self._inbox.put(Compiled(message, params, None, f"the grammar can't be compiled: {error}"))

    def _add_compiled(self, compiled: Compiled) -> None:
        abort = self._compiling.pop(compiled.message.request_id)
        if compiled.error is not None:
            self._send(wire.Refused(compiled.message.request_id, compiled.error))
            return
        self._add(compiled.message, compiled.params, compiled.grammar)
        if abort is not None:
            self._abort(abort)

    def _add(self, message: wire.Add, params: SamplingParams, grammar: Any = None) -> None:
        try:
            self._engine.add(
                message.token_ids,
                params,
                request_id=message.request_id,
                priority=message.priority,
                stream=True,
                grammar=grammar,
            )
        except ValueError as error:
            self._send(wire.Refused(message.request_id, str(error)))
        except EngineDeadError:
            raise
        except Exception:  # noqa: BLE001 - whatever is wrong with one request is no reason to end the others
            log.exception("request %s failed when it came in", message.request_id)
            self._send(wire.Refused(message.request_id, None))

    def _abort(self, message: wire.Abort) -> None:
        if message.request_id in self._compiling:
            self._compiling[message.request_id] = message
            return
        output = self._engine.abort(message.request_id)
        self._has_prompt_logprobs.discard(message.request_id)
        if output is not None and message.tells:
            self._send(wire.Outputs([self._lean(output)]))

    def _lean(self, output: RequestOutput) -> RequestOutput:
        """Without what the server knows already."""
        scores = output.prompt_logprobs
        if scores is not None and output.request_id in self._has_prompt_logprobs:
            scores = None
        elif scores is not None:
            self._has_prompt_logprobs.add(output.request_id)
        if output.finished:
            self._has_prompt_logprobs.discard(output.request_id)
        return dataclasses.replace(output, prompt=None, prompt_token_ids=[], prompt_logprobs=scores)

    @property
    def _is_compiled(self) -> bool:
        stats = self._pulse.stats
        return stats is not None and stats.num_compiled + stats.num_failed_executables >= stats.num_executables

    def _tell_stats(self, *, now: bool) -> None:
        if now or time.monotonic() - self._stats_at > STATS_S:
            self._pulse.stats, self._stats_at = self._engine.stats(), time.monotonic()


def _read(connection: socket.socket, inbox: queue.SimpleQueue) -> None:
    """The reader's thread. Without a server this process has no purpose: it ends, even in the middle of a step."""
    try:
        while (data := wire.read_frame(connection)) is not None:
            inbox.put(wire.from_server.decode(data))
    except (OSError, msgspec.MsgspecError):
        log.debug("the server's connection broke", exc_info=True)
    inbox.put(None)
    time.sleep(_EXIT_S)
    os._exit(1)


def _write(connection: socket.socket, outbox: queue.SimpleQueue) -> None:
    try:
        while (message := outbox.get()) is not None:
            connection.sendall(wire.frame(message))
    except OSError:  # the reader's thread ends the process
        log.debug("the server's connection broke", exc_info=True)
    except Exception:  # noqa: BLE001 - an engine that nobody hears is of no use
        log.exception("the engine can't say what it has to")
        os._exit(1)


def _beat(pulse: Pulse, outbox: queue.SimpleQueue) -> None:
    while True:
        if outbox.qsize() < _MOST_UNSENT:  # a suspended server doesn't read, and beats would pile up
            outbox.put(pulse.beat())
        time.sleep(BEAT_S)


def main(path: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s engine: %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)  # what it looked for and did not find is no news
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    start = wire.from_server.decode(wire.read_frame(connection) or b"")
    inbox, outbox, pulse = queue.SimpleQueue(), queue.SimpleQueue(), Pulse()
    writer = threading.Thread(target=_write, args=(connection, outbox), daemon=True)
    writer.start()
    for target, args in ((_read, (connection, inbox)), (_beat, (pulse, outbox))):
        threading.Thread(target=target, args=args, daemon=True).start()
    try:
        _serve(start.options, pulse, inbox, outbox.put)
        return 0
    except Exception as error:  # noqa: BLE001 - the process's last act: the server is told
        is_user_error = isinstance(error, ValueError | OSError | JaxLLMError) and pulse.engine is None
        if not is_user_error:
            log.exception("the engine failed")
        outbox.put(wire.Failed(str(error), is_user_error))
        return 1
    finally:
        outbox.put(None)
        writer.join(timeout=_EXIT_S)
        logging.shutdown()


def _serve(options: dict[str, Any], pulse: Pulse, inbox: queue.SimpleQueue, send: Any) -> None:
    from jaxllm.cli.common import setup_compilation_cache, setup_device_memory

    setup_device_memory(options.get("gpu_memory_utilization"))
    setup_compilation_cache()
    from jaxllm.engine.build import build_engine  # imports jax, while heartbeats are sent already

    engine = build_engine(**options)
    threading.Thread(target=_warm_up, args=(engine,), daemon=True).start()
    pulse.progress(is_busy=False)
    pulse.engine, pulse.stats = engine, engine.stats()
    send(wire.Ready(EngineInfo(engine.config, engine.vocab), pulse.stats))
    EngineLoop(engine, pulse, inbox, send).run()


def _warm_up(engine: Any) -> None:
    """Beside the first compilations, as it would hold up steps later."""
    try:
        engine.warm_up_grammars()
    except ValueError as error:  # who sends a grammar will be told
        log.info("%s", error)


if __name__ == "__main__":
    status = main(sys.argv[1])
    os._exit(status)  # a compilation can't be interrupted, and nobody waits for it any more
