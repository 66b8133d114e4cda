"""A server over an engine that is none: what the engine would say is scripted, and nothing is compiled."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from dataclasses import dataclass, field

import numpy as np

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.stats import EngineStats
from jaxllm.errors import EngineDeadError, RequestEndedError
from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput
from jaxllm.pooling_outputs import PoolingOutput, PoolingRequestOutput
from jaxllm.server.config import ServerConfig
from jaxllm.server.engine.client import EngineInfo, Health
from jaxllm.server.http.run import bind, make_web
from jaxllm.server.served_model import ServedModel
from jaxllm.server.server import Server
from jaxllm.text.chat_template import ChatTemplates
from jaxllm.text.tokenizer import Tokenizer
from tests.chat_model import SPECIAL, TEMPLATE, backend

VOCAB = 256 + len(SPECIAL)
CONFIG = EngineConfig(max_model_len=256, max_num_seqs=2, max_num_batched_tokens=32, block_size=4, num_blocks=64)
NOTHING = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
_SECONDS = dict.fromkeys(("compile_s", "step_s", "device_wait_s"), 0.0)
STATS = EngineStats(**NOTHING | {"num_blocks": 64, "block_size": 4, "step_counts": [0] * 14} | _SECONDS)
WAIT_S = 10.0
ABORTED = object()


def tokenizer(template=TEMPLATE) -> Tokenizer:
    chat = ChatTemplates({} if template is None else {"default": template})
    return Tokenizer(backend(), eos_token="</s>", chat=chat)


@dataclass
class FakeClient:
    """Says `reply` to everything, a character a token, `step` characters at a time; what is in `says` is another reply,
    or an exception to raise, by what the prompt holds. While `gate` is clear, nobody gets a token."""

    reply: str = "Hello, world"
    says: dict = field(default_factory=dict)
    step: int = 1
    finish_reason: str = "stop"
    info: EngineInfo | None = field(default_factory=lambda: EngineInfo(CONFIG, VOCAB, width=4))
    silent_s: float = 0.0

    def __post_init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.running, self.seen, self.aborted, self.commands = {}, [], [], []
        self.is_sleeping = False
        self.is_alive = True
        self.broken: Exception | None = None
        self._decoder = tokenizer()

    async def start(self):
        pass

    async def close(self):
        self.is_alive = False

    def health(self):
        return Health(self.is_alive, self.silent_s)

    def stats(self):
        return STATS

    def abort(self, request_id):
        self.running.pop(request_id, None)

    def abort_all(self):
        for request_id in list(self.running):
            self.running[request_id] = ABORTED

    async def command(self, command):
        if command.name == "sleep" and self.running:
            raise ValueError(f"{len(self.running)} requests run")
        if command.tags == ["wrong"]:
            raise ValueError("tags has 'wrong'")
        self.commands.append(command)
        if command.name != "reset_prefix_cache":
            self.is_sleeping = command.name == "sleep" or command.tags == ["weights"]
        return self.is_sleeping

    def fail_all(self, reason):
        for request_id in list(self.running):
            self.running[request_id] = RequestEndedError(reason)

    def die(self, reason="it was killed"):
        self.is_alive = False
        self.running = {request_id: EngineDeadError(reason) for request_id in self.running}

    async def generate(self, token_ids, params, *, request_id, priority=0):
        self.seen.append((token_ids, params, priority))
        self.running[request_id] = None
        try:
            async for output in self._outputs(token_ids, params, request_id):
                yield output
                if output.finished:
                    return
        finally:
            if self.running.pop(request_id, None) is not None or not self._is_over:
                self.aborted.append(request_id)

    async def pool(self, token_ids, params, *, request_id, priority=0):
        """The sum of the tokens in each element, or what `says` has for the prompt's text."""
        self.seen.append((token_ids, params, priority))
        self.running[request_id] = None
        try:
            await self._pass(request_id)
            text = self._decoder.decode(token_ids, skip_special_tokens=False)
            says = next((answer for key, answer in self.says.items() if key in text), None)
            if isinstance(says, Exception):
                raise says
            data = np.asarray([sum(token_ids)] * self.info.width if says is None else says, np.float32)
            self.running.pop(request_id)
            return PoolingRequestOutput(request_id=request_id, outputs=PoolingOutput(data=data))
        finally:
            if self.running.pop(request_id, self) is not self:
                self.aborted.append(request_id)

    async def _outputs(self, token_ids, params, request_id):
        self._is_over = False
        text = self._decoder.decode(token_ids, skip_special_tokens=False)
        reply = next((answer for key, answer in self.says.items() if key in text), self.reply)
        reply, reason = reply if isinstance(reply, tuple) else (reply, self.finish_reason)
        if isinstance(reply, Exception):
            raise reply
        limit = len(reply) if params.max_tokens is None else params.max_tokens
        reason, reply = (reason if len(reply) <= limit else "length"), reply[:limit]
        parts = [reply[i : i + self.step] for i in range(0, len(reply), self.step)]
        for i, part in enumerate(parts):
            if await self._pass(request_id) is ABORTED:
                yield RequestOutput(
                    request_id=request_id,
                    prompt=None,
                    prompt_token_ids=[],
                    prompt_logprobs=None,
                    finished=True,
                    outputs=[self._piece(k, "", params, "abort") for k in range(params.n)],
                )
                return
            is_last = i == len(parts) - 1
            scores = None
            if params.prompt_logprobs is not None and i == 0:
                scores = [None, *({token: self._entry(token, 1)} for token in token_ids[1:])]
            self._is_over = is_last
            yield RequestOutput(
                request_id=request_id,
                prompt=None,
                prompt_token_ids=[],
                prompt_logprobs=scores,
                finished=is_last,
                outputs=[self._piece(k, part, params, reason if is_last else None) for k in range(params.n)],
            )

    def _piece(self, index, part, params, reason):
        *ids, other = self._decoder.encode(f"{part}A", add_special_tokens=False)
        logprobs = None
        if params.wants_logprobs:
            others = [other] if params.logprob_token_ids is None else params.logprob_token_ids
            ranked = {other: self._entry(other, 2 + i) for i, other in enumerate(others)}
            logprobs = [ranked | {token: self._entry(token, 1)} for token in ids]
        return CompletionOutput(index=index, text=part, token_ids=ids, logprobs=logprobs, finish_reason=reason)

    def _entry(self, token, rank):
        return Logprob(-0.5 * rank, rank, self._decoder.token_text(token))

    async def _pass(self, request_id):
        while True:
            if self.running[request_id] is ABORTED:
                return ABORTED
            if self.running[request_id] is not None:
                raise self.running[request_id]
            if self.gate.is_set():
                await asyncio.sleep(0)  # as an engine that others get their turn beside
                return None
            await asyncio.sleep(0.005)


