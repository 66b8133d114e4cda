"""The engine in a child process, behind a Unix socket that only this user can open."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from jaxllm.engine.mailbox import Mailbox
from jaxllm.engine.stats import EngineStats
from jaxllm.errors import EngineDeadError, JaxLLMError, RequestEndedError
from jaxllm.outputs import RequestOutput
from jaxllm.pooling_outputs import PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.engine import wire
from jaxllm.server.engine.client import EngineCommand, EngineInfo, Health
from jaxllm.silence import SilenceMeter

log = logging.getLogger(__name__)

_TICK_S = 0.2
_LATE_S = 1.0  # that a heartbeat may be
_CLOSE_S = 12.0  # longer than the process takes to end by itself: `engine_process._EXIT_S`
_BURY_S = 2.0
_MAX_SOCKET_PATH = 107  # bytes, of Linux


def socket_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder for the socket: in TMPDIR, or in /tmp if TMPDIR is longer than the path of a socket may be."""
    place = tempfile.gettempdir()
    is_short = len(os.fsencode(f"{place}/jaxllm-12345678/engine")) <= _MAX_SOCKET_PATH
    return tempfile.TemporaryDirectory(prefix="jaxllm-", dir=place if is_short else "/tmp")  # noqa: S108 - a new folder, of this user alone


