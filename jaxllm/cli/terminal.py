"""Prints completions in the terminal: text as it grows or JSON, and a closing line with figures."""

import json
import os
import re
import time
from collections.abc import Sequence
from io import TextIOBase
from typing import Any

from jaxllm.cli.jsonl.results import output_fields
from jaxllm.outputs import CompletionOutput, RequestOutput

_WIDTH = 80  # of a narrow terminal
_DIM, _RESET = "\x1b[2m", "\x1b[0m"
# A model can write escape sequences, which a terminal would execute.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    """A model's text with control characters replaced, safe for a terminal."""
    return _CONTROL.sub("\ufffd", text)


class Printer:
    """Writes completions in order: the first unfinished one as it grows, later ones in their turn."""

    def __init__(self, prompts: Sequence[str], n: int, *, echo: bool, out: TextIOBase):
        self._prompts, self._n, self._echo, self._out = prompts, n, echo, out
        self._turns = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(n)]
        self._turn = 0
        self._num_shown = 0  # characters of this turn's completion
        self._latest: dict[tuple[int, int], CompletionOutput] = {}
        self._is_terminal = out.isatty()
        self._dims = self._is_terminal and not os.environ.get("NO_COLOR")

    def start(self) -> None:
        self._open()
        self._out.flush()

    def update(self, index: int, output: RequestOutput) -> None:
        for completion in output.outputs:
            self._latest[index, completion.index] = completion
        while self._turn < len(self._turns) and self._show(self._latest.get(self._turns[self._turn])):
            self._turn, self._num_shown = self._turn + 1, 0
            self._open()
        self._out.flush()

    def interrupt(self) -> None:
        """Ends the current line."""
        if self._turn < len(self._turns):
            self._out.write("\n")
            self._out.flush()

    def _open(self) -> None:
        if self._turn == len(self._turns):
            return
        prompt, sample = self._turns[self._turn]
        if len(self._turns) > 1:
            position = f"prompt {prompt + 1}/{len(self._prompts)}, sample {sample + 1}/{self._n}"
            self._out.write(f"--- {position} ---\n")
        if self._echo:
            text = self._clean(self._prompts[prompt])
            self._out.write(f"{_DIM}{text}{_RESET}" if self._dims else text)

    def _show(self, completion: CompletionOutput | None) -> bool:
        """Writes the new text; returns whether the completion has finished."""
        if completion is None:
            return False
        self._out.write(self._clean(completion.text[self._num_shown :]))
        self._num_shown = len(completion.text)
        if completion.finished():
            self._out.write("\n")
        return completion.finished()

    def _clean(self, text: str) -> str:
        return clean(text) if self._is_terminal else text


class JsonPrinter:
    """Writes one JSON object per prompt and line, in order, once it has finished."""

    def __init__(self, prompts: Sequence[str], *, token_ids: bool, out: TextIOBase):
        self._prompts, self._token_ids, self._out = prompts, token_ids, out
        self._finished: dict[int, RequestOutput] = {}
        self._turn = 0

    def start(self) -> None:
        pass

    def update(self, index: int, output: RequestOutput) -> None:
        if output.finished:
            self._finished[index] = output
        while self._turn in self._finished:
            self._write(self._turn)
            self._turn += 1

    def interrupt(self) -> None:
        """Writes the prompts that have finished out of order."""
        for index in sorted(self._finished):
            self._write(index)

    def _write(self, index: int) -> None:
        fields = output_fields(self._finished.pop(index), token_ids=self._token_ids)
        self._out.write(f"{json.dumps({'index': index, 'prompt': self._prompts[index]} | fields)}\n")
        self._out.flush()


class Meter:
    """Counts tokens and time since its creation, and remembers which prompts failed."""

    def __init__(self) -> None:
        self.errors: dict[int, str] = {}  # by prompt
        self._num_tokens: dict[int, int] = {}  # by prompt
        self._start_s = time.perf_counter()
        self._first: tuple[float, int] | None = None  # time and number of the first tokens
        self._last: tuple[float, int] | None = None

    def update(self, index: int, output: RequestOutput) -> None:
        self._num_tokens[index] = sum(len(completion.token_ids) for completion in output.outputs)
        if output.error is not None:
            self.errors[index] = output.error
        total = sum(self._num_tokens.values())
        if total > (self._last[1] if self._last else 0):
            self._last = time.perf_counter(), total
            self._first = self._first or self._last

    def _speed(self) -> list[str]:
        parts = [_count(self._last[1] if self._last else 0, "token")]
        if self._first and self._last:
            seconds, num_decoded = (last - first for first, last in zip(self._first, self._last, strict=True))
            if num_decoded and seconds:
                parts.append(f"{num_decoded / seconds:.1f} tokens/s")
            parts.append(f"the first after {self._first[0] - self._start_s:.2f} s")
        return parts

    def speed(self) -> str:
        """The speed, on one line."""
        return _line(self._speed())

    def summary(self, stats: Any) -> str:
        """Speed and memory on one line; `stats` is an `EngineStats`."""
        parts = self._speed()
        if stats.num_preemptions:
            parts.append(_count(stats.num_preemptions, "preemption"))
        return _line([*parts, f"KV cache {stats.peak_blocks_used / stats.num_blocks:.1%} full"])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _line(parts: Sequence[str]) -> str:
    """As many of the parts as a narrow terminal has room for."""
    while len(line := f"[{', '.join(parts)}]") > _WIDTH:
        parts = parts[:-1]
    return line
