"""A server that is watched while others load it: for `fuzz_server.py` and `soak_server.py`."""

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.bench.serve import ServerProcess

OPTIONS = ("--chat-template", "vicuna", "--tool-call-parser", "hermes", "--max-model-len", "512")
SIZES = ("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--num-blocks", "512")
MODEL = "bench"  # which the server process serves
_METRIC = re.compile(r"^jaxllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_PATIENCE_S = 120.0
_SETTLE_S = 30.0


class Answer(NamedTuple):
    """Times in seconds; `status` is 0 for a connection that was closed without an answer, or that was left."""

    status: int
    body: bytes
    first_s: float = 0.0
    whole_s: float = 0.0

    @property
    def usage(self) -> dict[str, Any]:
        """Of a whole answer, or of a stream's last event but one."""
        events = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: {")]
        for text in reversed(events) if events else [self.body]:
            value = json.loads(text)
            if found := value.get("usage") or value.get("response", {}).get("usage"):
                return found
        return {}


async def send(port: int, path: str, body: Any = None, *, headers: str = "", leave_after: int | None = None) -> Answer:
    """One request on a connection of its own, which is closed after so many bytes of the answer to leave early."""
    data = b"" if body is None else json.dumps(body).encode()
    kind = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n" if body is not None else ""
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{kind}{headers}\r\n"
    start, got, first_s = time.monotonic(), b"", 0.0
    async with asyncio.timeout(_PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head.encode() + data)
            while part := await reader.read(1 << 16):
                got += part
                first_s = first_s or time.monotonic() - start
                if leave_after is not None and len(got) >= leave_after:
                    return Answer(0, b"", first_s)
        finally:
            writer.close()
    status, _, body = got.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in status.lower():
        body = _unchunk(body)
    return Answer(int(got.split()[1]) if got else 0, body, first_s, time.monotonic() - start)


def _unchunk(data: bytes) -> bytes:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        parts.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(parts)


async def metrics(port: int) -> dict[str, float]:
    """Sums over the labels."""
    found: dict[str, float] = {}
    for name, value in _METRIC.findall((await send(port, "/metrics")).body.decode()):
        found[name] = found.get(name, 0.0) + float(value)
    return found


async def sample(server: ServerProcess) -> dict[str, Any]:
    """Memory, descriptors, what the engine holds, and how soon /health answers."""
    health = await send(server.port, "/health")
    now = await metrics(server.port)
    return {
        "rss_mb": server.rss_mb(),
        "fds": server.num_fds(),
        "kv_cache_usage": now["kv_cache_usage_perc"],
        "running": now["num_requests_running"],
        "waiting": now["num_requests_waiting"],
        "health": health.status,
        "health_ms": round(health.whole_s * 1e3, 1),
    }


async def settled(server: ServerProcess) -> dict[str, Any]:
    """A sample once nothing runs and no block is in use, or the last one after a timeout."""
    end, quiet = time.monotonic() + _SETTLE_S, 0
    while True:
        now = await sample(server)
        quiet = quiet + 1 if not (now["kv_cache_usage"] or now["running"] or now["waiting"]) else 0
        if quiet == 3 or time.monotonic() > end:  # the engine's statistics come four times a second
            return now
        await asyncio.sleep(0.3)


def still_held(now: dict[str, Any]) -> list[str]:
    """What a settled server holds that it should not."""
    names = ("kv_cache_usage", "running", "waiting")
    return [f"{name} is {now[name]} with nothing to do" for name in names if now[name]]


class Journal:
    """Lines of JSON in a file, each with the seconds since the start."""

    def __init__(self, file: Path):
        self._file, self._start = file.open("w"), time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def write(self, **fields: Any) -> None:
        self._file.write(json.dumps({"s": round(self.seconds, 1)} | fields) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
