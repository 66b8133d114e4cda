"""POST /v1/embeddings, /pooling, /classify, /v1/score and /v1/rerank."""

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxllm.pooling_outputs import PoolingRequestOutput, cosine
from jaxllm.server.engine.client import EngineInfo
from jaxllm.server.http.errors import invalid
from jaxllm.server.http.exchange import Exchange
from jaxllm.server.pooling import jobs
from jaxllm.server.pooling.jobs import PoolingJob
from jaxllm.server.pooling.schemas import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingFields,
    PoolRequest,
    RerankRequest,
    ScoreRequest,
)
from jaxllm.server.server import Server

Outputs = Sequence[PoolingRequestOutput]


class Work(NamedTuple):
    """The prompts of a request, and what makes the answer of their outputs."""

    jobs: Sequence[PoolingJob]
    answer: Callable[[Outputs], dict[str, Any]]


async def embeddings(server: Server, request: EmbeddingRequest, exchange: Exchange) -> None:
    await _embed(server, request, exchange, "embed", "embedding", "embedding")


async def pooling(server: Server, request: PoolRequest, exchange: Exchange) -> None:
    await _embed(server, request, exchange, request.task, "pooling", "data")


async def _embed(
    server: Server, request: EmbeddingRequest | PoolRequest, exchange: Exchange, task: str | None, kind: str, key: str
) -> None:
    def prepare(info: EngineInfo) -> Work:
        def answer(outputs: Outputs) -> dict[str, Any]:
            encode = _base64 if request.encoding_format == "base64" else _floats
            rows = [{"object": kind, "index": i, key: encode(output.made.data)} for i, output in enumerate(outputs)]
            return _listed(request, exchange, rows)

        return Work(jobs.input_jobs(server.model, info, request, jobs.params_of(request, task)), answer)

    await _answer(server, request, exchange, jobs.count_inputs(request.input), prepare)


async def classify(server: Server, request: ClassifyRequest, exchange: Exchange) -> None:
    def prepare(info: EngineInfo) -> Work:
        def answer(outputs: Outputs) -> dict[str, Any]:
            rows = []
            for i, output in enumerate(outputs):
                probs = output.made.data
                label = info.labels[int(probs.argmax())] if info.labels else None
                rows.append({"index": i, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
            return _listed(request, exchange, rows)

        return Work(jobs.input_jobs(server.model, info, request, jobs.params_of(request, "classify")), answer)

    await _answer(server, request, exchange, jobs.count_inputs(request.input), prepare)


async def score(server: Server, request: ScoreRequest, exchange: Exchange) -> None:
    first, second = jobs.sides(request)

    def prepare(info: EngineInfo) -> Work:
        scored, scores_of = _scoring(server, info, request, first, second)

        def answer(outputs: Outputs) -> dict[str, Any]:
            rows = [{"object": "score", "index": i, "score": value} for i, value in enumerate(scores_of(outputs))]
            return _listed(request, exchange, rows)

        return Work(scored, answer)

    await _answer(server, request, exchange, len(first), prepare, num_chars=sum(map(len, (*first, *second))))


async def rerank(server: Server, request: RerankRequest, exchange: Exchange) -> None:
    texts = [one if isinstance(one, str) else one.text for one in request.documents]

    def prepare(info: EngineInfo) -> Work:
        queries = [request.query] * len(texts)
        scored, scores_of = _scoring(server, info, request, queries, texts, most=request.max_tokens_per_doc)

        def answer(outputs: Outputs) -> dict[str, Any]:
            scores = scores_of(outputs)
            order = sorted(range(len(texts)), key=lambda i: -scores[i])[: request.top_n or None]
            results = [{"index": i, "relevance_score": scores[i]} for i in order]
            if request.return_documents is not False:
                results = [one | {"document": {"text": texts[one["index"]]}} for one in results]
            return {"id": f"rerank-{exchange.request_id}", "model": request.model, "results": results}

        return Work(scored, answer)

    num_chars = len(texts) * len(request.query) + sum(map(len, texts))
    await _answer(server, request, exchange, len(texts), prepare, num_chars=num_chars)


def _scoring(
    server: Server,
    info: EngineInfo,
    request: PoolingFields,
    first: Sequence[str],
    second: Sequence[str],
    *,
    most: int | None = None,
) -> tuple[list[PoolingJob], Callable[[Outputs], list[float]]]:
    """The jobs that score pairs of texts, as the model does it, and what makes the scores of their outputs. Of each
    second text at most `most` tokens count. Raises `APIError`."""
    model = server.model
    if info.task == "embed":
        params = jobs.params_of(request, "embed")
        keys = list(dict.fromkeys([*((text, None) for text in first), *((text, most) for text in second)]))
        made = [jobs.text_job(model, info, text, params, "text_1", most=cut) for text, cut in keys]

        def cosines(outputs: Outputs) -> list[float]:
            of = dict(zip(keys, outputs, strict=True))
            return [cosine(of[a, None], of[b, most]).made.score for a, b in zip(first, second, strict=True)]

        return made, cosines
    if info.width != 1:
        raise invalid(
            f"this model knows {info.width} classes, and a score is of one; send the texts to /classify", None
        )
    params = jobs.params_of(request, "classify")
    pairs = jobs.pair_jobs(model, info, list(zip(first, second, strict=True)), params, most=most)
    return pairs, lambda outputs: [float(output.made.data[0]) for output in outputs]


async def _answer(
    server: Server,
    request: PoolingFields,
    exchange: Exchange,
    count: int,
    prepare: Callable[[EngineInfo], Work],
    *,
    num_chars: int = 0,
) -> None:
    """Has the prompts of a request pooled, and sends the answer with the tokens they had. `num_chars` are of texts that
    are in several prompts, as often as they are there."""
    info = server.check_ready(exchange.request_id)
    request.model = server.model.known_name(request.model)
    server.check_priority(request.priority)
    with server.admit(jobs.num_places(server, count)):
        work = await server.in_thread(exchange, prepare, info, size=num_chars)
        answer_id = f"pool-{exchange.request_id}"
        outputs = await jobs.run(server, work.jobs, exchange, request_id=answer_id, priority=request.priority)
        await exchange.json(await server.in_thread(exchange, _encode, work, outputs, size=num_chars))


def _encode(work: Work, outputs: Outputs) -> bytes:
    """The answer's body: made in a thread, as many embeddings take time."""
    count = sum(len(job.token_ids) for job in work.jobs)
    cached = sum(output.num_cached_tokens for output in outputs)
    details = {"cached_tokens": cached}
    usage = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0, "prompt_tokens_details": details}
    return msgspec.json.encode(work.answer(outputs) | {"usage": usage})


def _listed(request: PoolingFields, exchange: Exchange, rows: list[dict[str, Any]]) -> dict[str, Any]:
    base = {"id": f"pool-{exchange.request_id}", "object": "list", "created": int(time.time())}
    return base | {"model": request.model, "data": rows}


def _floats(vector: np.ndarray) -> msgspec.Raw:
    """JSON, which takes less memory than the objects."""
    return msgspec.Raw(msgspec.json.encode(vector.tolist()))


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
