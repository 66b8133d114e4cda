"""`jaxllm run-batch`: requests in OpenAI's batch format, answered by the server's routes, without an engine."""

import asyncio
import json
import os
import signal
import threading

import pytest

from jaxllm.cli import run_batch
from jaxllm.cli.jsonl import requests as lines_module
from jaxllm.server.engine import process_client
from jaxllm.server.engine.client import EngineInfo
from tests.fake_server import CONFIG, FakeClient


@pytest.fixture
def client(monkeypatch):
    """The engine's client that the command finds. Its tokenizer is not the model's, and nobody decodes."""
    found = FakeClient(reply="Hello", step=5, info=EngineInfo(CONFIG, 4096))
    monkeypatch.setattr(process_client, "ProcessClient", lambda options: found)
    monkeypatch.setattr(found, "_decoder", _Ids())
    monkeypatch.setenv("JAXLLM_LOGGING_LEVEL", "")  # so that what the command sets goes away after the test
    monkeypatch.delenv("JAXLLM_LOGGING_LEVEL")
    return found


class _Ids:
    def decode(self, ids, **_):
        return ""

    def encode(self, text, **_):
        return list(text.encode())

    def token_text(self, token):
        return chr(token)


class Batch:
    """An input, an output, and the command between them."""

    def __init__(self, path):
        self.input, self.output = path / "in.jsonl", path / "out.jsonl"

    def write(self, *lines) -> None:
        texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        self.input.write_bytes(b"".join(text + b"\n" for text in texts))

    def run(self, *options: str) -> int:
        return run_batch.main(["-i", str(self.input), "-o", str(self.output), "--quiet", *options])

    def answers(self) -> list[dict]:
        data = self.output.read_bytes()
        assert data.endswith(b"\n") or not data, "whole lines only"
        return [json.loads(line) for line in data.splitlines()]


@pytest.fixture
def batch(tmp_path):
    return Batch(tmp_path)


def line(custom_id: str, url: str = "/v1/completions", **body) -> dict:
    body = {"model": "default", "max_tokens": 4} | ({"prompt": "x"} if url == "/v1/completions" else {}) | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def test_answers_are_those_of_the_server(client, batch, capsys):
    hi = [{"role": "user", "content": "Hi"}]
    batch.write(
        line("a"),
        b"",
        line("b", "/v1/chat/completions", messages=hi, temperature=0.5),
        line("c", "/v1/responses", input="Hi", max_tokens=None, max_output_tokens=16),
        line("d", "/v1/embeddings", input="Hi", max_tokens=None),
    )
    assert batch.run() == 0
    found = {answer["custom_id"]: answer for answer in batch.answers()}
    assert set(found) == set("abcd")
    for answer in found.values():
        assert set(answer) == {"id", "custom_id", "response", "error"} and answer["error"] is None
        assert answer["response"]["status_code"] == 200 and answer["response"]["request_id"]
    bodies = {name: answer["response"]["body"] for name, answer in found.items()}
    assert bodies["a"]["choices"][0]["text"] == "Hell" and bodies["a"]["usage"]["completion_tokens"] == 4
    assert bodies["b"]["choices"][0]["message"]["content"] == "Hell" and bodies["b"]["object"] == "chat.completion"
    assert bodies["c"]["object"] == "response" and bodies["d"]["data"][0]["object"] == "embedding"
    assert len({answer["id"] for answer in found.values()}) == 4
    assert capsys.readouterr() == ("", "") and not client.is_alive


