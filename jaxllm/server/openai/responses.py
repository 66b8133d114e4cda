"""POST /v1/responses, stateless: each request contains its whole conversation."""

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from jaxllm.outputs import CompletionOutput
from jaxllm.server.http.errors import APIError
from jaxllm.server.http.exchange import Exchange
from jaxllm.server.openai import prepare
from jaxllm.server.openai.chat import PreparedChat, check_chat, prepare_chat
from jaxllm.server.openai.generation import TokenUsage, Update
from jaxllm.server.openai.logprobs import LogprobsFormat, chat_logprobs
from jaxllm.server.openai.parsing.events import CallArguments, CallStart, Content, Event
from jaxllm.server.openai.parsing.events import Reasoning as Thought
from jaxllm.server.openai.responses_schema import ResponsesRequest, as_chat, echo
from jaxllm.server.server import Server


async def answer(server: Server, request: ResponsesRequest, exchange: Exchange) -> None:
    info = server.check_ready(exchange.request_id)
    request.model = server.model.known_name(request.model)
    chat = as_chat(request, request.model)
    check_chat(chat)
    prepare.count_samples(1, chat)
    with server.admit(1):
        prepared = await server.in_thread(exchange, prepare_chat, server, info, chat)
        await server.grammars.check(prepared.job.unchecked, exchange.tenant)
        response = Response(request, prepared, f"resp_{exchange.request_id.removeprefix('req_')}")
        async with aclosing(server.run([prepared.job], exchange, request_id=response.id, priority=0)) as updates:
            await (response.stream if request.stream else response.unary)(exchange, updates)


class Response:
    """Builds the output items in order, and the events of a stream."""

    def __init__(self, request: ResponsesRequest, prepared: PreparedChat, response_id: str):
        self.id, self._request, self._prepared = response_id, request, prepared
        self._created = int(time.time())
        self._usage = TokenUsage([prepared.job])
        self._parser = prepared.parser()
        self._output: list[dict[str, Any]] = []
        self._is_open = False  # the last item
        self._num_hidden_calls = 0
        self._logprobs: list[dict[str, Any]] = []
        self._sequence = 0
        self._finish_reason: str | None = None

    async def unary(self, exchange: Exchange, updates: AsyncIterator[Update]) -> None:
        async for update in updates:
            for completion in update.output.outputs:
                self._take(update, completion)
        await exchange.json(self._whole(self._status))

    async def stream(self, exchange: Exchange, updates: AsyncIterator[Update]) -> None:
        async with exchange.events():
            for kind in ("response.created", "response.in_progress"):
                await self._send(exchange, [self._event(kind, response=self._whole("in_progress"))])
            exchange.error_events = self._failure
            async for update in updates:
                for completion in update.output.outputs:
                    await self._send(exchange, self._take(update, completion))
            kind = f"response.{self._status}"
            await self._send(exchange, [self._event(kind, response=self._whole(self._status))])

    def _failure(self, error: APIError) -> list[dict[str, Any]]:
        told = {"code": error.code or error.type, "message": error.message}
        failed = self._whole("failed") | {"error": told}
        return [self._event("error", param=error.param, **told), self._event("response.failed", response=failed)]

    async def _send(self, exchange: Exchange, events: list[dict[str, Any]]) -> None:
        for event in events:
            await exchange.event(event, name=event["type"])

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1} | fields

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _whole(self, status: str) -> dict[str, Any]:
        usage = self._usage
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._request.model,
            "output": self._output,
            **echo(self._request),
            "usage": None
            if status == "in_progress"
            else {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _take(self, update: Update, completion: CompletionOutput) -> list[dict[str, Any]]:
        """The events of an update."""
        self._usage.add(update)
        if completion.logprobs is not None:
            form = LogprobsFormat(self._request.top_logprobs or 0, None, names_ids=False)
            self._logprobs += chat_logprobs(completion.token_ids, completion.logprobs, form)
        parsed = self._parser.push(completion.text)
        if parsed and all(isinstance(event, Thought) for event in parsed):
            self._usage.reasoning_tokens += len(completion.token_ids)
        if completion.finish_reason is not None:
            self._finish_reason = completion.finish_reason
            parsed += self._parser.finish()
        events = [told for event in parsed for told in self._tell(event)]
        if completion.finish_reason is not None:
            events += self._close()
        return events

    def _tell(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case Thought(text):
                return self._text("reasoning", "reasoning_text", text)
            case Content(text):
                return self._text("message", "output_text", text)
            case CallStart(index, name):
                if self._request.parallel_tool_calls is False and index > 0:
                    self._num_hidden_calls += 1
                    return self._close()
                return self._close() + self._open(
                    {
                        "type": "function_call",
                        "id": _new_id("fc"),
                        "call_id": _new_id("call"),
                        "name": name,
                        "arguments": "",
                        "status": "in_progress",
                    }
                )
            case CallArguments(_, text):
                if self._num_hidden_calls:
                    return []
                self._output[-1]["arguments"] += text
                return [self._event("response.function_call_arguments.delta", delta=text, **self._where())]

    def _text(self, kind: str, part_kind: str, text: str) -> list[dict[str, Any]]:
        events = []
        if not self._is_open or self._output[-1]["type"] != kind:
            events = self._close() + self._open(self._new_item(kind))
            part = {"type": part_kind, "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            self._output[-1]["content"].append(part)
            events.append(self._event("response.content_part.added", part=dict(part), content_index=0, **self._where()))
        part = self._output[-1]["content"][0]
        part["text"] += text
        fields = {"delta": text, "content_index": 0, **self._where()}
        if kind == "message":
            fields["logprobs"], self._logprobs = self._logprobs, []
            part["logprobs"] += fields["logprobs"]
        return [*events, self._event(f"response.{part_kind}.delta", **fields)]

    def _new_item(self, kind: str) -> dict[str, Any]:
        if kind == "reasoning":
            return {"type": kind, "id": _new_id("rs"), "summary": [], "content": [], "status": "in_progress"}
        return {"type": kind, "id": _new_id("msg"), "role": "assistant", "content": [], "status": "in_progress"}

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _open(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        self._output.append(item)
        self._is_open = True
        shown = item | ({"content": []} if "content" in item else {})
        return [self._event("response.output_item.added", output_index=len(self._output) - 1, item=shown)]

    def _close(self) -> list[dict[str, Any]]:
        """Completes the last item."""
        if not self._is_open:
            return []
        self._is_open = False
        item, where = self._output[-1], self._where()
        item["status"] = "completed" if self._finish_reason != "length" else "incomplete"
        events = []
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._event("response.function_call_arguments.done", **done, **where))
        else:
            part = item["content"][0]
            fields = {"text": part["text"], "content_index": 0, **where}
            if "logprobs" in part:
                fields["logprobs"] = part["logprobs"]
            events.append(self._event(f"response.{part['type']}.done", **fields))
            events.append(self._event("response.content_part.done", part=part, content_index=0, **where))
        index = where["output_index"]
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
