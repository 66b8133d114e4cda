"""Hours of mixed traffic on a server of the embedded model, and whether anything is left of it.

    python scripts/soak_server.py --minutes 120 --out soak.jsonl

Rounds of three phases follow each other: everything (streams, samples, grammars, tools, clients that leave, deadlines,
wrong requests), then the same without those that leave, in which the server's counters must grow by exactly what the
answers' `usage` says, then a pause. A sample of memory, descriptors, blocks and latencies goes to the file every
few seconds, and a summary with a verdict is printed at the end; the exit code is 1 if it failed.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from live_server import MODEL, OPTIONS, SIZES, Journal, metrics, sample, send, settled, still_held

from jaxllm.bench.serve import ServerProcess

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
WORDS = "the cat sat on a mat and def read lines path return for in range import class self print open file".split()
MIXED_S, COUNTED_S, PAUSE_S = 90.0, 45.0, 15.0
SAMPLE_S = 5.0
MOST_SLOPE_MB = 1.0  # an hour
LEAST_JUDGED_H = 0.75  # shorter runs say nothing about a megabyte an hour


def text(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, 60)))


def accepted(draw: random.Random) -> tuple[str, str, dict[str, Any]]:
    """Kind, path and body of a request that must be answered with 200."""
    prompt, most = {"model": MODEL, "prompt": text(draw)}, {"max_tokens": draw.randint(1, 48)}
    messages = [{"role": "user", "content": text(draw)}]
    chat = {"model": MODEL, "messages": messages}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    completions, chats = "/v1/completions", "/v1/chat/completions"
    return draw.choice((
        ("unary", completions, prompt | most),
        ("stream", completions, prompt | most | stream),
        ("samples", completions, prompt | most | {"n": draw.randint(2, 4), "logprobs": draw.randint(0, 3)}),
        ("several", completions, prompt | most | {"prompt": [text(draw) for _ in range(draw.randint(2, 5))]}),
        ("echo", completions, prompt | {"echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0}),
        ("salted", completions, prompt | most | {"cache_salt": f"{draw.random()}", "seed": draw.randint(0, 9)}),
        ("penalties", completions, prompt | most | {"repetition_penalty": 1.2, "logit_bias": {"7": -9}, "top_k": 9}),
        ("regex", completions, prompt | most | {"guided_regex": f"[a-{draw.choice('cdefgh')}]{{3,9}}"}),
        ("schema", completions, prompt | {"max_tokens": 64, "structured_outputs": {"json": SCHEMA}}),
        ("chat", chats, chat | most),
        ("chat stream", chats, chat | most | stream),
        ("tools", chats, chat | {"max_tokens": 80, "tools": [TOOL], "tool_choice": "required"}),
        ("responses", "/v1/responses", {"model": MODEL, "input": text(draw), "max_output_tokens": draw.randint(1, 40)}),
        ("tokenize", "/tokenize", {"model": MODEL, "prompt": text(draw)}),
        ("models", "/v1/models", None),
    ))  # fmt: skip


def refused(draw: random.Random) -> tuple[str, str, Any, int]:
    """Kind, path, body and the status that it must get."""
    prompt = {"model": MODEL, "prompt": text(draw)}
    return draw.choice((
        ("wrong field", "/v1/completions", prompt | {"n": -1}, 400),
        ("no model", "/v1/completions", prompt | {"model": "none"}, 404),
        ("too long", "/v1/completions", prompt | {"prompt": "x y " * 2000}, 400),
        ("bad schema", "/v1/completions", prompt | {"guided_json": {"type": f"t{draw.randint(0, 99)}"}}, 400),
        ("no messages", "/v1/chat/completions", {"model": MODEL, "messages": []}, 400),
        ("no route", "/v1/nothing", {}, 404),
    ))  # fmt: skip


class Soak:
    """What was asked and answered so far."""

    def __init__(self, port: int, seed: int):
        self._port, self._draw = port, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.first_s: list[float] = []  # since the last sample
        self.prompt_tokens = self.generated_tokens = 0

    async def client(self, end: float, journal: Journal, *, leaves: bool) -> None:
        while journal.seconds < end:
            kind = self._draw.random()
            if leaves and kind < 0.25:
                await self._leave()
            elif leaves and kind < 0.3:
                await self._hurry()
            elif kind < 0.4:
                await self._refused()
            else:
                await self._accepted()

    async def _accepted(self) -> None:
        kind, path, body = accepted(self._draw)
        answer = await send(self._port, path, body)
        self._count(kind, answer, 200)
        if answer.status != 200 or kind in ("tokenize", "models"):
            return
        self.first_s.append(answer.first_s)
        usage = answer.usage
        self.prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        self.generated_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))

    async def _refused(self) -> None:
        kind, path, body, status = refused(self._draw)
        self._count(kind, await send(self._port, path, body), status)

    async def _leave(self) -> None:
        kind, path, body = accepted(self._draw)
        await send(self._port, path, body, leave_after=self._draw.choice((1, 200, 500, 2000)))
        self.counts[f"{kind}: left"] += 1

    async def _hurry(self) -> None:
        body = {"model": MODEL, "prompt": text(self._draw), "max_tokens": 400, "ignore_eos": True}
        answer = await send(self._port, "/v1/completions", body, headers="x-request-timeout: 0.02\r\n")
        self._count("deadline", answer, 504)

    def _count(self, kind: str, answer: Any, wanted: int) -> None:
        self.counts[f"{kind}: {answer.status}"] += 1
        is_cut = answer.status == 200 and b'"error":{' in answer.body
        if answer.status != wanted or is_cut:
            self.problems.append(f"{kind}: {answer.status}, not {wanted}: {answer.body[-300:]!r}")


async def phase(soak: Soak, journal: Journal, name: str, seconds: float, streams: int, watch: Any) -> None:
    end = journal.seconds + seconds
    clients = asyncio.gather(*(soak.client(end, journal, leaves=name == "mixed") for _ in range(streams)))
    while not clients.done():
        await asyncio.wait({clients}, timeout=SAMPLE_S)
        await watch(name)
    await clients


async def run(server: ServerProcess, journal: Journal, *, minutes: float, streams: int, seed: int) -> dict[str, Any]:
    soak, samples, end = Soak(server.port, seed), [], minutes * 60

    async def watch(name: str) -> dict[str, Any]:
        now = await (settled if name == "pause" else sample)(server)
        first_s, soak.first_s = soak.first_s, []
        now |= {"phase": name, "hours": journal.seconds / 3600, "first_ms": None}
        if first_s:
            now["first_ms"] = {"p50": round(statistics.median(first_s) * 1e3), "max": round(max(first_s) * 1e3)}
        samples.append(now)
        journal.write(**now, requests=sum(soak.counts.values()))
        if now["health"] != 200:
            soak.problems.append(f"/health says {now['health']} after {journal.seconds:.0f} s")
        if name == "pause":
            soak.problems += [f"{held}, after {journal.seconds:.0f} s" for held in still_held(now)]
        return now

    share = min(1.0, end / (MIXED_S + COUNTED_S + PAUSE_S))
    await phase(soak, journal, "mixed", MIXED_S * share / 4, streams, watch)  # starts what is started once
    first = await watch("pause")
    while journal.seconds < end:
        await phase(soak, journal, "mixed", MIXED_S * share, streams, watch)
        await watch("pause")
        before, soak.prompt_tokens, soak.generated_tokens = await metrics(server.port), 0, 0
        await phase(soak, journal, "counted", COUNTED_S * share, streams, watch)
        await watch("pause")
        after = await metrics(server.port)
        for name, said in (("prompt", soak.prompt_tokens), ("generation", soak.generated_tokens)):
            counted = after[f"{name}_tokens_total"] - before[f"{name}_tokens_total"]
            if counted != said:
                soak.problems.append(f"{counted:.0f} {name} tokens were counted, and usage says {said}")
        await asyncio.sleep(PAUSE_S * share)
        last = await watch("pause")
    return summary(soak, first, last, samples)


def slope_mb(samples: list[dict[str, Any]], process: str) -> float:
    """Megabytes an hour, by least squares over the pauses after the first eighth of the run."""
    settled = [one for one in samples if one["phase"] == "pause" and one["hours"] >= samples[-1]["hours"] / 8]
    line = statistics.linear_regression([one["hours"] for one in settled], [one["rss_mb"][process] for one in settled])
    return round(line.slope, 2)


def summary(soak: Soak, first: dict, last: dict, samples: list[dict[str, Any]]) -> dict[str, Any]:
    hours, problems = last["hours"], list(soak.problems)
    slopes = {process: slope_mb(samples, process) for process in first["rss_mb"]}
    if hours >= LEAST_JUDGED_H:
        problems += [f"{name} grows by {by} MB an hour" for name, by in slopes.items() if by > MOST_SLOPE_MB]
    for name, count in last["fds"].items():
        if count > first["fds"][name]:
            problems.append(f"{name} has {count} descriptors, and had {first['fds'][name]}")
    return {
        "minutes": round(hours * 60, 1),
        "requests": sum(soak.counts.values()),
        "by_kind": dict(sorted(soak.counts.items())),
        "rss_mb": {"first": first["rss_mb"], "last": last["rss_mb"], "an_hour": slopes},
        "fds": {"first": first["fds"], "last": last["fds"]},
        "health_ms_max": max(one["health_ms"] for one in samples),
        "problems": problems[:20],
        "num_problems": len(problems),
        "verdict": "failed" if problems else "passed",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=120.0, help="(default: 120)")
    parser.add_argument("--streams", type=int, default=12, help="clients at once (default: 12)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("soak.jsonl"), help="where samples go (default: soak.jsonl)")
    arguments = parser.parse_args()
    server, journal = ServerProcess([*OPTIONS, *SIZES]), Journal(arguments.out)
    sizes = dict(minutes=arguments.minutes, streams=arguments.streams, seed=arguments.seed)
    try:
        found = asyncio.run(run(server, journal, **sizes))
    finally:
        status = server.stop()
        journal.close()
    found |= {"exit_status": status, "last_log": server.last_log}
    print(json.dumps(found, indent=1))
    return 1 if found["problems"] or status else 0


if __name__ == "__main__":
    sys.exit(main())
