"""`AsyncLLM`: the engine in a thread of its own, its requests as async iterators."""

import asyncio
import atexit
import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from jaxllm.engine.build import build_engine
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.stats import EngineStats
from jaxllm.errors import EngineDeadError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.prompts import parse_prompt

log = logging.getLogger(__name__)


class _Stream:
    """The newest output of one request, for one consumer: a slow reader skips some, or gets several deltas in one."""

    def __init__(self, *, is_delta: bool) -> None:
        self._is_delta = is_delta
        self.loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._newest: RequestOutput | Exception | None = None

    def put(self, news: RequestOutput | Exception) -> None:
        unread = self._newest if self._changed.is_set() else None
        if self._is_delta and isinstance(unread, RequestOutput) and isinstance(news, RequestOutput):
            news = unread.followed_by(news)
        self._newest = news
        self._changed.set()

    async def get(self) -> RequestOutput:
        await self._changed.wait()
        self._changed.clear()
        if isinstance(self._newest, Exception):
            raise self._newest
        return self._newest


class AsyncLLM:
    """A model that serves concurrent requests from any number of asyncio tasks. Takes `LLM`'s arguments."""

    def __init__(self, model: Any = None, **options: Any):
        self._engine = build_engine(model, **options)
        self._ids = itertools.count()
        self._streams: dict[str, _Stream] = {}  # touched by the engine's thread only
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._error: EngineDeadError | None = None
        self._progress_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="jaxllm-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that dies inside the runtime would take the process down

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def vocab(self) -> int:
        return self._engine.vocab

    @property
    def is_alive(self) -> bool:
        """Whether it still takes requests."""
        return self._thread.is_alive() and not self._closing and self._error is None

    @property
    def silent_s(self) -> float:
        """Seconds since the engine made progress, compiling included; 0 while it has nothing to do."""
        if not self._engine.has_work():
            return 0.0
        return time.monotonic() - max(self._progress_at, self._engine.runner.compile_plan.waited_at)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the output so far (or what `output_kind` says) whenever it has grown, the finished one last. Leaving
        the iterator early, or cancelling its task, aborts the request.

        `prompt` is a string, `{"prompt": str}` or `{"prompt_token_ids": [...]}`. Raises `ValueError` for what can't
        be served, and `EngineDeadError` if the engine stops.
        """
        params = sampling_params or SamplingParams()
        request_id = f"async-{next(self._ids)}" if request_id is None else request_id
        parsed = await asyncio.to_thread(parse_prompt, prompt, self.tokenizer)
        self._engine.validate(parsed.token_ids, params)
        grammar = None
        if params.structured_outputs is not None:
            grammar = await asyncio.to_thread(self._engine.compile_grammar, params)
        stream = _Stream(is_delta=params.output_kind is RequestOutputKind.DELTA)
        if not self._post(lambda: self._add(stream, parsed, params, request_id, priority, grammar)):
            raise self._error or EngineDeadError("the engine was closed")
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._post(lambda: self._drop(request_id, stream))

    def abort(self, request_id: str) -> None:
        """Ends a request; its iterator yields a last output with finish_reason "abort" for what was unfinished."""
        self._post(lambda: self._abort(request_id))

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self) -> None:
        """Aborts what is left, stops the thread and frees the device's memory."""
        atexit.unregister(self.close)
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._engine.close()

    # ---- the engine's thread

    def _post(self, command: Callable[[], None]) -> bool:
        """Hands a command to the engine's thread; False if it has stopped and will run no more."""
        with self._wake:
            if self._closing or self._error is not None:
                return False
            self._inbox.append(command)
            self._wake.notify()
            return True

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._progress_at = time.monotonic()
                while self._inbox:
                    self._inbox.popleft()()
                if self._engine.has_work():
                    self._deliver(self._engine.step())
            error = EngineDeadError("the engine was closed")
        except Exception as cause:  # noqa: BLE001 - the thread's last act: every consumer is told
            log.exception("the engine's thread failed")
            error = EngineDeadError(f"the engine stopped: {cause}")
            error.__cause__ = cause
        with self._wake:
            self._error = error
            while self._inbox:  # requests that came too late get the error like the others
                self._inbox.popleft()()
        for stream in self._streams.values():
            self._call(stream.loop, stream.put, error)

    def _wait_for_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._closing or self._engine.has_work())
            return not self._closing

    def _add(
        self, stream: _Stream, prompt: Any, params: SamplingParams, request_id: str, priority: int, grammar: Any
    ) -> None:
        try:
            self._engine.add(
                prompt.token_ids,
                params,
                request_id=request_id,
                prompt=prompt.text,
                priority=priority,
                stream=True,
                grammar=grammar,
            )
        except (ValueError, EngineDeadError) as error:  # an id in use, say
            self._call(stream.loop, stream.put, error)
        else:
            self._streams[request_id] = stream

    def _abort(self, request_id: str) -> None:
        output = self._engine.abort(request_id)
        if output is not None:
            self._deliver([output])

    def _drop(self, request_id: str, stream: _Stream) -> None:
        """Aborts for a consumer that has gone, unless the id is another's by now."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._engine.abort(request_id)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = defaultdict(list)
        for output in outputs:
            stream = self._streams.pop(output.request_id) if output.finished else self._streams[output.request_id]
            by_loop[stream.loop].append((stream, output))
        for loop, news in by_loop.items():
            if not self._call(loop, _put_all, news):
                for stream, output in news:
                    if not output.finished:
                        self._drop(output.request_id, stream)

    def _call(self, loop: asyncio.AbstractEventLoop, fn: Callable, *args: Any) -> bool:
        """Runs `fn` in an event loop; False if that loop is closed, and nobody listens any more."""
        if loop.is_closed():
            return False
        loop.call_soon_threadsafe(fn, *args)
        return True


def _put_all(news: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in news:
        stream.put(output)
