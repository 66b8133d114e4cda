"""Prompts that are pooled: from requests to the engine and back. What is synchronous runs in threads, because
tokenizers take time."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxllm.engine.intake import check_prompt
from jaxllm.pooling_outputs import PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.server.engine.client import EngineInfo
from jaxllm.server.http.errors import internal, invalid, refusing, too_long
from jaxllm.server.http.exchange import Exchange
from jaxllm.server.openai.prepare import check_chars, encode, salt_of
from jaxllm.server.openai.schemas import MAX_PROMPTS
from jaxllm.server.pooling.schemas import PoolingFields, ScoreRequest
from jaxllm.server.served_model import ServedModel
from jaxllm.server.server import Server
from jaxllm.text.prompts import pair_texts

log = logging.getLogger(__name__)

MAX_PAIR_TOKENS = 1 << 20  # of one request
_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class PoolingJob(NamedTuple):
    """A prompt for the engine."""

    token_ids: list[int]
    params: PoolingParams

    def salted(self, tenant: bytes) -> "PoolingJob":
        """As `GenerationJob.salted`."""
        return self._replace(params=replace(self.params, cache_salt=salt_of(tenant, self.params.cache_salt)))


def params_of(request: PoolingFields, task: str | None) -> PoolingParams:
    """The request's pooling parameters. Raises `APIError`."""
    with refusing(None, frozenset(["dimensions", "use_activation", "truncate_prompt_tokens", "cache_salt"])):
        return PoolingParams(
            task=task,
            dimensions=getattr(request, "dimensions", None),
            use_activation=request.use_activation,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            cache_salt=request.cache_salt,
        )


def count_inputs(given: Any) -> int:
    """From the request alone, so that it is known before any work is done. Raises `APIError`."""
    count = 1 if isinstance(given, str) or isinstance(given[0], int) else len(given)
    if count > MAX_PROMPTS:
        raise invalid(f"{count} inputs are more than the {MAX_PROMPTS} that a request may have; split it", "input")
    return count


def input_jobs(model: ServedModel, info: EngineInfo, request: Any, params: PoolingParams) -> list[PoolingJob]:
    """A job for each input: texts, or token ids. Raises `APIError`."""
    given = request.input
    inputs = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if len({type(one) for one in given}) > 1 and not isinstance(given, str):
        raise invalid("input mixes texts and token ids; send two requests", "input")
    special = request.add_special_tokens is not False
    return [
        PoolingJob(_checked(info, one, params, "input"), params)
        if isinstance(one, list)
        else text_job(model, info, one, params, "input", add_special_tokens=special)
        for one in inputs
    ]


def text_job(
    model: ServedModel,
    info: EngineInfo,
    text: str,
    params: PoolingParams,
    param: str,
    *,
    add_special_tokens: bool = True,
    most: int | None = None,
) -> PoolingJob:
    """Of a text, of which at most the first `most` tokens count."""
    text = text.lower() if info.lowercases else text
    ids = encode(model, info, text, param, add_special_tokens=add_special_tokens)
    return PoolingJob(_checked(info, ids[:most], params, param), params)


def pair_jobs(
    model: ServedModel, info: EngineInfo, pairs: Sequence[tuple[str, str]], params: PoolingParams, *, most: int | None
) -> list[PoolingJob]:
    """Of pairs of texts, each of which the model reads at once. A second one that is too long, or has more than `most`
    tokens, is cut. One text may be in many pairs, so that their tokens are bounded together. Raises `APIError`."""
    made: list[PoolingJob] = []
    num_tokens = 0
    for first, second in pairs:
        made.append(_pair_job(model, info, first, second, params, most))
        num_tokens += len(made[-1].token_ids)
        if num_tokens > MAX_PAIR_TOKENS:
            raise invalid(
                f"the first {len(made)} of {len(pairs)} pairs have {num_tokens} tokens; at most {MAX_PAIR_TOKENS} are "
                "allowed in a request; split it",
                "documents",
            )
    return made


def _pair_job(
    model: ServedModel, info: EngineInfo, first: str, second: str, params: PoolingParams, most: int | None
) -> PoolingJob:
    tokenizer, limit = model.need_tokenizer("text_1"), info.config.max_model_len
    for text in (first, second):
        check_chars(info, text, "text_1")
    if info.lowercases:
        first, second = first.lower(), second.lower()
    with refusing("text_1"):
        if most is not None:
            limit = min(limit, len(tokenizer.encode_pair(first, "", limit)) + most)
        ids = tokenizer.encode_pair(first, second, limit)
    return PoolingJob(_checked(info, ids, params, "text_1"), params)


def _checked(info: EngineInfo, ids: Sequence[int], params: PoolingParams, param: str) -> list[int]:
    limit = info.config.max_model_len
    if len(ids) > limit and params.truncate_prompt_tokens is None:
        raise too_long(
            f"This model's maximum context length is {limit} tokens, and the text has {len(ids)}. Shorten it, or send "
            "truncate_prompt_tokens: -1 for its end",
            param,
        )
    with refusing(param):
        return check_prompt(ids, info.vocab, len(ids), None, num_generated=0)


def sides(request: ScoreRequest) -> tuple[list[str], list[str]]:
    """The texts to score, as many on both sides. Raises `APIError`."""
    given = [pair for pair in _SIDES if all(getattr(request, name) is not None for name in pair)]
    if len(given) != 1:
        names = ", or ".join(f"{a} and {b}" for a, b in _SIDES)
        raise invalid(f"give {names}", "text_1", "missing_required_parameter")
    first, second = given[0]
    with refusing(second):
        return pair_texts(getattr(request, first), getattr(request, second))


async def run(
    server: Server, jobs: Sequence[PoolingJob], exchange: Exchange, *, request_id: str, priority: int | None
) -> list[PoolingRequestOutput]:
    """Runs all jobs, no more at once than the engine does, and returns their outputs in order. A cancelled call aborts
    what is unfinished, and an error of one job ends all. Raises `APIError`, `EngineDeadError`."""
    if server.config.isolates_keys and exchange.tenant is not None:
        jobs = [job.salted(exchange.tenant) for job in jobs]
    exchange.record.num_prompt_tokens = sum(len(job.token_ids) for job in jobs)
    outputs: dict[int, PoolingRequestOutput] = {}
    left = iter(enumerate(jobs))

    async def work() -> None:
        for index, job in left:
            outputs[index] = await _run_one(server, job, f"{request_id}-{index}", priority or 0)

    tasks = [asyncio.create_task(work()) for _ in range(num_places(server, len(jobs)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [outputs[index] for index in range(len(jobs))]


def num_places(server: Server, count: int) -> int:
    """How many of an HTTP request's prompts are in the engine at once."""
    return min(count, server.limit.max_running)


async def _run_one(server: Server, job: PoolingJob, request_id: str, priority: int) -> PoolingRequestOutput:
    start, num_cached, queued_s, reason = time.monotonic(), 0, 0.0, "abort"
    try:
        output = await server.client.pool(job.token_ids, job.params, request_id=request_id, priority=priority)
        num_cached, queued_s = output.num_cached_tokens, output.queued_s
        reason = "stop" if output.error is None else "error"
    except ValueError as error:
        reason = "error"
        raise invalid(str(error)) from error
    except Exception:
        reason = "error"
        raise
    finally:
        whole_s = time.monotonic() - start
        server.metrics.pooled(reason, len(job.token_ids), num_cached, whole_s=whole_s, queued_s=queued_s)
    if output.error is not None:
        log.error("request %s failed: %s", request_id, output.error)
        raise internal(request_id)
    return output
