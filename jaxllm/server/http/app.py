"""The routes of the HTTP server."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import jaxllm
from jaxllm.server.http import openapi
from jaxllm.server.http.admin import admin_routes
from jaxllm.server.http.body import Body, read_body
from jaxllm.server.http.errors import APIError, as_api_error, deadline_exceeded, internal, invalid, unknown_model
from jaxllm.server.http.exchange import ClientGone, Exchange, Receive, Scope, Send, until_disconnect
from jaxllm.server.http.middleware import App, Guard
from jaxllm.server.observe.metrics import CONTENT_TYPE
from jaxllm.server.observe.overview import overview
from jaxllm.server.openai import chat, prepare, responses, schemas
from jaxllm.server.openai.chat_job import chat_text
from jaxllm.server.openai.completions import CompletionAnswer
from jaxllm.server.openai.responses_schema import ResponsesRequest
from jaxllm.server.openai.schemas import CompletionRequest, DetokenizeRequest, TokenizeRequest
from jaxllm.server.page import page
from jaxllm.server.pooling import answers
from jaxllm.server.pooling import schemas as pooling
from jaxllm.server.server import Server

log = logging.getLogger(__name__)

TIMEOUT_HEADER = "x-request-timeout"  # seconds that the client waits at most
Handler = Callable[[Server, Any, Exchange], Awaitable[None]]


class Post:
    """An ASGI app that decodes a request of `kind` from a JSON body and lets `handler` answer it. The client gets every
    error, and the work is cancelled when the client disconnects."""

    def __init__(self, server: Server, kind: type, handler: Handler):
        self._server, self.kind, self._handler = server, kind, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._server.config
        exchange = Exchange(scope, send, keep_alive_s=config.keep_alive_s)
        with self._server.bodies.open() as body:  # it counts until the answer is complete
            try:
                limits = {"max_bytes": config.max_body_bytes, "timeout_s": config.body_timeout_s}
                await read_body(scope, receive, body, **limits)
            except ClientGone:
                return
            except APIError as error:
                if error.status == 503:
                    self._server.metrics.rejected("max_body_memory")
                await exchange.error(error)
                return
            exchange.num_body_bytes = len(body)
            if not await until_disconnect(self._answer(scope, body, exchange), receive):
                exchange.record.error = "client_gone"

    async def _answer(self, scope: Scope, body: Body, exchange: Exchange) -> None:
        try:
            limit_s = _timeout_s(scope, self._server.config.request_timeout_s)
            try:
                async with asyncio.timeout(limit_s) as timer:
                    request = await self._server.decode(self.kind, body.take())
                    await self._handler(self._server, request, exchange)
            except TimeoutError as error:
                raise (deadline_exceeded(limit_s) if timer.expired() else error) from error
        except Exception as error:  # noqa: BLE001 - any failure ends its own request only
            await exchange.error(as_api_error(error, exchange.request_id))


def _timeout_s(scope: Scope, most: float) -> float:
    for name, value in scope["headers"]:
        if name == TIMEOUT_HEADER.encode():
            try:
                wanted = float(value)
            except ValueError:
                wanted = -1.0
            if not wanted > 0:
                raise invalid("the header x-request-timeout must be a number of seconds above 0")
            return min(most, wanted)
    return most


def create_app(server: Server) -> App:
    """The ASGI app. The caller starts and closes `server`."""

    def get(handler: Callable[[Server, Request], Response]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            return handler(server, request)

        endpoint.__doc__ = handler.__doc__
        return endpoint

    posts = {
        "/v1/completions": (CompletionRequest, _completions),
        "/v1/chat/completions": (schemas.ChatRequest, chat.answer),
        "/v1/responses": (ResponsesRequest, responses.answer),
        "/v1/embeddings": (pooling.EmbeddingRequest, answers.embeddings),
        "/pooling": (pooling.PoolRequest, answers.pooling),
        "/classify": (pooling.ClassifyRequest, answers.classify),
        **dict.fromkeys(("/v1/score", "/score"), (pooling.ScoreRequest, answers.score)),
        **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), (pooling.RerankRequest, answers.rerank)),
        "/tokenize": (TokenizeRequest, _tokenize),
        "/detokenize": (DetokenizeRequest, _detokenize),
    }
    gets = {
        "/": _page,
        "/load": _load,
        "/ping": _health,
        "/stats": _stats,
        "/health": _health,
        "/ready": _ready,
        "/version": _version,
        "/metrics": _metrics,
        "/v1/models": _models,
        "/tokenizer_info": _tokenizer_info,
        "/v1/models/{name:path}": _model,
    }
    routes = [Route(path, Post(server, *post), methods=["POST"]) for path, post in posts.items()]
    routes += [
        Route(path, get(handler), methods=["GET", "POST"] if path == "/ping" else ["GET"])
        for path, handler in gets.items()
    ]
    if server.config.admin_api_key is not None:
        routes += admin_routes(server)
    routes.append(Route("/openapi.json", _described(routes, server), methods=["GET"]))
    app = Starlette(routes=routes, exception_handlers=_HANDLERS)
    app.router.redirect_slashes = False
    config = server.config
    guarded = Guard(
        app,
        api_keys=config.api_keys,
        hosts=config.hosts,
        max_header_bytes=config.max_header_bytes,
        admin_api_key=config.admin_api_key,
        routes=[route.path for route in routes],
        report=server.report,
    )
    if not config.allowed_origins:
        return guarded
    outer: Any = CORSMiddleware(  # before the guard, as browsers ask whether they may without the key
        cast(Any, guarded),
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=["x-request-id", "retry-after"],
    )
    return outer


def _described(routes: list[Route], server: Server) -> Callable[[Request], Awaitable[Response]]:
    @functools.cache
    def document() -> bytes:
        return openapi.describe(routes, server.config, timeout_header=TIMEOUT_HEADER)

    async def endpoint(request: Request) -> Response:
        """This description of all routes, in the format of OpenAPI 3.1."""
        return _json(document())

    return endpoint


async def _completions(server: Server, request: CompletionRequest, exchange: Exchange) -> None:
    info = server.check_ready(exchange.request_id)
    request.model = server.model.known_name(request.model)
    server.check_priority(request.priority)
    schemas.check_stream(request)
    count = prepare.count_prompts(request)
    with server.admit(count):
        jobs = await server.in_thread(exchange, prepare.completion_jobs, server.model, info, request)
        await server.grammars.check(jobs[0].unchecked, exchange.tenant)
        answer_id = f"cmpl-{exchange.request_id}"
        answer = CompletionAnswer(request, jobs, answer_id=answer_id, model=server.model)
        run = server.run(
            jobs,
            exchange,
            request_id=answer_id,
            priority=request.priority,
            reports_position=schemas.wants_queue_position(request),
        )
        with server.hold_logprobs(jobs):
            async with aclosing(run) as updates:
                await (answer.stream if request.stream else answer.unary)(exchange, updates)


async def _tokenize(server: Server, request: TokenizeRequest, exchange: Exchange) -> None:
    info = server.check_ready(exchange.request_id)
    server.model.known_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("give either prompt or messages", "prompt")

    def work() -> dict[str, Any]:
        text, special = request.prompt, request.add_special_tokens is not False
        if request.messages is not None:
            text = chat_text(
                server.model,
                request.messages,
                request.tools,
                add_generation_prompt=request.add_generation_prompt is not False,
            )
            special = bool(request.add_special_tokens)
        ids = prepare.encode(server.model, info, text, "prompt", add_special_tokens=special)
        strings = [server.model.tokenizer.token_text(token) for token in ids] if request.return_token_strs else None
        return {"count": len(ids), "max_model_len": info.config.max_model_len, "tokens": ids, "token_strs": strings}

    with server.admit(1):
        await exchange.json(await server.in_thread(exchange, work))


async def _detokenize(server: Server, request: DetokenizeRequest, exchange: Exchange) -> None:
    info = server.check_ready(exchange.request_id)
    server.model.known_name(request.model)
    tokenizer = server.model.need_tokenizer("tokens")
    if len(request.tokens) > info.config.max_model_len:
        raise prepare.too_long(f"{prepare.maximum_length(info)}, and these are {len(request.tokens)}", "tokens")
    bad = next((token for token in request.tokens if token >= info.vocab), None)
    if bad is not None:
        raise invalid(f"token id {bad} is outside the vocabulary [0, {info.vocab - 1}]", "tokens")
    with server.admit(1):
        text = await server.in_thread(exchange, lambda: tokenizer.decode(request.tokens, skip_special_tokens=False))
        await exchange.json({"prompt": text})


def _json(answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
    return Response(body, status, headers, media_type="application/json")


def _health(server: Server, request: Request) -> Response:
    """Liveness: the engine makes progress or is idle. Orchestrators restart a server that is not live."""
    if server.is_live:
        return _json({"status": "ok"})
    trouble = server.client.health().trouble
    return _json({"status": "down"} | ({} if trouble is None else {"reason": trouble}), 503)


def _load(server: Server, request: Request) -> Response:
    """How many requests run or wait, for load balancers."""
    return _json({"server_load": server.limit.num_admitted})


def _ready(server: Server, request: Request) -> Response:
    return _json({"status": "ready" if server.is_ready else "not ready"}, 200 if server.is_ready else 503)


def _page(server: Server, request: Request) -> Response:
    return Response(page().body, headers=page().headers)


def _stats(server: Server, request: Request) -> Response:
    return _json(overview(server), headers={"cache-control": "no-store"})


def _version(server: Server, request: Request) -> Response:
    return _json({"version": jaxllm.__version__})


def _tokenizer_info(server: Server, request: Request) -> Response:
    """What evaluation tools need to count tokens and render conversations like this server."""
    chat, info = server.model.need_tokenizer("tokenizer").chat, server.client.info
    length = None if info is None else info.config.max_model_len
    template = chat.templates.get("default")
    return _json({"model_max_length": length, "chat_template": template, **chat.special_tokens})


def _metrics(server: Server, request: Request) -> Response:
    return Response(server.metrics.render(), headers={"content-type": CONTENT_TYPE})


def _model_card(server: Server, name: str) -> dict[str, Any]:
    info = server.client.info
    return {
        "id": name,
        "object": "model",
        "created": server.model.created,
        "owned_by": "jaxllm",
        "max_model_len": None if info is None else info.config.max_model_len,
    }


def _models(server: Server, request: Request) -> Response:
    return _json({"object": "list", "data": [_model_card(server, name) for name in server.model.names]})


def _model(server: Server, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in server.model.names:
        raise unknown_model(name, list(server.model.names))
    return _json(_model_card(server, name))


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's errors: an unknown URL, or a method that it does not take."""
    path, method = request.scope["path"][:100], request.method[:20]
    if error.status_code == 405:
        message = f"{path} does not take {method}"
    else:
        message = f"there is no {path!r} here; see /v1/models, /v1/completions, /v1/chat/completions"
    failure = APIError(error.status_code, message, headers=error.headers)
    return _json(failure.encode(), failure.status, failure.headers)


async def _api_error(request: Request, error: Exception) -> Response:
    return _json(error.encode(), error.status, error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    return await _api_error(request, internal(request.state.request_id))  # the guard logs the exception


_HANDLERS = {HTTPException: _http_error, APIError: _api_error, Exception: _bug}
