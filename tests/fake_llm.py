"""What the commands see of `LLM`, without a model, and the files of a batch."""

import io
import itertools
import json
import os
import signal
import sys
import types
from dataclasses import dataclass

from jaxllm.cli import generate
from jaxllm.errors import JaxLLMError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams


@dataclass
class Stats:
    num_blocks: int = 12
    block_size: int = 16
    peak_blocks_used: int = 3
    num_executables: int = 5
    num_compiled: int = 2
    num_failed_executables: int = 0
    compile_s: float = 1.5
    num_preemptions: int = 0


def output(*texts: str, finished: tuple[bool, ...] | bool = False, error: str | None = None) -> RequestOutput:
    """As many completions as texts; a token for each character."""
    flags = finished if isinstance(finished, tuple) else (finished,) * len(texts)
    completions = [
        CompletionOutput(index=i, text=text, token_ids=list(text.encode()), finish_reason="stop" if flag else None)
        for i, (text, flag) in enumerate(zip(texts, flags, strict=True))
    ]
    return RequestOutput(
        request_id="0", prompt="", prompt_token_ids=[], outputs=completions, finished=all(flags), error=error
    )


class FakeLLM:
    """Plays back `script`: updates of a stream, or exceptions to raise. A batch is completed two at a time, the later
    one first; what a prompt says can happen to it, happens."""

    script: list = []
    recommended = SamplingParams()
    made: "FakeLLM | None" = None

    def __init__(self, **kwargs):
        if isinstance(self.script, Exception):
            raise self.script
        self.kwargs, self.is_open, self.stream_is_open = kwargs, True, False
        type(self).made = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_open = False

    def stats(self):
        return Stats()

    def get_default_sampling_params(self):
        return self.recommended

    def stream(self, prompts, params):
        self.prompts, self.params = prompts, params
        self.stream_is_open = True
        try:
            for item in self.script:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.stream_is_open = False

    def chat_prompt(self, messages, **options):
        if "unspeakable" in str(messages):
            raise ValueError("the chat template refuses the conversation")
        return {"prompt": f"{messages}{options or ''}", "prompt_token_ids": [1, 2]}

    def generate_iter(self, requests):
        self.params = {}
        requests = enumerate(requests)
        while pair := list(itertools.islice(requests, 2)):
            yield [(index, self._complete(index, *request)) for index, request in reversed(pair)]

    def _complete(self, index, prompt, params):
        text = prompt.get("prompt", "ids")
        self.params[text] = params
        if text == "too long":
            return RequestOutput(request_id="0", prompt=text, prompt_token_ids=[], outputs=[], error="too many tokens")
        if text == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if text == "dead":
            raise JaxLLMError("the engine is dead")
        done = output(*[text.upper()] * params.n, finished=True, error="it failed" if text == "fail" else None)
        done.prompt_token_ids, done.num_cached_tokens = [1, 2, 3], 1
        return done


def stdin(monkeypatch, data: bytes, *, is_terminal: bool = False) -> None:
    class Buffer(io.BytesIO):
        """Takes attributes."""

    stream = io.TextIOWrapper(Buffer(data))
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stdin", stream)


def install(monkeypatch) -> type[FakeLLM]:
    """The class that the command finds as `jaxllm.llm.LLM`."""
    monkeypatch.setitem(sys.modules, "jaxllm.llm", types.SimpleNamespace(LLM=FakeLLM))
    monkeypatch.setattr(generate, "setup_compilation_cache", lambda: None)
    monkeypatch.setattr(FakeLLM, "script", [])
    monkeypatch.setattr(FakeLLM, "made", None)
    return FakeLLM


def pipe(monkeypatch, data: bytes) -> None:
    """As standard input: what can be read once."""
    stdin(monkeypatch, data)
    monkeypatch.setattr(sys.stdin.buffer, "seekable", lambda: False)


class Folder:
    """An input, an output, and the command between them."""

    def __init__(self, path):
        self.input, self.output = path / "in.jsonl", path / "out.jsonl"

    def write(self, *requests) -> None:
        texts = [request if isinstance(request, bytes) else json.dumps(request).encode() for request in requests]
        self.input.write_bytes(b"".join(text + b"\n" for text in texts))

    def run(self, *options: str) -> int:
        return generate.main(["--input", str(self.input), "--output", str(self.output), *options])

    def results(self) -> list[dict]:
        data = self.output.read_bytes()
        assert data.endswith(b"\n") or not data, "whole lines only"
        return [json.loads(line) for line in data.splitlines()]

    def texts(self) -> dict[int, str]:
        results = self.results()
        assert len({result["line"] for result in results}) == len(results), "a result a line"
        return {result["line"]: result["outputs"][0]["text"] for result in results}
