"""Measures a server under load: streams over HTTP from its own `python -m jaxllm.serve`, with latencies, memory and
leaks. `compare` does the same work through `LLM.generate` too."""

import asyncio
import datetime
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.cli.environment import KEY_VARIABLES

_IDS = range(5, 250)  # token ids of prompts: every model has as many
_SETTLE_S = 15.0  # for blocks and connections to be released
_STOP_S = 60.0


class Sample(NamedTuple):
    """One request; times in seconds."""

    first_s: float  # to the first token
    whole_s: float
    num_tokens: int
    error: str | None

    @property
    def per_token_s(self) -> float:
        """Mean time per token after the first."""
        return (self.whole_s - self.first_s) / max(1, self.num_tokens - 1)


class ServerProcess:
    """A server in a separate process, on a free port of this machine."""

    def __init__(self, options: Sequence[str]):
        command = [sys.executable, "-m", "jaxllm.serve", "--port", "0", "--served-model-name", "bench", *options]
        env = {name: value for name, value in os.environ.items() if name not in KEY_VARIABLES}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.log: list[str] = []
        for line in self.process.stderr:
            self.log.append(line)
            if line.startswith("└"):
                break
        found = re.search(r"http://127\.0\.0\.1:(\d+)", "".join(self.log))
        if found is None:
            raise RuntimeError(f"the server did not start:\n{''.join(self.log)}")
        self.port = int(found[1])
        self._stopped_at = len(self.log)
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr))
        self._reader.start()  # keeps the log from filling the pipe

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of the server and its engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        engines = [pid for pid in children if "engine_process" in Path(f"/proc/{pid}/cmdline").read_text()]
        return {"server": self.process.pid, "engine": int(engines[0])}

    def rss_mb(self) -> dict[str, float]:
        page = os.sysconf("SC_PAGE_SIZE")
        return {
            name: round(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page / 1e6, 1)
            for name, pid in self.pids.items()
        }

    def num_fds(self) -> dict[str, int]:
        return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in self.pids.items()}

    @property
    def last_log(self) -> list[str]:
        """The lines since it was told to stop, 20 at most."""
        return [line.strip() for line in self.log[self._stopped_at :][-20:]]

    def stop(self) -> int:
        self._stopped_at = len(self.log)
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_STOP_S)
        finally:
            self.process.kill()
            self._reader.join()
            self.process.stderr.close()


def server_options(engine: dict[str, Any]) -> list[str]:
    """The command's options for an engine's keyword arguments."""
    given = dict(engine)
    options = [] if given.pop("enable_prefix_caching", True) else ["--no-prefix-caching"]
    return [*options, *(part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value)))]


async def stream(port: int, prompt: list[int], output_len: int) -> Sample:
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": output_len,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    start = time.monotonic()
    first_s, count, error = 0.0, 0, "the stream had no end"
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + data)
            status = await reader.readline()
            if b" 200 " not in status:
                return Sample(0.0, 0.0, 0, status.decode().strip())
            async for line in reader:
                if line.startswith(b"data: [DONE]"):
                    error = None if count == output_len else f"{count} tokens of {output_len}"
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        error = event["error"]["message"]
                    elif event.get("usage"):
                        count = event["usage"]["completion_tokens"]
                    first_s = first_s or time.monotonic() - start
        finally:
            writer.close()
            await writer.wait_closed()
    except OSError as broken:
        error = str(broken)
    return Sample(first_s, time.monotonic() - start, count, error)


async def get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return answer


async def at_once(count: int, one: Callable[[int], Awaitable[list[Sample]]]) -> list[Sample]:
    return [sample for samples in await asyncio.gather(*map(one, range(count))) for sample in samples]


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(_IDS, k=length) for _ in range(count)]


async def _load(
    server: ServerProcess, *, streams: int, seconds: float, input_len: int, output_len: int, seed: int
) -> Any:
    """Each client sends one request after another. Returns the samples, and memory at start, middle and end."""
    given = prompts(streams, input_len, seed)
    end = time.monotonic() + seconds

    async def client(i: int) -> list[Sample]:
        samples, draw = [], random.Random(seed * 1_000_003 + i)
        while time.monotonic() < end:
            samples.append(await stream(server.port, draw.sample(given[i], input_len), output_len))
            if samples[-1].error is not None:
                await asyncio.sleep(0.1)  # back off like a real client after a refusal
        return samples

    memory = {"start": server.rss_mb()}

    async def watch() -> None:
        await asyncio.sleep(seconds / 2)
        memory["middle"] = server.rss_mb()

    watching = asyncio.create_task(watch())
    samples = await at_once(streams, client)
    await watching
    memory["end"] = server.rss_mb()
    return samples, memory


