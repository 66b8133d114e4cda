"""An engine that turns in its callers' own threads, a step whenever one of them waits for an output."""

import signal
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxllm.engine.engine import Engine
from jaxllm.engine.loop import Delivery, EngineLoop
from jaxllm.engine.prepare import PreparedRequest
from jaxllm.engine.requests import Output
from jaxllm.errors import EngineError, EnginePausedError
from jaxllm.interrupts import HeldSignals
from jaxllm.sampling_params import RequestOutputKind


class Inbox:
    """What one caller has not read yet. Deltas wait one by one; of outputs that hold all so far only the newest does,
    so that a stream that is left open takes memory for each token once. Thread-safe."""

    def __init__(self) -> None:
        self._unread: OrderedDict[Hashable, Output | Exception] = OrderedDict()
        self._of_deltas: set[str] = set()  # requests
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._unread)

    def expect_deltas(self, request_id: str) -> None:
        """Outputs of this request are deltas."""
        self._of_deltas.add(request_id)

    def put(self, request_id: str, news: Output | Exception) -> None:
        with self._lock:
            self._unread[object() if request_id in self._of_deltas else request_id] = news

    def take(self) -> Any:
        """The output that has waited longest, of the kind that was asked for; None if there is none. Raises the
        exception if it is one."""
        with self._lock:
            if not self._unread:
                return None
            _, news = self._unread.popitem(last=False)
        if isinstance(news, Exception):
            raise news
        return news


class CallerLoop:
    """Any number of callers, each with the outputs of its own requests: whoever makes a step brings all of them theirs.

    Ctrl-C takes effect when the step is over. A second one takes effect at once: it tears the step, and all requests
    are lost.
    """

    def __init__(self, engine: Engine):
        self._engine, self._loop = engine, EngineLoop(engine, _deliver)
        self._turning = threading.Lock()
        self._resumed = threading.Event()  # cleared while it is paused
        self._resumed.set()
        self._paused_by = 0  # a thread

    def submit(self, prepared: PreparedRequest, inbox: Inbox, **options: Any) -> None:
        """Hands over a request, with the options of `Engine.submit`. `EngineDeadError` if the engine is closed."""
        if options.get("stream") and prepared.params.output_kind is RequestOutputKind.DELTA:
            inbox.expect_deltas(options["request_id"])
        self._loop.submit(prepared, receiver=inbox, **options)

    def wait(self, inbox: Inbox) -> Iterator[Any]:
        """Makes a step, unless another thread's has brought something meanwhile; then what there is to read, possibly
        nothing. Raises what tore the step, or another caller's."""
        is_over = False
        while not is_over:
            self._await_resumed()
            with self._turning:
                is_over = self._resumed.is_set()
                if is_over and not inbox:
                    self._turn()
        while (output := inbox.take()) is not None:
            yield output

    def _await_resumed(self) -> None:
        if not self._resumed.is_set() and self._paused_by == threading.get_ident():
            raise EnginePausedError("this thread has paused the engine, and would wait for ever; resume() it first")
        self._resumed.wait()

    def pause(self) -> None:
        """Those who wait for outputs make no more steps, and wait until `resume`. Returns between two steps."""
        with self._turning:
            self._paused_by = threading.get_ident()
            self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    def _turn(self) -> None:
        if self._loop.has_mail:
            with HeldSignals(signal.SIGINT) as held:
                self._loop.take()
            held.act()
        self._engine.wait_ready()  # for what was just taken; compiling may be left at any time
        with HeldSignals(signal.SIGINT) as held:
            try:
                self._loop.turn()
                self._loop.take()  # what was dropped meanwhile
            except BaseException as error:
                is_told = isinstance(error, EngineError)
                self._loop.fail(error if is_told else EngineError(f"a step was stopped halfway: {error!r}; ask again"))
                raise
        held.act()

    def drop(self, request_ids: Iterable[str], inbox: Inbox) -> None:
        """Ends those of the caller's requests that are not over: now, or behind the step that another thread makes."""
        with HeldSignals(signal.SIGINT) as held:
            self._loop.drop(list(request_ids), inbox)
            if self._turning.acquire(blocking=False):
                try:
                    self._loop.take()
                finally:
                    self._turning.release()
        held.act()

    @contextmanager
    def between_steps(self) -> Iterator[EngineLoop]:
        """Keeps other threads from stepping."""
        with self._turning:
            yield self._loop

    def close(self) -> None:
        """Frees the device's memory and stops compiling."""
        self._loop.close()
        self._resumed.set()


def _deliver(deliveries: list[Delivery]) -> tuple[str, ...]:
    for delivery in deliveries:
        delivery.receiver.put(delivery.request_id, delivery.news)
    return ()
