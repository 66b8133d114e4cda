"""Conversations as prompts: rendered by the chat template, checked against the model. The functions are synchronous and
run in threads, because templates and tokenizers take time."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from jaxllm.server.engine.client import EngineInfo
from jaxllm.server.http.errors import invalid, refusing
from jaxllm.server.openai.prepare import (
    GenerationJob,
    check_job,
    encode,
    sampling_params,
    truncated,
    unchecked_format,
    with_logprobs_counted,
)
from jaxllm.server.openai.response_format import ResponseFormat
from jaxllm.server.openai.schemas import ChatRequest, Message, Tool, plain_tool
from jaxllm.server.served_model import ServedModel


def chat_text(
    model: ServedModel,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: dict[str, Any] | None = None,
) -> str:
    """The conversation rendered by the chat template. Raises `APIError`."""
    tokenizer = model.need_tokenizer("messages")
    try:
        with refusing("messages"):
            return tokenizer.chat.render(
                [_plain(message) for message in messages],
                tools=[plain_tool(tool) for tool in tools] if tools else None,
                chat_template=model.chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs={**model.chat_template_kwargs, **(variables or {})},
            )
    except RecursionError as error:
        raise invalid("a tool call's arguments are nested too deep", "messages") from error


def _plain(message: Message) -> dict[str, Any]:
    """The message as templates expect it: developer becomes system, a refusal becomes text, and reasoning has each
    of the names that templates have for it."""
    plain = msgspec.to_builtins(message)
    thoughts = plain.get("reasoning_content") or plain.get("reasoning")
    if thoughts and message.role == "assistant":
        plain |= {"reasoning_content": thoughts, "reasoning": thoughts}
        if not (plain.get("content") and message.tool_calls):  # gpt-oss's template takes one of the two before a call
            plain["thinking"] = thoughts
    if message.role == "developer":
        plain["role"] = "system"
    if isinstance(message.content, list):
        plain["content"] = [
            {"type": "text", "text": part.refusal if part.type == "refusal" else part.text}
            if part.type in ("text", "refusal", "input_text", "output_text")
            else {"type": part.type}
            for part in message.content
        ]
    refusal = plain.pop("refusal", None)
    if refusal and not plain.get("content"):
        plain["content"] = refusal
    if message.role == "assistant" and not plain.get("content"):  # beside tool calls too: templates add it to text
        plain["content"] = ""
    return plain


def chat_job(
    model: ServedModel,
    info: EngineInfo,
    request: ChatRequest,
    tools: Sequence[Tool] | None,
    format_after: Callable[[str], ResponseFormat | None],
) -> GenerationJob:
    """The job of a conversation, with its rendered prompt as `text`; `format_after` gives the response format from the
    prompt. Raises `APIError`."""
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if request.logprob_token_ids is not None and not request.logprobs:
        raise invalid("logprob_token_ids needs logprobs: true", "logprob_token_ids")
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    text = chat_text(
        model,
        request.messages,
        tools,
        add_generation_prompt=request.add_generation_prompt is not False and not request.continue_final_message,
        continue_final_message=bool(request.continue_final_message),
        variables=variables,
    )
    response_format = format_after(text)
    params = sampling_params(
        model,
        request,
        response_format,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs and request.logprob_token_ids is None else None,
        prompt_logprobs=request.prompt_logprobs,
    )
    ids = encode(model, info, text, "messages", add_special_tokens=bool(request.add_special_tokens))
    ids, _ = truncated(ids, text, request, info)
    check_job(model, info, ids, params, "messages")
    (job,) = with_logprobs_counted(
        info, [GenerationJob(ids, params, text, unchecked_format(model, response_format))], request
    )
    return job
