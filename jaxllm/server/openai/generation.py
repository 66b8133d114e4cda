"""Runs the prompts of a request, and tells what they were."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.server.engine.client import EngineClient
from jaxllm.server.http.errors import APIError, internal, invalid
from jaxllm.server.observe.metrics import Metrics, RequestObserver, RequestTimings
from jaxllm.server.openai.prepare import GenerationJob

Record = Callable[[RequestTimings, str], None]  # its id too


class Update(NamedTuple):
    """What is new of one prompt."""

    index: int  # of the prompt
    output: RequestOutput


class TokenUsage:
    """Tokens that an HTTP request has cost so far."""

    def __init__(self, jobs: Sequence[GenerationJob], *, counts_output: bool = True):
        self._counts_output = counts_output
        self.prompt_tokens = sum(len(job.token_ids) for job in jobs)
        self.completion_tokens = self.reasoning_tokens = 0
        self._cached: dict[int, int] = {}

    def add(self, news: Update) -> None:
        if self._counts_output:
            self.completion_tokens += sum(len(completion.token_ids) for completion in news.output.outputs)
        self._cached[news.index] = news.output.num_cached_tokens

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
    """All jobs at once; their deltas as they come. Closing the iterator aborts what is left, and the end of one job
    in an error is the end of all. `record` is told of each that is over. Raises `APIError`, `EngineDeadError`."""
    streams = [_run_one(client, metrics, job, f"{request_id}-{i}", i, priority, record) for i, job in enumerate(jobs)]
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for news in stream:
                yield news
        return
    queue: asyncio.Queue[Update | BaseException | None] = asyncio.Queue(maxsize=len(jobs))
    tasks = [asyncio.create_task(_forward(stream, queue)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(stream: AsyncIterator[Update], queue: asyncio.Queue) -> None:
    async with aclosing(stream):
        try:
            async for news in stream:
                await queue.put(news)
            await queue.put(None)
        except Exception as error:  # noqa: BLE001 - raised again by whoever reads the queue
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
    outcome = RequestObserver(metrics, job)
    try:
        stream = client.generate(job.token_ids, job.params, request_id=request_id, priority=priority)
        async with aclosing(stream):
            async for output in stream:
                outcome.saw(output)
                _check(output, request_id)
                yield Update(index, output)
    except ValueError as error:
        outcome.reason = "error"
        raise invalid(str(error)) from error
    except Exception:
        outcome.reason = "error"
        raise
    finally:
        course = outcome.end()
        if record is not None:
            record(course, request_id)


def _check(output: RequestOutput, request_id: str) -> None:
    """What ended in an error, or by an order that was not the client's, is no answer."""
    reasons = {completion.finish_reason for completion in output.outputs}
    if output.error is not None or "error" in reasons:
        raise internal(request_id)
    if "abort" in reasons:
        raise APIError(
            503,
            "the request was ended by the server",
            type="service_unavailable_error",
            code="request_aborted",
            headers={"Retry-After": "2"},
        )


class Whole:
    """The deltas of one prompt put together."""

    def __init__(self) -> None:
        self.output: RequestOutput | None = None
        self.prompt_logprobs: Any = None

    def add(self, output: RequestOutput) -> None:
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.output = output if self.output is None else self.output.followed_by(output)

    @property
    def completions(self) -> list[CompletionOutput]:
        return [] if self.output is None else sorted(self.output.outputs, key=lambda completion: completion.index)