async def _settled(server: ServerProcess, fds: dict[str, int]) -> dict[str, Any]:
    """The KV blocks and file descriptors in use once they are released, or after a timeout."""
    end = time.monotonic() + _SETTLE_S
    while True:
        text = await get(server.port, "/metrics")
        used = float(re.search(r"^jaxllm:kv_cache_usage_perc\{.*\} (\S+)", text, re.M)[1])
        more = {name: count - fds[name] for name, count in server.num_fds().items()}
        if (not used and max(more.values()) <= 0) or time.monotonic() > end:
            return {"kv_cache_usage": used, "more_fds": more}
        await asyncio.sleep(0.2)


def run(engine: dict[str, Any], *, streams: int, seconds: float, input_len: int, output_len: int, seed: int) -> dict:
    """A report, ready for JSON."""
    server = ServerProcess(["--max-queued-requests", str(streams), *server_options(engine)])
    sizes = dict(input_len=input_len, output_len=output_len, seed=seed)

    async def main() -> tuple[Any, ...]:
        await at_once(streams, lambda i: _few(server.port, [prompts(streams, input_len, seed + 1)[i]], output_len))
        fds = server.num_fds()
        start = time.monotonic()
        samples, memory = await _load(server, streams=streams, seconds=seconds, **sizes)
        return samples, memory, time.monotonic() - start, await _settled(server, fds)

    try:
        samples, memory, elapsed_s, left = asyncio.run(main())
    finally:
        status = server.stop()
    good = [sample for sample in samples if sample.error is None]
    return {
        "date": datetime.date.today().isoformat(),
        "streams": streams,
        "seconds": round(elapsed_s, 2),
        **sizes,
        "requests": len(samples),
        "errors": sorted({s.error for s in samples if s.error is not None}),
        "failed": len(samples) - len(good),
        "tokens_per_s": round(sum(sample.num_tokens for sample in good) / elapsed_s, 1),
        "time_to_first_token_ms": _percentiles([sample.first_s for sample in good]),
        "time_per_output_token_ms": _percentiles([sample.per_token_s for sample in good]),
        "rss_mb": memory,
        "left": left,
        "exit_status": status,
        "last_log": server.last_log,
    }


async def _few(port: int, given: list[list[int]], output_len: int) -> list[Sample]:
    return [await stream(port, prompt, output_len) for prompt in given]


def _percentiles(values: list[float]) -> dict[str, float] | None:
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{percent}": round(cuts[percent - 1] * 1e3, 2) for percent in (50, 90, 99)}


def compare(engine: dict[str, Any], *, streams: int, input_len: int, output_len: int, repeats: int, seed: int) -> dict:
    """Tokens per second of the same requests, all at once, over HTTP and through the library, alternating."""
    from jaxllm import LLM, SamplingParams

    server = ServerProcess(server_options(engine))
    llm = LLM(**engine)
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    rates: dict[str, list[float]] = {"http": [], "library": []}
    try:
        for i in range(repeats + 1):
            given = prompts(streams, input_len, seed + i)
            start = time.monotonic()
            samples = asyncio.run(at_once(streams, lambda k, given=given: _few(server.port, [given[k]], output_len)))
            over_http_s = time.monotonic() - start
            wrong = [sample.error for sample in samples if sample.error is not None]
            if wrong:
                raise RuntimeError(f"{len(wrong)} requests failed: {wrong[0]}")
            start = time.monotonic()
            llm.generate([{"prompt_token_ids": prompt} for prompt in given], params)
            by_library_s = time.monotonic() - start
            if i:  # the first round compiles
                rates["http"].append(streams * output_len / over_http_s)
                rates["library"].append(streams * output_len / by_library_s)
    finally:
        server.stop()
        llm.close()
    ratios = [http / library for http, library in zip(rates["http"], rates["library"], strict=True)]
    return {
        "date": datetime.date.today().isoformat(),
        "streams": streams,
        "input_len": input_len,
        "output_len": output_len,
        "tokens_per_s": {name: [round(x, 1) for x in found] for name, found in rates.items()},
        "ratios": [round(ratio, 3) for ratio in ratios],
        "median_ratio": round(statistics.median(ratios), 3),
    }


def table(report: dict[str, Any]) -> str:
    width = max(map(len, report))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in report.items())
