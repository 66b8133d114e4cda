"""State shared by the routes: the model, the engine's client, the text threads, the limits."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from jaxllm.server.config import ServerConfig
from jaxllm.server.engine.client import EngineClient, EngineInfo
from jaxllm.server.grammar_checks import GrammarChecks
from jaxllm.server.http.body import SMALL_BODY_BYTES, BodyBudget
from jaxllm.server.http.errors import APIError, engine_dead, invalid, unavailable
from jaxllm.server.http.exchange import Exchange
from jaxllm.server.http.limits import RequestLimit
from jaxllm.server.http.queue_position import ArrivalQueue
from jaxllm.server.observe.access import RequestRecord, log_request
from jaxllm.server.observe.metrics import Metrics
from jaxllm.server.openai.decoding import Request, decode
from jaxllm.server.openai.generation import Update, run
from jaxllm.server.openai.prepare import GenerationJob
from jaxllm.server.openai.schemas import MAX_LOGPROB_ENTRIES
from jaxllm.server.served_model import ServedModel

if TYPE_CHECKING:
    from jaxllm.server.observe.tracing import Tracing

log = logging.getLogger(__name__)

_TEXT_THREADS = 2
_TICK_S = 0.2
_MOST_LOGPROBS = 4 * MAX_LOGPROB_ENTRIES  # of answers that are being made, for more than one text each
Result = TypeVar("Result")


class Server:
    """The state of one server. `start` and `close` run in its event loop."""

    def __init__(
        self, config: ServerConfig, client: EngineClient, model: ServedModel, *, tracing: "Tracing | None" = None
    ):
        self.config, self.client, self.model = config, client, model
        self._tracing = tracing
        self.bodies = BodyBudget(config.max_body_memory_bytes)
        self.limit = RequestLimit(config.max_queued_requests)
        self._num_logprobs = 0  # of the answers that are being made
        self.metrics = Metrics(model.name, client, vllm_names=config.vllm_metric_names)
        self.arrivals = ArrivalQueue()
        self.grammars = GrammarChecks(model, self.metrics, several_keys=len(config.api_keys) > 1)
        self._texts = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="jaxllm-text")
        # Those of big bodies, so that small ones don't wait for them.
        self._big_texts = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="jaxllm-big-text")
        self._big_bodies = ThreadPoolExecutor(1, thread_name_prefix="jaxllm-decode")
        self._is_hung = False
        self.is_asleep = False  # the engine sleeps, or is about to
        self._watchdog: asyncio.Task | None = None

    async def start(self) -> None:
        """Returns when the engine takes requests; raises what `EngineClient.start` raises."""
        self._watchdog = asyncio.create_task(self._watch())
        await self.client.start()
        self.limit.max_running = self.client.info.config.most_running

    async def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.gather(self._watchdog, return_exceptions=True)
        await self.client.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        for pool in (self._texts, self._big_texts, self._big_bodies, self.grammars):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def is_live(self) -> bool:
        """Whether the engine makes progress, is idle, or is loading."""
        health = self.client.health()
        return health.is_alive and health.trouble is None and not self._is_hung

    @property
    def is_ready(self) -> bool:
        return self.is_live and self.client.info is not None and not self.limit.is_draining and not self.is_asleep

    async def _watch(self) -> None:
        """Detects a hung engine and measures the event loop's lag."""
        while True:
            start = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self.metrics.loop_lag_s.set(max(0.0, time.monotonic() - start - _TICK_S))
            health = self.client.health()
            limit = max(self.config.watchdog_s, health.patience_s)
            was_hung, self._is_hung = self._is_hung, health.is_alive and health.silent_s > limit
            if self._is_hung and not was_hung:
                log.error("the engine has made no progress for %.0f s; its requests are ended", health.silent_s)
                self.client.fail_all(f"the engine has made no progress for {limit:.0f} s")
            elif was_hung and not self._is_hung:
                log.warning("the engine makes progress again" if health.is_alive else "the engine has stopped")

    def check_ready(self, request_id: str) -> EngineInfo:
        """Raises `APIError` if a request would not be served now."""
        if self.limit.is_draining:
            raise unavailable("the server is shutting down; try another, or this one later")
        if not self.client.health().is_alive:
            raise engine_dead(request_id)
        if self._is_hung:
            raise unavailable("the engine makes no progress; try another server, or this one later")
        info = self.client.info
        if info is None:
            raise unavailable("the model is being loaded; try again soon", code="model_loading")
        self._check_awake()
        return info

    def _check_awake(self) -> None:
        if self.is_asleep:
            raise unavailable(
                "the engine sleeps; try another server, or wait until this one is woken", code="engine_asleep"
            )

    def check_priority(self, priority: int | None) -> None:
        """Raises `APIError` for a priority where clients may not have one."""
        if priority and not self.config.has_priorities:
            raise invalid(
                f"priority={priority} is not allowed here, as all requests are served in the order they came; leave it "
                "out, or start the server with --scheduling-policy priority",
                "priority",
            )

    async def decode(self, kind: type[Request], body: bytearray) -> Request:
        """The request in a JSON body; big ones are decoded outside the event loop, one at a time. Raises `APIError`."""
        if len(body) <= SMALL_BODY_BYTES:
            return decode(kind, body)
        return await asyncio.get_running_loop().run_in_executor(self._big_bodies, decode, kind, body)

    async def in_thread(self, exchange: Exchange, work: Callable[..., Result], *args: Any, size: int = 0) -> Result:
        """Runs template and tokenizer work for a request outside the event loop, a few at a time. `size` is that of its
        texts, in characters, where it is more than the body's: big ones don't hold up small ones."""
        pool = self._texts if max(size, exchange.num_body_bytes) <= SMALL_BODY_BYTES else self._big_texts
        return await asyncio.get_running_loop().run_in_executor(pool, work, *args)

    async def run(
        self,
        jobs: list[GenerationJob],
        exchange: Exchange,
        *,
        request_id: str,
        priority: int | None,
        reports_position: bool = False,
    ) -> AsyncIterator[Update]:
        self._check_awake()  # it may have fallen asleep since the request came
        record = None
        if self._tracing is not None:
            record = partial(self._tracing.record, headers=exchange.headers)
        if self.config.isolates_keys and exchange.tenant is not None:
            jobs = [job.salted(exchange.tenant) for job in jobs]
        exchange.record.num_prompt_tokens = sum(len(job.token_ids) for job in jobs)
        stream = run(self.client, self.metrics, jobs, request_id=request_id, priority=priority or 0, record=record)
        with self.arrivals.join(priority or 0) as position:
            if reports_position:
                exchange.ahead = lambda: position.ahead(self._num_waiting())
            async with aclosing(stream):
                async for update in stream:
                    position.leave()
                    exchange.record.num_output_tokens += sum(len(one.token_ids) for one in update.output.outputs)
                    yield update

    def report(self, record: RequestRecord) -> None:
        """Counts an HTTP request that is over, and logs it if that is wanted."""
        self.metrics.answered(record)
        if self.config.logs_requests:
            log_request(record)

    def _num_waiting(self) -> int:
        stats = self.client.stats()
        return 0 if stats is None else stats.num_waiting

    @contextmanager
    def hold_logprobs(self, jobs: Sequence[GenerationJob]) -> Iterator[None]:
        """Counts those that the jobs' answer may have while it is made: engine and server hold them. Raises `APIError`
        503 if those of all answers together would be too many."""
        count = sum(job.num_logprobs for job in jobs)
        if self._num_logprobs + count > _MOST_LOGPROBS:
            self.metrics.rejected("max_logprobs")
            raise unavailable("the answers that are being made have too many log-probabilities; try again later")
        self._num_logprobs += count
        try:
            yield
        finally:
            self._num_logprobs -= count

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Admits `count` requests to the engine for the duration of the context. Raises `APIError`."""
        with ExitStack() as stack:
            try:
                stack.enter_context(self.limit.admit(count))
            except APIError as error:
                if error.status == 503:
                    self.metrics.rejected()
                raise
            yield
