"""An engine that others hand requests to: it turns in a thread of its own, or whenever its owner says so."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.engine.rollout_request import RolloutOutput
from jaxllm.errors import EngineDeadError
from jaxllm.outputs import RequestOutput
from jaxllm.pooling_outputs import PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams
from jaxllm.score_outputs import LoglikelihoodOutput

if TYPE_CHECKING:  # those import jax, which takes seconds
    from jaxllm.engine.engine import Engine
    from jaxllm.engine.prepare import PreparedRequest

log = logging.getLogger(__name__)

_PATIENCE, _MOST_PATIENCE_S = 5, 120.0  # times the longest of the last steps; a step that hung once is no measure
_GRAMMAR_THREADS = 2


class Delivery(NamedTuple):
    """What a request's receiver gets: an output, or why there are no more."""

    request_id: str
    receiver: Any  # as it was given with the request
    news: RequestOutput | PoolingRequestOutput | LoglikelihoodOutput | RolloutOutput | Exception


class _Ticket(NamedTuple):
    """A request on its way in."""

    request_id: str
    receiver: Any
    options: dict[str, Any]  # of `Engine.submit`


class EngineLoop:
    """Takes requests from any thread, steps, and delivers what comes of them.

    `run`, `turn` and `take` are for one thread at a time, in which `deliver` is called with everything that is new. It
    returns the ids of those whose receivers are gone; they are dropped.
    """

    def __init__(self, engine: "Engine", deliver: Callable[[list[Delivery]], Iterable[str]]):
        self.engine, self._deliver = engine, deliver
        self._receivers: dict[str, Any] = {}  # of all requests that have not ended, by id
        self._compiling: dict[str, list[Callable[[], None]]] = {}  # by id, with what was asked for meanwhile
        self._outbox: list[Delivery] = []
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._error: EngineDeadError | None = None
        self._thread: threading.Thread | None = None
        self._compilers = ThreadPoolExecutor(_GRAMMAR_THREADS, thread_name_prefix="jaxllm-grammar")
        self._progress_at = time.monotonic()
        self._steps_s: deque[float] = deque(maxlen=64)
        self._process = os.getpid()

    def add(
        self,
        token_ids: Sequence[Any],
        params: SamplingParams | PoolingParams,
        *,
        request_id: str,
        prompt: str | None = None,
        receiver: Any = None,
        **options: Any,
    ) -> None:
        """Prepares a request and submits it with `options`, those of `Engine.submit`. While a grammar is compiled,
        steps go on. What is wrong with the request is delivered: a `ValueError`, or a `RuntimeError` for a bug of ours.
        Raises `EngineDeadError` if the loop has ended."""
        ticket = _Ticket(request_id, receiver, options)
        prepare = partial(self.engine.prepare, token_ids, params, prompt=prompt)
        has_grammar = isinstance(params, SamplingParams) and params.structured_outputs is not None
        start = self._compile if has_grammar else self._submit
        self._post(partial(start, ticket, prepare))

    def submit(self, prepared: "PreparedRequest", *, request_id: str, receiver: Any = None, **options: Any) -> None:
        """Hands over a request that the engine has prepared; else as `add`."""
        self._post(partial(self._submit, _Ticket(request_id, receiver, options), lambda: prepared))

    def abort(self, request_id: str) -> None:
        """Ends a request with what it has, which is delivered. Nothing happens if it is over."""
        self._post(partial(self._abort, request_id), must=False)

    def abort_all(self) -> None:
        """Between two steps: ends all requests with what they have, which is delivered."""
        for request_id in [*self._compiling, *self._receivers]:
            self._abort(request_id)
        self._flush()

    def drop(self, request_ids: Iterable[str], receiver: Any = None) -> None:
        """Ends requests that nobody listens to any more. Nothing happens to an id that is another receiver's by now."""
        self._post(partial(self._drop, request_ids, receiver), must=False)

    def call(self, function: Callable[[], Any]) -> "Future[Any]":
        """Has `function` called between two steps; the future has what it returns or raises."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except Exception as error:  # noqa: BLE001 - the caller is told
                done.set_exception(error)

        self._post(run)
        return done

    def stop(self) -> None:
        """Ends `run`, after the step that it is in."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    @property
    def is_alive(self) -> bool:
        """Whether it still takes requests."""
        return not self._stopping and self._error is None

    @property
    def has_mail(self) -> bool:
        """Whether something has been asked for that is not done yet."""
        return bool(self._inbox)

    @property
    def silent_s(self) -> float:
        """Seconds since the engine made progress, compiling included; 0 while it has nothing to do."""
        if not self.engine.may_step:
            return 0.0
        return time.monotonic() - max(self._progress_at, self.engine.runner.compile_plan.waited_at)

    @property
    def patience_s(self) -> float:
        """For how many seconds it may be silent, as its steps are long."""
        return min(_PATIENCE * max(self._steps_s.copy(), default=0.0), _MOST_PATIENCE_S)

    def _post(self, command: Callable[[], None], *, must: bool = True) -> None:
        if os.getpid() != self._process:  # before the lock, which nobody in this process may ever open
            if must:
                raise EngineDeadError(
                    "the engine is in the process that this one was forked from, as are JAX's threads; start processes "
                    "with multiprocessing.get_context('spawn'), and build an engine there, or ask this one in its own"
                )
            return
        with self._wake:
            if self.is_alive:
                self._inbox.append(command)
                self._wake.notify()
            elif must:
                raise EngineDeadError(str(self._error or "the engine was closed")) from self._error

    def start(self) -> None:
        """Runs in a thread of its own until `close`."""
        self._thread = threading.Thread(target=self._run_logged, name="jaxllm-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, tells those who wait, and frees the device's memory."""
        self.stop()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self.engine.close()

    def run(self) -> None:
        """Turns until `stop`. Raises what kills the engine, after everyone was told."""
        error = EngineDeadError("the engine was closed")
        try:
            while self._wait_for_work():
                self._progress_at = time.monotonic()
                self.turn()
        except Exception as cause:
            error = EngineDeadError(f"the engine stopped: {cause}")
            error.__cause__ = cause
            raise
        finally:
            with self._wake:
                self._error = error
            self.take()  # what came too late is told like the others
            self.fail(error)

    def _run_logged(self) -> None:
        try:
            self.run()
        except Exception:  # noqa: BLE001 - everyone was told
            log.exception("the engine's thread failed")

    def _wait_for_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._stopping or self.engine.may_step)
            return not self._stopping

    def turn(self) -> None:
        """Does what has been asked for, then a step if there is work."""
        self.take()
        if not self.engine.may_step:
            return
        start = time.monotonic()
        outputs = self.engine.step()
        self._steps_s.append(time.monotonic() - start)
        for output in outputs:
            receiver = self._receivers.pop if output.finished else self._receivers.__getitem__
            self._outbox.append(Delivery(output.request_id, receiver(output.request_id), output))
        self._flush()

    def take(self) -> None:
        """Does what has been asked for."""
        while self._inbox:
            self._inbox.popleft()()
        self._flush()

    def fail(self, error: Exception) -> None:
        """Tells every receiver that there will be no more."""
        self._outbox += [Delivery(request_id, receiver, error) for request_id, receiver in self._receivers.items()]
        self._receivers.clear()
        self._flush()

    def _flush(self) -> None:
        if self._outbox:
            news, self._outbox = self._outbox, []
            for request_id in self._deliver(news):
                self._drop([request_id], self._receivers.get(request_id))

    def _compile(self, ticket: _Ticket, prepare: "Callable[[], PreparedRequest]") -> None:
        if ticket.request_id in self._receivers:
            self._refuse_id(ticket)
            return
        self._receivers[ticket.request_id], self._compiling[ticket.request_id] = ticket.receiver, []
        compiling = self._compilers.submit(prepare)
        compiling.add_done_callback(
            lambda done: self._post(partial(self._submit_compiled, ticket, done.result), must=False)
        )

    def _submit_compiled(self, ticket: _Ticket, prepare: "Callable[[], PreparedRequest]") -> None:
        del self._receivers[ticket.request_id]
        postponed = self._compiling.pop(ticket.request_id)
        self._submit(ticket, prepare)
        for command in postponed:
            command()

    def _submit(self, ticket: _Ticket, prepare: "Callable[[], PreparedRequest]") -> None:
        if ticket.request_id in self._receivers:
            self._refuse_id(ticket)
            return
        try:
            self.engine.submit(prepare(), request_id=ticket.request_id, **ticket.options)
        except (ValueError, EngineDeadError) as error:
            self._tell(ticket, error)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one request is no reason to end the others
            log.exception("request %s failed when it came in", ticket.request_id)
            failure = RuntimeError("the engine failed to take it; its log says why")
            failure.__cause__ = error
            self._tell(ticket, failure)
        else:
            self._receivers[ticket.request_id] = ticket.receiver

    def _refuse_id(self, ticket: _Ticket) -> None:
        self._tell(ticket, ValueError(f"request id {ticket.request_id!r} is in use; choose another"))

    def _tell(self, ticket: _Ticket, error: Exception) -> None:
        self._outbox.append(Delivery(ticket.request_id, ticket.receiver, error))

    def _abort(self, request_id: str) -> None:
        if request_id in self._compiling:
            self._compiling[request_id].append(partial(self._abort, request_id))
        elif request_id in self._receivers:
            output = self.engine.abort(request_id)
            if output is not None:
                self._outbox.append(Delivery(request_id, self._receivers.pop(request_id), output))

    def _drop(self, request_ids: Iterable[str], receiver: Any) -> None:
        for request_id in request_ids:
            if request_id in self._compiling:
                self._compiling[request_id].append(partial(self._drop, [request_id], receiver))
            elif request_id in self._receivers and self._receivers[request_id] is receiver:
                del self._receivers[request_id]
                self.engine.drop(request_id)
