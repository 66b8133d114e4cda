"""POST /v1/completions."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jaxllm.outputs import CompletionOutput
from jaxllm.server.http.exchange import DONE, Exchange
from jaxllm.server.openai.generation import MergedOutput, TokenUsage, Update
from jaxllm.server.openai.logprobs import CompletionLogprobs, LogprobsFormat, has_logprobs, joined, prompt_logprobs
from jaxllm.server.openai.prepare import GenerationJob
from jaxllm.server.openai.schemas import CompletionRequest
from jaxllm.server.served_model import ServedModel


class CompletionAnswer:
    """Formats the engine's output as OpenAI's text completion, whole or in chunks."""

    def __init__(
        self, request: CompletionRequest, jobs: Sequence[GenerationJob], *, answer_id: str, model: ServedModel
    ):
        self.request, self.jobs, self._model = request, jobs, model
        self._base = {"id": answer_id, "object": "text_completion", "created": int(time.time()), "model": request.model}
        self._hides_output = request.max_tokens == 0
        self.usage = TokenUsage(jobs, counts_output=not self._hides_output)
        self._n = request.n or 1
        form = LogprobsFormat.of(request, request.logprobs)
        self._logprobs = {index: CompletionLogprobs(form) for index in range(len(jobs) * self._n)}
        self._scores: dict[int, Any] = {}  # prompt log-probabilities, which the engine reports once
        self._echoed: set[int] = set()  # choices whose prompt was shown

    async def unary(self, exchange: Exchange, updates: AsyncIterator[Update]) -> None:
        merged_outputs = [MergedOutput() for _ in self.jobs]
        async for update in updates:
            self.usage.add(update)
            merged_outputs[update.index].add(update.output)

        def answer() -> dict[str, Any]:
            choices = [
                self._choice(index, completion, merged.prompt_logprobs, is_last=True)
                for index, merged in enumerate(merged_outputs)
                for completion in merged.completions
            ]
            return self._base | {"choices": choices, "usage": self.usage.answer()}

        await exchange.json_of(answer, is_large=has_logprobs(self.request))

    async def stream(self, exchange: Exchange, updates: AsyncIterator[Update]) -> None:
        options = self.request.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        keeps_usage = wants_usage and bool(options.continuous_usage_stats)
        async with exchange.events():
            async for update in updates:
                self.usage.add(update)
                scores = update.output.prompt_logprobs or self._scores.get(update.index)
                self._scores[update.index] = scores
                for completion in update.output.outputs:
                    is_last = completion.finish_reason is not None
                    choice = self._choice(update.index, completion, scores, is_last=is_last)
                    chunk = self._base | {"choices": [choice]}
                    if wants_usage:
                        chunk["usage"] = self.usage.answer() if keeps_usage else None
                    await exchange.event(chunk)
            if wants_usage:
                await exchange.event(self._base | {"choices": [], "usage": self.usage.answer()})
            await exchange.write(DONE)

    def _choice(self, prompt: int, completion: CompletionOutput, scores: Any, *, is_last: bool) -> dict[str, Any]:
        """One choice, or its delta."""
        index, job = prompt * self._n + completion.index, self.jobs[prompt]
        is_first = index not in self._echoed
        self._echoed.add(index)
        text = "" if self._hides_output else completion.text
        parts = []
        if self.request.echo and is_first:
            text = (job.text or "") + text
            if self.request.logprobs is not None:
                first = self._first_text(job)
                has_first = (job.text or "").startswith(first)
                parts.append(self._logprobs[index].part(job.token_ids, scores, first=first, has_first=has_first))
        if self.request.logprobs is not None and not self._hides_output:
            parts.append(self._logprobs[index].part(completion.token_ids, completion.logprobs or []))
        choice = {
            "index": index,
            "text": text,
            "logprobs": joined(parts) if parts else None,
            "finish_reason": self._reason(completion) if is_last else None,
        }
        if is_last:
            choice["stop_reason"] = completion.stop_reason
        if self.request.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = prompt_logprobs(scores)
        if self.request.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = job.token_ids if is_first else None
        return choice

    def _first_text(self, job: GenerationJob) -> str:
        """The text of the first prompt token, which has no log-probability entry to take it from."""
        tokenizer = self._model.tokenizer
        return "" if tokenizer is None else tokenizer.token_text(job.token_ids[0])

    def _reason(self, completion: CompletionOutput) -> str | None:
        return "length" if self._hides_output else completion.finish_reason
