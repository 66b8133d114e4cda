"""`python -m jaxllm.serve` as a process: its start, its signals, its exit codes; with an engine that is none."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxllm.server.config import ServerConfig, model_names
from jaxllm.server.http import run
from tests.chat_model import write_model
from tests.fake_server import Answer, read_answer, request
from tests.server.engine.test_process_client import is_running

ROOT = Path(__file__).parents[3]
CODE = """
import sys
from functools import partial
from jaxllm.server.engine import process_client
from jaxllm.serve import main
process_client.ProcessClient = partial(process_client.ProcessClient, module="tests.fake_engine_process")
sys.exit(main(sys.argv[1:]))
"""
BODY = {"model": "default", "prompt": [9, 7], "stream": True, "max_tokens": 100_000}


class Command:
    """A server in a process of its own, on a free port."""

    def __init__(self, *options: str, code: str = CODE):
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "--port", "0", *options], stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.shown = ""
        while line := self.process.stderr.readline():
            self.shown += line
            if line.startswith("└"):
                break
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.shown)
        assert found, self.shown
        self.port = int(found[1])

    @property
    def engine(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
        return next(pid for pid, command in commands.items() if "engine" in command)

    def open(self, *args, **options):
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(request(*args, **options))
        return connection

    def send(self, *args, **options) -> Answer:
        with self.open(*args, **options) as connection:
            return read_answer(connection)

    def stream(self, **fields):
        """A stream that has begun."""
        connection = self.open("POST", "/v1/completions", BODY | fields)
        seen = b""
        while b'"text":"b"' not in seen:
            seen += connection.recv(1 << 16)
        return connection

    def end(self, timeout_s: float = 60) -> int:
        self.shown += self.process.communicate(timeout=timeout_s)[1]
        return self.process.returncode


@contextlib.contextmanager
def serving(*options: str, **more):
    command = Command(*options, **more)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.process.kill()
            command.end()


def rest_of(connection) -> str:
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    connection.close()
    return data.decode()


def test_a_drain_lets_requests_finish_and_takes_no_more():
    with serving("--served-model-name", "default", "other") as command:
        assert "curl http://127.0.0.1" in command.shown and "256 tokens" in command.shown
        engine, connection = command.engine, command.stream(max_tokens=200)
        command.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 10
        while command.send("GET", "/ready").status != 503:
            assert time.monotonic() < end
        answer = command.send("POST", "/v1/completions", BODY)
        assert answer.status == 503 and answer.headers["retry-after"]
        text = rest_of(connection)
        assert text.endswith("data: [DONE]\n\n\r\n0\r\n\r\n") and '"finish_reason":"length"' in text
        assert command.end() == 0
        assert not is_running(engine)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_is_in_a_hurry(number):
    with serving() as command:
        engine, connection = command.engine, command.stream()
        command.process.send_signal(number)
        while command.send("GET", "/ready").status != 503:
            pass
        command.process.send_signal(number)
        assert '"error"' in rest_of(connection)
        assert command.end() == 0
        assert not is_running(engine)


def test_no_patience_at_all():
    with serving("--shutdown-timeout", "0") as command:
        connection = command.stream()
        command.process.send_signal(signal.SIGTERM)
        assert '"error"' in rest_of(connection)
        assert command.end(30) == 0


def test_a_killed_engine():
    with serving() as command:
        connections = [command.stream() for _ in range(8)]
        start = time.monotonic()
        os.kill(command.engine, signal.SIGKILL)
        assert all('"code":"engine_dead"' in rest_of(connection) for connection in connections)
        assert command.send("GET", "/health").status == 503
        assert time.monotonic() - start < 10
        assert command.end(30) == 1
        assert "the engine has stopped" in command.shown


HUNG = CODE.replace(
    "sys.exit",
    """
from jaxllm.server import config
config.ServerConfig = partial(config.ServerConfig, watchdog_s=2.0)
sys.exit""",
)


def test_a_hung_engine_and_its_return():
    with serving(code=HUNG) as command:
        connections = [command.stream() for _ in range(4)]
        engine = command.engine
        os.kill(engine, signal.SIGSTOP)
        try:
            assert all('"code":"request_aborted"' in rest_of(connection) for connection in connections)
            assert command.send("GET", "/health").status == command.send("GET", "/ready").status == 503
            answer = command.send("POST", "/v1/completions", BODY)
            assert answer.status == 503 and answer.headers["retry-after"]
        finally:
            os.kill(engine, signal.SIGCONT)
        end = time.monotonic() + 30
        while command.send("GET", "/health").status != 200:
            assert time.monotonic() < end
        answer = command.send("POST", "/v1/completions", BODY | {"stream": False, "max_tokens": 3})
        assert answer.json["choices"][0]["text"] == "abc"


def test_a_hung_engine_is_no_reason_to_stay():
    with serving(code=HUNG) as command:
        engine, connection = command.engine, command.stream()
        os.kill(engine, signal.SIGSTOP)
        command.process.send_signal(signal.SIGTERM)
        assert '"error"' in rest_of(connection)
        assert command.end() == 0 and not is_running(engine)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_lines_work_as_written():
    """That of the banner, and those of vLLM's guides with the address changed."""
    name = "Qwen/Qwen2.5-1.5B-Instruct"
    with serving("--served-model-name", name) as command:
        lines = [line.strip("│ ") for line in command.shown.splitlines() if line.startswith("│")]
        first = next(i for i, line in enumerate(lines) if line.startswith("curl"))
        url = f"http://localhost:{command.port}/v1"
        given = [
            "\n".join(lines[first:]),
            f"curl {url}/models",
            f"""curl {url}/completions \\
                -H "Content-Type: application/json" \\
                -d '{{
                    "model": "{name}",
                    "prompt": "San Francisco is a",
                    "max_tokens": 7,
                    "temperature": 0
                }}'""",
        ]
        answers = [
            subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60).stdout for line in given
        ]
    assert json.loads(answers[0])["choices"][0]["text"] == "abcdefghijklmnopqrstuvwxyzabcdef"
    assert json.loads(answers[1])["data"][0]["id"] == name
    assert json.loads(answers[2])["choices"][0]["text"] == "abcdefg"


