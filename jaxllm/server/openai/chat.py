"""POST /v1/chat/completions."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from jaxllm.outputs import CompletionOutput
from jaxllm.server.http.errors import invalid, unsupported
from jaxllm.server.http.exchange import DONE, Exchange
from jaxllm.server.openai import prepare
from jaxllm.server.openai.chat_job import chat_job
from jaxllm.server.openai.generation import MergedOutput, TokenUsage, Update
from jaxllm.server.openai.logprobs import LogprobsFormat, chat_logprobs, has_logprobs, prompt_logprobs
from jaxllm.server.openai.parsing.choose import MARKED_BY_TOKENS, make_parser, thought_format, tool_format
from jaxllm.server.openai.parsing.events import CallArguments, CallStart, Content, Event, Parser, Reasoning
from jaxllm.server.openai.parsing.tagged import TAGS, reduced
from jaxllm.server.openai.prepare import GenerationJob
from jaxllm.server.openai.response_format import ResponseFormat, chat_response_format
from jaxllm.server.openai.schemas import (
    ChatRequest,
    NamedTool,
    Tool,
    ToolChoice,
    check_stream,
    parameters_of,
    wants_queue_position,
)
from jaxllm.server.openai.tool_choice import narrow_tools
from jaxllm.server.server import Server


class PreparedChat(NamedTuple):
    """A chat request, ready for the engine."""

    job: GenerationJob
    calls: str | None  # the format of tool calls in the answer; None: none
    thoughts: str | None  # that of reasoning
    schemas: dict[str, Any]  # of the tools' parameters, reduced to what a parser needs

    def parser(self) -> Parser:
        return make_parser(self.job.text, calls=self.calls, thoughts=self.thoughts, schemas=self.schemas)


async def answer(server: Server, request: ChatRequest, exchange: Exchange) -> None:
    info = server.check_ready(exchange.request_id)
    request.model = server.model.known_name(request.model)
    server.check_priority(request.priority)
    check_chat(request)
    prepare.count_samples(1, request)
    with server.admit(1):
        prepared = await server.in_thread(exchange, prepare_chat, server, info, request)
        await server.grammars.check(prepared.job.unchecked, exchange.tenant)
        answer_id = f"chatcmpl-{exchange.request_id}"
        result = ChatAnswer(request, prepared, answer_id=answer_id)
        run = server.run(
            [prepared.job],
            exchange,
            request_id=answer_id,
            priority=request.priority,
            reports_position=wants_queue_position(request),
        )
        with server.hold_logprobs([prepared.job]):
            async with aclosing(run) as updates:
                await (result.stream if request.stream else result.unary)(exchange, updates)


def check_chat(request: ChatRequest) -> None:
    """Raises `APIError` for what this server does not support."""
    check_stream(request)
    if request.stream and request.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "a chat's stream has no prompt_logprobs; leave stream or them out")
    if set(request.modalities or ()) - {"text"}:
        raise unsupported("modalities", "this server writes text only; leave modalities out")
    if bytes(request.function_call) not in (b"null", b'"none"'):
        raise unsupported("function_call", "function_call is an old name; use tools and tool_choice")
    narrow_tools(request)
    check_tool_choice(request.tool_choice, request.tools)


def check_tool_choice(choice: ToolChoice | None, tools: Sequence[Tool] | None) -> None:
    if isinstance(choice, NamedTool):
        if choice.called not in {tool.function.name for tool in tools or ()}:
            raise invalid("tool_choice must be none, auto, required, or name one of the tools", "tool_choice")
    elif choice not in (None, "none", "auto", "required"):
        raise invalid(f"tool_choice={choice!r:.100} must be none, auto, required, or a function", "tool_choice")
    if choice in ("auto", "required") and not tools:
        raise invalid("tool_choice needs tools", "tool_choice")


def prepare_chat(server: Server, info: Any, request: ChatRequest) -> PreparedChat:
    model, config = server.model, server.config
    tools = request.tools if request.tools and request.tool_choice != "none" else None
    template = model.template_source
    calls = tool_format(config.tool_call_parser, template) if tools else None
    if tools and calls is None:
        raise unsupported(
            "tools",
            "it is not known how this model calls tools: its chat template has none of the known formats. "
            "Start the server with --tool-call-parser, or send tool_choice: none",
        )
    thoughts = thought_format(config.reasoning_parser, template)
    if {calls, thoughts} & MARKED_BY_TOKENS:
        request.skip_special_tokens = False

    def format_after(prompt: str) -> ResponseFormat | None:
        return chat_response_format(
            request, tools, prompt=prompt, calls=calls, thoughts=thoughts, tokenizer=model.tokenizer
        )

    schemas = {}
    if calls in TAGS:
        schemas = {tool.function.name: reduced(parameters_of(tool.function)) for tool in tools or ()}
    return PreparedChat(chat_job(model, info, request, tools, format_after), calls, thoughts, schemas)


def echoed_text(request: ChatRequest) -> str:
    """The last message, if it is the assistant's and the answer is to begin with it."""
    last = request.messages[-1]
    if not request.echo or last.role != "assistant" or last.content is None:
        return ""
    return last.content if isinstance(last.content, str) else "\n".join(part.text or "" for part in last.content)


