"""An engine that turns in its callers' own threads, a step whenever one of them waits for an output."""

import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxllm.engine.engine import Engine
from jaxllm.engine.loop import Delivery, EngineLoop
from jaxllm.engine.prepare import PreparedRequest
from jaxllm.errors import EngineError
from jaxllm.interrupts import HeldSignals
from jaxllm.outputs import RequestOutput

Inbox = deque[RequestOutput | Exception]  # what one caller has not read yet


class CallerLoop:
    """Any number of callers, each with the outputs of its own requests: whoever makes a step brings all of them theirs.

    Ctrl-C takes effect when the step is over. A second one takes effect at once: it tears the step, and all requests
    are lost.
    """

    def __init__(self, engine: Engine):
        self._engine, self._loop = engine, EngineLoop(engine, _deliver)
        self._turning = threading.Lock()

    def submit(self, prepared: PreparedRequest, inbox: Inbox, **options: Any) -> None:
        """Hands over a request, with the options of `Engine.submit`. `EngineDeadError` if the engine is closed."""
        self._loop.submit(prepared, receiver=inbox, **options)

    def wait(self, inbox: Inbox) -> Iterator[RequestOutput]:
        """Makes a step, unless another thread's has brought something meanwhile; then what there is to read, possibly
        nothing. Raises what tore the step, or another caller's."""
        with self._turning:
            if not inbox:
                self._turn()
        while inbox:
            news = inbox.popleft()
            if isinstance(news, Exception):
                raise news
            yield news

    def _turn(self) -> None:
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
    def between_steps(self) -> Iterator[None]:
        """Keeps other threads from stepping."""
        with self._turning:
            yield

    def close(self) -> None:
        """Frees the device's memory and stops compiling."""
        self._loop.close()


def _deliver(deliveries: list[Delivery]) -> tuple[str, ...]:
    for delivery in deliveries:
        delivery.receiver.append(delivery.news)
    return ()