def test_bad_models_and_options(tmp_path):
    def run(*options: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "jaxllm.serve", *options]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)

    done = run("--model", str(tmp_path / "none"))
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    done = run("--chat-template", "no-such")
    assert done.returncode == 2 and "no-such" in done.stderr
    done = run("--port", "70000")
    assert done.returncode == 2 and "port=70000" in done.stderr


@pytest.mark.parametrize("stderr", ["full", "gone"])
def test_nothing_can_be_said(stderr):
    """The disk is full, or the reader has gone: the server serves."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", CODE, "--port", str(port), "--host", "0.0.0.0"]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, stderr=full if stderr == "full" else subprocess.PIPE, cwd=ROOT)
    if process.stderr is not None:
        process.stderr.close()
    try:
        end, status = time.monotonic() + 60, 0
        while status != 200:
            assert time.monotonic() < end and process.poll() is None
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(request("GET", "/ready"))
                status = read_answer(connection).status
            time.sleep(0.05)
        time.sleep(0.5)  # in which the banner is lost
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("limits", "most"), [((1024, 1024), 640), ((200, 4096), 3712), ((64, 64), 1), ((-1, -1), 4096)]
)
def test_connections_are_fewer_than_descriptors(limits, most, monkeypatch):
    """Which the server allows itself as many of as it may."""
    now = list(limits)
    monkeypatch.setattr(run.resource, "getrlimit", lambda kind: tuple(now))
    monkeypatch.setattr(run.resource, "setrlimit", lambda kind, wanted: now.__setitem__(slice(None), wanted))
    assert run.most_connections(4096) == most and now[0] == limits[1]


def test_a_taken_port():
    with serving() as command:
        args = [sys.executable, "-c", CODE, "--port", str(command.port)]
        done = subprocess.run(args, capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert done.returncode == 2 and "choose --port" in done.stderr


def test_an_engine_that_does_not_start():
    wrong = "real = process_client.ProcessClient\nprocess_client.ProcessClient = lambda _: real({'wrong': True}, "
    code = re.sub("process_client.ProcessClient = .*ProcessClient, ", lambda _: wrong, CODE)
    command = [sys.executable, "-c", code, "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 2 and "error: max_model_len=0 is no length" in done.stderr


def test_who_may_come_is_said():
    with serving("--host", "0.0.0.0") as command:
        assert "warning" in command.shown and "--api-key" in command.shown
    with serving("--host", "0.0.0.0", "--api-key", "k") as command:
        assert "warning" not in command.shown
        assert command.send("GET", "/v1/models").status == 401


def test_names_of_the_model():
    assert model_names(None, None) == ("default",)
    assert model_names("/x/Qwen3-0.6B/", None) == ("Qwen3-0.6B", "/x/Qwen3-0.6B/")
    assert model_names("/x/Qwen3-0.6B-Q8_0.gguf", None) == ("Qwen3-0.6B-Q8_0", "/x/Qwen3-0.6B-Q8_0.gguf")
    assert model_names("Qwen/Qwen3-0.6B", None) == ("Qwen/Qwen3-0.6B",)
    assert model_names("/x", ["a", "b", "a"]) == ("a", "b")


@pytest.mark.parametrize(
    "fields",
    [
        {"port": -1},
        {"served_model_names": ()},
        {"api_keys": ("",)},
        {"api_keys": (" x",)},
        {"max_queued_requests": -1},
        {"request_timeout_s": -1.0},
        {"keep_alive_s": float("nan")},
    ],
    ids=str,
)
def test_settings_are_checked(fields):
    with pytest.raises(ValueError, match=next(iter(fields)).split("_s")[0] + "|API key"):
        ServerConfig(**fields)


def test_the_real_thing(tmp_path):
    """An engine that computes, in its own process: text, a client that leaves, metrics, the end."""
    model = write_model(tmp_path / "tiny")
    sizes = ["--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--block-size", "4", "--num-blocks", "64"]
    options = ["--model", str(model), "--max-model-len", "96", *sizes, "--api-key", "k"]
    code = "import sys; from jaxllm.serve import main; sys.exit(main(sys.argv[1:]))"
    headers = [("Authorization", "Bearer k")]
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def blocks() -> float:
        text = command.send("GET", "/metrics", headers=headers).body.decode()
        return float(re.search(r"jaxllm:kv_cache_usage_perc\{.*\} (.*)", text)[1])

    with serving(*options, code=code) as command:
        first, second = (command.send("POST", "/v1/completions", body, headers=headers) for _ in range(2))
        assert first.status == 200 and first.json["choices"] == second.json["choices"]
        assert first.json["usage"]["completion_tokens"] == 8
        long = body | {"max_tokens": 80, "stream": True}
        with command.open("POST", "/v1/completions", long, headers=headers) as connection:
            assert connection.recv(1 << 16)
        end, num_empty = time.monotonic() + 30, 0
        while num_empty < 20 and time.monotonic() < end:  # in a row, as statistics come four times a second
            num_empty = 0 if blocks() else num_empty + 1
            time.sleep(0.05)
        assert blocks() == 0
        engine = command.engine
        command.process.send_signal(signal.SIGTERM)
        assert command.end() == 0 and not is_running(engine)