REFUSED = {
    "url": (line("u", "/v1/files", input="x"), 400, "there is no '/v1/files' for batches; there are /v1/"),
    "method": (line("m") | {"method": "GET"}, 400, "method='GET' must be POST"),
    "stream": (line("s", stream=True), 400, "a batch has whole answers; leave stream out"),
    "model": (line("n", model="other"), 404, "the model 'other' does not exist here"),
    "value": (line("v", temperature="hot"), 400, "temperature is invalid"),
    "length": (line("l", prompt="x y " * 250), 400, "the prompt has"),
    "id": ({"custom_id": 7, "url": "/v1/completions", "body": {}}, 400, "line 1 is no request of a batch: Expected"),
    "body": ({"custom_id": "b", "url": "/v1/completions"}, 400, "missing required field `body`"),
    "json": (b"{", 400, "line 1 is not JSON"),
    "list": (b"[1]", 400, "line 1 holds no object with custom_id, url and body"),
    "deep": (b"[" * 100_000, 400, "line 1 is not JSON"),
    "text": (b'"\xff"', 400, "line 1 is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_is_the_answer_of_its_line_only(client, batch, name):
    wrong, status, message = REFUSED[name]
    batch.write(wrong, line("fine"))
    assert batch.run() == 1
    answers = {answer["custom_id"]: answer for answer in batch.answers()}
    assert answers.pop("fine")["error"] is None
    (answer,) = answers.values()
    assert answer["custom_id"] == (wrong.get("custom_id") if isinstance(wrong, dict) else None)
    assert answer["response"]["status_code"] == status and message in answer["error"]["message"]
    assert answer["response"]["body"] == {"error": answer["error"]}


def test_a_line_may_be_no_longer_than_memory_allows(client, batch, monkeypatch):
    for module in (lines_module, run_batch):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 200)
    batch.write(line("a", prompt="x" * 300), line("b"))
    assert batch.run() == 1
    assert {answer["custom_id"]: answer["error"] is None for answer in batch.answers()} == {None: False, "b": True}


def test_lines_are_read_as_the_engine_has_room(client, batch, monkeypatch):
    """However many there are: two times what the engine runs at once, and no more."""
    most, running = 0, client.generate

    async def generate(*args, **options):
        nonlocal most
        most = max(most, len(client.running) + 1)
        async for output in running(*args, **options):
            await asyncio.sleep(0)
            yield output

    monkeypatch.setattr(client, "generate", generate)
    batch.write(*(line(str(i)) for i in range(300)))
    assert batch.run() == 0
    assert {answer["custom_id"] for answer in batch.answers()} == set(map(str, range(300)))
    assert 2 <= most <= 2 * CONFIG.max_num_seqs


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_whole_lines(client, batch, capsys, number, code):
    batch.write(*(line(str(i)) for i in range(10)))
    generate, count = client.generate, 0

    async def stall(*args, **options):
        nonlocal count
        count += 1
        if count == 4:
            client.gate.clear()
            threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        async for output in generate(*args, **options):
            yield output

    client.generate = stall
    assert batch.run() == code
    assert 1 <= len(batch.answers()) <= 4
    assert "ended early: the output has the answers so far, each of them whole" in capsys.readouterr().err
    assert not client.is_alive and not client.running


def test_an_engine_that_dies_ends_the_batch(client, batch, capsys):
    batch.write(*(line(str(i)) for i in range(50)))
    client.is_alive = False
    assert batch.run() == 2
    assert "error: the engine has stopped; what was answered is in the output" in capsys.readouterr().err


def test_an_output_is_not_overwritten(client, batch, capsys):
    batch.write(line("a"))
    batch.output.write_text("mine\n")
    assert batch.run() == 2
    assert "is there already, and not empty; give another --output-file" in capsys.readouterr().err
    assert batch.output.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-i", "https://x/in.jsonl"], "--input-file is a URL; files are read"),
        (["-o", "http://x/out.jsonl"], "--output-file is a URL; files are read"),
        (["-i", "/nowhere"], "/nowhere does not exist; check the path"),
    ],
)
def test_files_that_can_not_be(client, batch, capsys, options, message):
    batch.write(line("a"))
    assert batch.run(*options) == 2
    assert message in capsys.readouterr().err


def test_names_and_templates_are_as_for_a_server(client, batch):
    hi = [{"role": "user", "content": "Hi"}]
    batch.write(line("a", model="mine"), line("b", "/v1/chat/completions", messages=hi, model="mine"))
    assert batch.run("--served-model-name", "mine", "--chat-template", "vicuna", "--max-log-len", "3") == 0
    assert all(answer["error"] is None for answer in batch.answers())
