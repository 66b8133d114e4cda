"""Half an hour of made-up requests against a server of the embedded model.

    python scripts/fuzz_server.py --minutes 30 --out fuzz.jsonl

schemathesis makes up requests of its own description, sound and unsound ones, for every route; beside them, bytes of
sound requests are changed at random, and connections are cut. No answer may be a 5xx (but for 503 and 504 with a
code), tell of the inside, or fail to come; `/health` answers all the time, and nothing is held at the end. What was
found is printed with the request; the exit code is 1 if anything was.
"""

import argparse
import asyncio
import itertools
import json
import random
import re
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from live_server import MODEL, OPTIONS, SIZES, Journal, sample, send, settled, still_held
from schemathesis.generation import GenerationMode

from jaxllm.bench.serve import ServerProcess

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.server.sound_requests import fit, with_hints  # noqa: E402 - after the checkout is on the path

LEAKS = re.compile(r"0x[0-9a-f]{6,}|Traceback|\.py\b")
NUM_CASES = 40  # of a route before its turn ends
SAMPLE_S = 5.0
ANSWER_S = 60.0
KINDS = ("with hints", "sound", "unsound")
ROUGH = {
    "/v1/completions": {"model": MODEL, "prompt": "def f(", "max_tokens": 8, "n": 2, "logprobs": 1, "stop": ["\n"]},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8},
    "/v1/responses": {"model": MODEL, "input": [{"role": "user", "content": "Hi"}], "max_output_tokens": 8},
    "/tokenize": {"model": MODEL, "prompt": "x\u00e9\u4e00"},
    "/detokenize": {"model": MODEL, "tokens": [5, 6, 7]},
}