class Choice:
    """One choice of the answer, while it is generated."""

    def __init__(self, index: int, prepared: PreparedChat, request: ChatRequest):
        self.index, self._request = index, request
        self._parser = prepared.parser()
        self._echo = echoed_text(request)  # not sent yet
        self._call_ids: list[str] = []
        self._hidden_calls: set[int] = set()
        self._logprobs: list[dict[str, Any]] = []  # not sent yet
        self.num_reasoning_tokens = 0

    def take(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """The deltas of `completion`, itself a delta; empty while the parser waits for more text."""
        if completion.logprobs is not None:
            form = LogprobsFormat.of(self._request, self._request.top_logprobs)
            self._logprobs += chat_logprobs(completion.token_ids, completion.logprobs, form)
        events = self._parser.push(completion.text)
        if events and all(isinstance(event, Reasoning) for event in events):
            self.num_reasoning_tokens += len(completion.token_ids)
        if completion.finish_reason is not None:
            events += self._parser.finish()
        deltas = [delta for event in events if (delta := self._delta(event)) is not None]
        if self._echo:
            deltas.insert(0, {"content": self._echo})
            self._echo = ""
        return deltas

    def _delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                both = {"reasoning_content": text, "reasoning": text}  # the name that it had, and newer vLLM's
                return both if self._request.include_reasoning is not False else None
            case CallStart(index, name):
                if self._request.parallel_tool_calls is False and index > 0:
                    self._hidden_calls.add(index)
                    return None
                self._call_ids.append(f"call_{secrets.token_hex(12)}")
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": self._call_ids[index], "type": "function", "function": function}
                return {"tool_calls": [call]}
            case CallArguments(index, text):
                if index in self._hidden_calls:
                    return None
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def logprobs(self) -> dict[str, Any] | None:
        """The log-probabilities of the tokens since the last call."""
        if not self._request.logprobs:
            return None
        content, self._logprobs = self._logprobs, []
        return {"content": content, "refusal": None}

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        is_named = isinstance(self._request.tool_choice, NamedTool)  # OpenAI reports "stop" after a named call
        called = self._call_ids and completion.finish_reason == "stop" and not is_named
        return "tool_calls" if called else completion.finish_reason


class ChatAnswer:
    """Formats the engine's output as OpenAI's chat completion, whole or in chunks."""

    def __init__(self, request: ChatRequest, prepared: PreparedChat, *, answer_id: str):
        self.request, self._prepared = request, prepared
        self._base = {"id": answer_id, "created": int(time.time()), "model": request.model}
        self.usage = TokenUsage([prepared.job])
        self._choices: dict[int, Choice] = {}

    def _choice(self, index: int) -> tuple[Choice, bool]:
        """The choice, and whether it is new."""
        is_new = index not in self._choices
        if is_new:
            self._choices[index] = Choice(index, self._prepared, self.request)
        return self._choices[index], is_new

    async def unary(self, exchange: Exchange, updates: AsyncIterator[Update]) -> None:
        merged = MergedOutput()
        async for update in updates:
            self.usage.add(update)
            merged.add(update.output)
        await exchange.json_of(lambda: self._whole(merged), is_large=has_logprobs(self.request))

    def _whole(self, merged: MergedOutput) -> dict[str, Any]:
        choices = [self._message(completion) for completion in merged.completions]
        answer = self._base | {"object": "chat.completion", "choices": choices, "usage": self._usage()}
        if self.request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(merged.prompt_logprobs)
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = self._prepared.job.token_ids
        return answer

    def _message(self, completion: CompletionOutput) -> dict[str, Any]:
        choice, _ = self._choice(completion.index)
        message = assemble(choice.take(completion))
        finished = {
            "index": completion.index,
            "message": message,
            "logprobs": choice.logprobs(),
            "finish_reason": choice.finish_reason(completion),
            "stop_reason": completion.stop_reason,
        }
        return finished | ({"token_ids": completion.token_ids} if self.request.return_token_ids else {})

    async def stream(self, exchange: Exchange, updates: AsyncIterator[Update]) -> None:
        options = self.request.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        keeps_usage = wants_usage and bool(options.continuous_usage_stats)
        base = self._base | {"object": "chat.completion.chunk"}
        async with exchange.events():
            async for update in updates:
                self.usage.add(update)
                for completion in update.output.outputs:
                    for part in self._parts(completion):
                        chunk = base | {"choices": [part]}
                        if wants_usage:
                            chunk["usage"] = self._usage() if keeps_usage else None
                        await exchange.event(chunk)
            if wants_usage:
                await exchange.event(base | {"choices": [], "usage": self._usage()})
            await exchange.write(DONE)

    def _parts(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """The choices of chunks: the role first, then the deltas, then the finish reason."""
        choice, is_new = self._choice(completion.index)
        deltas = choice.take(completion)
        parts = [_part(choice.index, {"role": "assistant", "content": ""})] if is_new else []
        parts += [_part(choice.index, delta) for delta in deltas]
        if completion.finish_reason is not None:
            last = _part(choice.index, {}, choice.finish_reason(completion))
            parts.append(last | {"stop_reason": completion.stop_reason})
        if parts and (deltas or completion.finish_reason is not None):
            parts[1 if is_new else 0]["logprobs"] = choice.logprobs()
        return parts

    def _usage(self) -> dict[str, Any]:
        self.usage.reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self._choices.values())
        return self.usage.answer()


def _part(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def assemble(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges deltas into a message."""
    content = "".join(delta.get("content", "") for delta in deltas)
    thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
    message["refusal"] = None
    if thoughts:
        message["reasoning_content"] = message["reasoning"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message