class ProcessClient:
    """An `EngineClient`. `options` are those of `build_engine`, as far as msgpack has them; `module` is what the
    process runs."""

    def __init__(self, options: dict[str, Any], *, module: str = "jaxllm.server.engine.engine_process"):
        self._options, self._module = options, module
        self._info: EngineInfo | None = None
        self._stats: EngineStats | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._commands: dict[int, asyncio.Future[bool]] = {}  # those that are not done, by number
        self._num_commands = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task] = []
        self._ready: asyncio.Future[None] | None = None
        self._dead: Exception | None = None
        self._silence, self._beat = SilenceMeter(), wire.Beat(0.0, 0.0, None)

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        self._ready = asyncio.get_running_loop().create_future()
        reader = await self._connect()
        self._send(wire.Start(self._options))
        self._tasks = [asyncio.create_task(self._read(reader)), asyncio.create_task(self._watch())]
        await self._ready

    async def _connect(self) -> asyncio.StreamReader:
        """Starts the process and waits for it to call. The socket has no name any more afterwards."""
        loop = asyncio.get_running_loop()
        with socket_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
            path = Path(folder, "engine")
            listener.bind(str(path))
            os.chmod(path, 0o600)
            listener.listen(1)
            listener.setblocking(False)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(path)],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
                start_new_session=True,  # the terminal's Ctrl-C is for the server, which drains
            )
            accepting = asyncio.ensure_future(loop.sock_accept(listener))
            try:
                while not (await asyncio.wait({accepting}, timeout=_TICK_S))[0]:
                    if self._process.poll() is not None:
                        raise EngineDeadError(f"the engine's process ended with status {self._process.returncode}")
                connection, _ = accepting.result()
            finally:
                accepting.cancel()
        reader, self._writer = await asyncio.open_unix_connection(sock=connection, limit=1 << 20)
        return reader

    def _send(self, message: wire.FromServer) -> None:
        if self._writer is not None and self._dead is None:
            self._writer.write(wire.frame(message))

    async def generate(
        self, token_ids: list[int], params: SamplingParams, *, request_id: str, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        if self._dead is not None:
            raise EngineDeadError(str(self._dead)) from self._dead
        mailbox = self._mailboxes[request_id] = Mailbox(is_delta=True)
        try:
            self._send(wire.Add(request_id, token_ids, wire.pack_params(params), priority))
            while not mailbox.is_finished:
                yield await mailbox.get()
        finally:
            if self._mailboxes.pop(request_id, None) is not None and not mailbox.is_finished:
                self._send(wire.Abort(request_id, tells=False))

    async def pool(
        self, token_ids: list[int], params: PoolingParams, *, request_id: str, priority: int = 0
    ) -> PoolingRequestOutput:
        if self._dead is not None:
            raise EngineDeadError(str(self._dead)) from self._dead
        mailbox = self._mailboxes[request_id] = Mailbox(is_delta=False)
        try:
            self._send(wire.Pool(request_id, token_ids, wire.pack_pooling(params), priority))
            return await mailbox.get()
        finally:
            if self._mailboxes.pop(request_id, None) is not None and not mailbox.is_finished:
                self._send(wire.Abort(request_id, tells=False))

    def abort(self, request_id: str) -> None:
        self._send(wire.Abort(request_id, tells=True))

    def abort_all(self) -> None:
        for request_id in list(self._mailboxes):
            self.abort(request_id)

    async def command(self, command: EngineCommand) -> bool:
        if self._dead is not None:
            raise EngineDeadError(str(self._dead)) from self._dead
        self._num_commands += 1
        number = self._num_commands
        done = self._commands[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(wire.Do(number, command))
            return await done
        finally:
            del self._commands[number]

    def fail_all(self, reason: str) -> None:
        for request_id in list(self._mailboxes):
            mailbox = self._mailboxes.pop(request_id)
            mailbox.put(RequestEndedError(reason))
            self._send(wire.Abort(request_id, tells=False))

    def stats(self) -> EngineStats | None:
        return self._stats

    def health(self) -> Health:
        missed_s = self._silence.silent_s if self._silence.silent_s > _LATE_S else 0.0
        beat = self._beat
        return Health(self._dead is None, max(missed_s, beat.silent_s), beat.patience_s, beat.trouble)

    @property
    def death(self) -> Exception | None:
        """Why it has stopped; None while it lives."""
        return self._dead

    @property
    def unheard_s(self) -> float:
        """Seconds since its process last gave a sign of life, which it does several times a second."""
        return self._silence.silent_s

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reason: Exception = EngineDeadError("the engine's process ended")
        try:
            while True:
                length = wire.frame_length(await reader.readexactly(wire.HEAD_BYTES))
                message = wire.from_engine.decode(await reader.readexactly(length))
                if isinstance(message, wire.Failed):
                    reason = _why(message)
                    break
                self._take(message)
        except (asyncio.IncompleteReadError, OSError):
            log.debug("the engine's connection ended", exc_info=True)
        except Exception:  # noqa: BLE001 - without this task nobody would learn anything any more
            log.exception("what the engine says can't be read")
            reason = EngineDeadError("the engine's process says what can't be read")
        self._die(reason)

    def _take(self, message: wire.FromEngine) -> None:
        self._silence.heard()
        match message:
            case wire.Outputs(outputs=outputs):
                for output in outputs:
                    if (mailbox := self._mailboxes.get(output.request_id)) is not None:
                        mailbox.put(output)
            case wire.Pooled(outputs=outputs):
                for output in outputs:
                    if (mailbox := self._mailboxes.get(output.request_id)) is not None:
                        mailbox.put(output.to_output())
            case wire.Refused(request_id=request_id, message=text):
                if (mailbox := self._mailboxes.pop(request_id, None)) is not None:
                    mailbox.put(RuntimeError("the engine failed to take it") if text is None else ValueError(text))
            case wire.Done(number=number):
                if (done := self._commands.get(number)) is not None and not done.done():
                    _settle(done, message)
            case wire.Beat():
                self._beat, self._stats = message, message.stats or self._stats
            case wire.Ready(info=info, stats=stats):
                self._info, self._stats = info, stats
                if not self._ready.done():  # it may be cancelled
                    self._ready.set_result(None)

    def _die(self, reason: Exception) -> None:
        self._dead = reason
        if not self._ready.done():
            self._ready.set_exception(reason)
        for mailbox in self._mailboxes.values():
            mailbox.put(EngineDeadError(str(reason)))
        self._mailboxes.clear()
        for done in self._commands.values():
            if not done.done():
                done.set_exception(EngineDeadError(str(reason)))

    async def _watch(self) -> None:
        while True:
            self._silence.tick()
            await asyncio.sleep(_TICK_S)

    async def close(self) -> None:
        """Ends the process: it goes by itself when its socket closes, or is killed."""
        self._send(wire.Close())
        await self._end(_CLOSE_S)

    async def bury(self) -> None:
        """Makes sure that a process which has died, or hangs, is there no more."""
        await self._end(_BURY_S)

    async def _end(self, within_s: float) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._ready is not None and self._dead is None:
            self._ready.cancel()  # nobody waits for it any more
            self._die(EngineDeadError("the engine was closed"))
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await asyncio.to_thread(_reap, self._process, within_s)


def _why(message: wire.Failed) -> Exception:
    return JaxLLMError(message.message) if message.is_user_error else EngineDeadError(message.message)


def _settle(done: "asyncio.Future[bool]", message: wire.Done) -> None:
    if message.error is None:
        done.set_result(message.is_sleeping)
    else:
        done.set_exception((ValueError if message.is_user_error else RuntimeError)(message.error))


def _reap(process: subprocess.Popen[bytes], within_s: float) -> None:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        log.warning("the engine's process did not end within %.0f s and is killed", within_s)
        process.kill()
        process.wait()