class Findings:
    """What was answered, and what should not have been. Filled by several threads, each of which adds only."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.found: dict[str, str] = {}  # what is wrong -> the first request with it

    def take(self, kind: str, status: int, text: str, request: str, *, code: str | None = None) -> None:
        self.counts[f"{kind}: {status}"] += 1
        if status >= 500 and not (status in (503, 504) and code):
            self.add(f"{kind}: {status} {text[:200]}", request)
        if status >= 400 and LEAKS.search(text):
            self.add(f"{kind}: {status} tells of the inside: {text[:200]}", request)

    def add(self, what: str, request: str) -> None:
        self.found.setdefault(re.sub(r"req_\w+|\d{3,}", "N", what), request[:2000])


def made_up(server: ServerProcess, findings: Findings, is_over: threading.Event, first_seed: int) -> None:
    """Requests of schemathesis, a route after the other, until the end."""
    document = json.loads(asyncio.run(send(server.port, "/openapi.json")).body)
    document["servers"] = [{"url": "/"}]
    documents = {"with hints": with_hints(document), "sound": document, "unsound": document}
    operations = {
        kind: [found.ok() for found in schemathesis.openapi.from_dict(documents[kind]).get_all_operations()]
        for kind in KINDS
    }
    for number in itertools.count(first_seed):
        for kind in KINDS:
            for operation in operations[kind]:
                if is_over.is_set():
                    return
                turn(server, findings, is_over, operation, kind, number)


def turn(server: ServerProcess, findings: Findings, is_over: threading.Event, operation: Any, kind: str, number: int):
    mode = GenerationMode.NEGATIVE if kind == "unsound" else GenerationMode.POSITIVE
    if mode is GenerationMode.NEGATIVE and not operation.body:
        return

    @seed(number)
    @settings(
        max_examples=NUM_CASES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def try_it(case):
        if is_over.is_set():
            return
        if kind == "with hints" and isinstance(case.body, dict):
            case.body = bounded(fit(case.body))
        elif isinstance(case.body, dict):
            case.body = bounded(case.body)
        label = f"{kind} {operation.label}"
        try:
            answer = case.call(base_url=f"http://127.0.0.1:{server.port}", timeout=ANSWER_S)
        except Exception as error:  # noqa: BLE001 - whatever it is, there was no answer
            findings.add(f"{label}: no answer: {error!r:.200}", repr(case.body))
            return
        code = None
        if answer.status_code >= 500 and answer.headers["content-type"][0].startswith("application/json"):
            code = answer.json().get("error", {}).get("code")
        findings.take(label, answer.status_code, answer.text, repr(case.body), code=code)

    try_it()


def bounded(body: dict[str, Any]) -> dict[str, Any]:
    """Few tokens and samples, or one request would take the rest of the run."""
    sizes = {"max_tokens": 16, "max_completion_tokens": 16, "max_output_tokens": 16, "n": 4, "best_of": 4}
    for name, most in sizes.items():
        if isinstance(value := body.get(name), int | float) and value > most:
            body[name] = most
    if body.get("model") not in (MODEL, None):
        body["model"] = MODEL  # or nothing would get further than that
    return body


def rough(server: ServerProcess, findings: Findings, is_over: threading.Event, first_seed: int) -> None:
    """Sound requests with changed bytes, some of them cut off."""
    draw = random.Random(first_seed)
    while not is_over.is_set():
        path, body = draw.choice(list(ROUGH.items()))
        data = json.dumps(body | draw.choice(({}, {"stream": True}))).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        )
        parts = [f"{head}\r\nConnection: close\r\n\r\n".encode(), data]
        which = draw.choice((0, 1, 1))
        parts[which] = changed(draw, parts[which])
        sent = b"".join(parts)
        if draw.random() < 0.1:
            sent = sent[: draw.randrange(len(sent))]
        status, text = exchange(server.port, sent, draw.choice((0.0, 0.02, 2.0)))
        if status is not None:
            found = re.search(r'"code":"(\w+)"', text)
            findings.take(f"rough {path}", status, text, repr(sent), code=found[1] if found else None)
        else:
            findings.counts[f"rough {path}: closed or left"] += 1


def changed(draw: random.Random, data: bytes) -> bytes:
    mutable = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(mutable))
        match draw.randrange(5):
            case 0:
                mutable[at] = draw.randrange(256)
            case 1:
                del mutable[at : at + draw.randint(1, 9)]
            case 2:
                mutable[at:at] = draw.randbytes(draw.randint(1, 9))
            case 3:
                mutable[at:at] = mutable[at : at + draw.randint(1, 40)] * draw.choice((1, 2, 50))
            case 4:
                mutable[at:at] = draw.choice(
                    (b"null", b"1e999", b"-1", b"[[", b'{"a":', b'"\\ud800"', b"\x00", b"\r\n")
                )
        if not mutable:
            return b"x"
    return bytes(mutable)


def exchange(port: int, data: bytes, patience_s: float) -> tuple[int | None, str]:
    """The status and the text of the answer; no status if none came before the connection was closed or left."""
    got = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(data)
            connection.settimeout(patience_s or 0.001)
            while part := connection.recv(1 << 16):
                got += part
    except OSError:
        pass
    found = re.match(rb"HTTP/1\.1 (\d{3})", got)
    return (int(found[1]) if found else None), got.decode(errors="replace")


async def watch(server: ServerProcess, findings: Findings, journal: Journal, minutes: float) -> list[dict[str, Any]]:
    """Samples until the end."""
    samples = []
    while journal.seconds < minutes * 60:
        try:
            now = await sample(server)
        except (OSError, TimeoutError, StopIteration) as error:
            findings.add(f"the server is gone: {error!r}", "")
            break
        if now["health"] != 200:
            findings.add(f"/health says {now['health']}", "")
        samples.append(now)
        journal.write(**now, requests=sum(findings.counts.values()), found=len(findings.found))
        await asyncio.sleep(SAMPLE_S)
    return samples


def run(server: ServerProcess, journal: Journal, *, minutes: float, first_seed: int) -> dict[str, Any]:
    findings, is_over = Findings(), threading.Event()
    first = asyncio.run(settled(server))
    threads = [
        threading.Thread(target=work, args=(server, findings, is_over, first_seed)) for work in (made_up, rough, rough)
    ]
    for thread in threads:
        thread.start()
    try:
        samples = asyncio.run(watch(server, findings, journal, minutes))
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    last = asyncio.run(settled(server))
    for held in still_held(last):
        findings.add(held, "")
    statuses = Counter(name.rpartition(": ")[2] for name in findings.counts.elements())
    return {
        "minutes": round(journal.seconds / 60, 1),
        "requests": sum(findings.counts.values()),
        "statuses": dict(sorted(statuses.items())),
        "by_kind": dict(sorted(findings.counts.items())),
        "rss_mb": {"first": first["rss_mb"], "last": last["rss_mb"]},
        "fds": {"first": first["fds"], "last": last["fds"]},
        "health_ms_max": max((one["health_ms"] for one in samples), default=None),
        "found": findings.found,
        "verdict": "failed" if findings.found else "passed",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="(default: 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz.jsonl"), help="where samples go (default: fuzz.jsonl)")
    arguments = parser.parse_args()
    server, journal = ServerProcess([*OPTIONS, *SIZES]), Journal(arguments.out)
    try:
        found = run(server, journal, minutes=arguments.minutes, first_seed=arguments.seed)
    finally:
        status = server.stop()
        journal.close()
    found |= {"exit_status": status, "last_log": server.last_log}
    print(json.dumps(found, indent=1))
    return 1 if found["found"] or status else 0


if __name__ == "__main__":
    sys.exit(main())
