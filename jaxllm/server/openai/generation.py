"""Runs the prompts of an HTTP request and yields their updates."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from jaxllm.engine.schedule.plan import NO_TOKEN, NO_TOKEN_ERRORS
from jaxllm.grammar.matcher import GAVE_OUT, NO_TOKEN_ALLOWED
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.server.engine.client import EngineClient
from jaxllm.server.http.errors import APIError, internal, invalid
from jaxllm.server.observe.metrics import Metrics, RequestObserver, RequestTimings
from jaxllm.server.openai.prepare import GenerationJob

log = logging.getLogger(__name__)

_REQUESTS_OWN = (GAVE_OUT, NO_TOKEN_ALLOWED, NO_TOKEN_ERRORS[NO_TOKEN])  # errors that its own parameters lead to
Record = Callable[[RequestTimings, str], None]  # timings and request id


class Update(NamedTuple):
    """A delta of one prompt's output."""

    index: int  # of the prompt
    output: RequestOutput


class TokenUsage:
    """The tokens that an HTTP request has used so far."""

    def __init__(self, jobs: Sequence[GenerationJob], *, counts_output: bool = True):
        self._counts_output = counts_output
        self.prompt_tokens = sum(len(job.token_ids) for job in jobs)
        self.completion_tokens = self.reasoning_tokens = 0
        self._cached: dict[int, int] = {}

    def add(self, update: Update) -> None:
        if self._counts_output:
            self.completion_tokens += sum(len(completion.token_ids) for completion in update.output.outputs)
        self._cached[update.index] = update.output.num_cached_tokens

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    def answer(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


async def run(
    client: EngineClient,
    metrics: Metrics,
    jobs: Sequence[GenerationJob],
    *,
    request_id: str,
    priority: int,
    record: Record | None = None,
) -> AsyncIterator[Update]:
    """Runs all jobs at once and yields their updates. Closing the iterator aborts the unfinished jobs, and an error of
    one job ends all. `record` is called with each finished job. Raises `APIError`, `EngineDeadError`."""
    streams = [_run_one(client, metrics, job, f"{request_id}-{i}", i, priority, record) for i, job in enumerate(jobs)]
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for update in stream:
                yield update
        return
    queue: asyncio.Queue[Update | BaseException | None] = asyncio.Queue(maxsize=len(jobs))
    tasks = [asyncio.create_task(_forward(stream, queue)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            update = await queue.get()
            if isinstance(update, BaseException):
                raise update
            if update is None:
                left -= 1
            else:
                yield update
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(stream: AsyncIterator[Update], queue: asyncio.Queue) -> None:
    async with aclosing(stream):
        try:
            async for update in stream:
                await queue.put(update)
            await queue.put(None)
        except Exception as error:  # noqa: BLE001 - the reader of the queue raises it
            await queue.put(error)


async def _run_one(
    client: EngineClient,
    metrics: Metrics,
    job: GenerationJob,
    request_id: str,
    index: int,
    priority: int,
    record: Record | None,
) -> AsyncIterator[Update]:
    observer = RequestObserver(metrics, job)
    try:
        stream = client.generate(job.token_ids, job.params, request_id=request_id, priority=priority)
        async with aclosing(stream):
            async for output in stream:
                observer.saw(output)
                _check(output, request_id)
                yield Update(index, output)
    except ValueError as error:
        observer.reason = "error"
        raise invalid(str(error)) from error
    except Exception:
        observer.reason = "error"
        raise
    finally:
        timings = observer.end()
        if record is not None:
            record(timings, request_id)


def _check(output: RequestOutput, request_id: str) -> None:
    """Raises `APIError` for an output that ended with an error or that the server aborted."""
    reasons = {completion.finish_reason for completion in output.outputs}
    if output.error is not None or "error" in reasons:
        is_own = output.error is not None and output.error.startswith(_REQUESTS_OWN)
        level = logging.INFO if is_own else logging.ERROR
        log.log(level, "request %s ended: %s", request_id, output.error or "the engine does not say why")
        if is_own:
            raise invalid(f"the request can't go on: {output.error}")
        raise internal(request_id)
    if "abort" in reasons:
        raise APIError(
            503,
            "the request was ended by the server",
            type="service_unavailable_error",
            code="request_aborted",
            headers={"Retry-After": "2"},
        )


class MergedOutput:
    """The updates of one prompt, merged."""

    def __init__(self) -> None:
        self.output: RequestOutput | None = None
        self.prompt_logprobs: Any = None

    def add(self, output: RequestOutput) -> None:
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.output = output if self.output is None else self.output.followed_by(output)

    @property
    def completions(self) -> list[CompletionOutput]:
        return [] if self.output is None else sorted(self.output.outputs, key=lambda completion: completion.index)