class Web:
    """A running server: its port, and ways to speak to it without a client library."""

    def __init__(self, server: Server, port: int, loop: asyncio.AbstractEventLoop):
        self.server, self.port, self.loop = server, port, loop
        self.client = server.client
        self.connections: set = set()  # that are open

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def raw(self, data: bytes) -> "Answer":
        with self.connect() as connection:
            connection.sendall(data)
            return read_answer(connection)

    def send(self, method: str, path: str, body=None, headers=()) -> "Answer":
        return self.raw(request(method, path, body, headers))

    def post(self, path: str, body, headers=()) -> "Answer":
        return self.send("POST", path, body, headers)

    def complete(self, **fields) -> "Answer":
        return self.post("/v1/completions", {"model": "fake", "prompt": "Hi"} | fields)

    def chat(self, **fields) -> "Answer":
        messages = [{"role": "user", "content": "Hi"}]
        return self.post("/v1/chat/completions", {"model": "fake", "messages": messages} | fields)

    def open_stream(self, **fields) -> socket.socket:
        connection = self.connect()
        body = {"model": "fake", "prompt": "Hi", "stream": True} | fields
        connection.sendall(request("POST", "/v1/completions", body))
        return connection

    def wait(self, condition) -> None:
        """Until it holds, at most `WAIT_S`."""
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, "it never came to be"
            time.sleep(0.005)


@dataclass
class Answer:
    status: int
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        assert set(self.json) == {"error"} and set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]

    @property
    def data(self) -> list[str]:
        """Of a stream's events."""
        assert self.headers["content-type"].startswith("text/event-stream")
        return [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]

    @property
    def chunks(self) -> list[dict]:
        *chunks, done = self.data
        assert done == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]


def request(method: str, path: str, body=None, headers=()) -> bytes:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = {"Host": "localhost", "Connection": "close"}
    if body is not None:
        head |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in (head | dict(headers)).items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data


def read_answer(connection: socket.socket) -> Answer:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            data += part
    assert data, "the connection was closed without an answer"
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _unchunk(body)
    return Answer(int(status.split()[1]), headers, body)


def _unchunk(data: bytes) -> bytes:
    whole = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        whole, data = whole + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return whole


@contextlib.contextmanager
def running(client=None, *, template=TEMPLATE, defaults=None, **settings):
    """A server on a free port, in a thread of its own."""
    config = ServerConfig(**{"port": 0, "served_model_names": ("fake", "org/alias")} | settings)
    model = ServedModel(config.served_model_names, tokenizer(template), dict(defaults or {}), created=7)
    started, loop = threading.Event(), asyncio.new_event_loop()
    box = {}

    async def main():
        listener = bind(config)
        server = Server(config, FakeClient() if client is None else client, model)
        web = make_web(server)
        box.update(web=Web(server, listener.getsockname()[1], loop), uvicorn=web)
        await server.start()
        serving = asyncio.create_task(web.serve(sockets=[listener]))
        while not web.started:
            await asyncio.sleep(0.001)
        box["web"].connections = web.server_state.connections
        started.set()
        await serving
        await server.close()
        listener.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert started.wait(60)
    try:
        yield box["web"]
    finally:
        box["uvicorn"].should_exit = True
        thread.join(WAIT_S)
        loop.close()
        assert not thread.is_alive()
