"""Routes that change the engine, with vLLM's names. They are there only with an admin key."""

import asyncio
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm.server.engine.client import EngineCommand
from jaxllm.server.http.errors import APIError, invalid, refusing
from jaxllm.server.server import Server

_MODES = ("abort", "wait")
_RETRY_S = 0.05


def admin_routes(server: Server) -> list[Route]:
    admin = Admin(server)
    return [
        Route("/reset_prefix_cache", admin.reset_prefix_cache, methods=["POST"]),
        Route("/sleep", admin.sleep, methods=["POST"]),
        Route("/wake_up", admin.wake_up, methods=["POST"]),
        Route("/is_sleeping", admin.is_sleeping, methods=["GET", "POST"]),
    ]


class Admin:
    """One command at a time."""

    def __init__(self, server: Server):
        self._server = server
        self._turn = asyncio.Lock()

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forgets cached prompts. Running requests go on."""
        async with self._turn:
            await self._command(EngineCommand("reset_prefix_cache"))
        return _answer()

    async def sleep(self, request: Request) -> Response:
        """Gives the device's memory away. New requests are refused from now on; `mode` is what happens to running ones:
        "abort" ends them, "wait" lets them finish."""
        options = request.query_params
        mode, level = options.get("mode", "abort"), options.get("level", "1")
        if mode not in _MODES:
            raise invalid(f"mode={mode!r:.50} must be one of {', '.join(_MODES)}", "mode")
        if level != "1":
            raise invalid(
                f"level={level!r:.50} must be 1: level 2 drops the parameters, and new ones can't be given over HTTP",
                "level",
            )
        async with self._turn:
            was_asleep, self._server.is_asleep = self._server.is_asleep, True
            try:
                if mode == "wait":
                    await self._server.limit.wait_empty()
                await self._fall_asleep()
            except BaseException:
                self._server.is_asleep = was_asleep
                raise
        return _answer()

    async def _fall_asleep(self) -> None:
        """Ends what runs, and what comes in late, until the engine has nothing left."""
        config = self._server.config
        end = time.monotonic() + config.shutdown_timeout_s
        while True:
            self._server.client.abort_all()
            try:
                await self._command(EngineCommand("sleep"))
                return
            except APIError as error:
                if time.monotonic() > end or error.status != 400:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def wake_up(self, request: Request) -> Response:
        """Takes memory back; requests are served again once the engine has all of it."""
        tags = request.query_params.getlist("tags") or None
        async with self._turn:
            self._server.is_asleep = await self._command(EngineCommand("wake_up", tags=tags))
        return _answer()

    async def is_sleeping(self, request: Request) -> Response:
        return Response(msgspec.json.encode({"is_sleeping": self._server.is_asleep}), media_type="application/json")

    async def _command(self, command: EngineCommand) -> bool:
        """Raises `APIError` for what the engine refuses."""
        if self._server.client.info is None:
            raise APIError(503, "the model is being loaded; try again soon", code="model_loading")
        with refusing(None):
            return await self._server.client.command(command)


def _answer() -> Response:
    return Response(b"{}", media_type="application/json")
