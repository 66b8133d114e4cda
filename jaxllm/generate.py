"""`python -m jaxllm.generate`: completes prompts in the terminal, token by token."""

import argparse
import dataclasses
import os
import re
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from io import TextIOBase
from pathlib import Path
from typing import Any

from jaxllm.cli import (
    EXIT_INTERRUPTED,
    add_engine_arguments,
    engine_kwargs,
    run_command,
    setup_compilation_cache,
)
from jaxllm.errors import JaxLLMError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams

_DEFAULTS = SamplingParams(temperature=0.8, max_tokens=128)  # what reads well in a terminal
_SAMPLING_OPTIONS = (
    ("n", int, "completions of each prompt"),
    ("temperature", float, "randomness; 0 takes the likeliest token"),
    ("top_k", int, "choose among this many of the likeliest tokens; 0: all"),
    ("top_p", float, "choose among the likeliest tokens of this probability together"),
    ("min_p", float, "leave out tokens below this part of the likeliest one's probability"),
    ("seed", int, "an integer that gives the same text every time"),
    ("max_tokens", int, "most tokens to generate"),
    ("min_tokens", int, "no end before this many tokens"),
)
_DIM, _RESET = "\x1b[2m", "\x1b[0m"
# A model can write escape sequences, and a terminal would obey them.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a request failed, 2 for bad input, 130 on Ctrl-C, 141 on a closed pipe."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _generate(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxllm.generate",
        description="Completes prompts. Without any, standard input is the prompt.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="a text to complete")
    add(
        "--file",
        metavar="FILE",
        help="a file that is one prompt, but for a newline at its end; - is standard input",
    )
    add("--no-echo", action="store_true", help="leave out the prompt before its completion")
    add("--quiet", action="store_true", help="leave out the closing line with speed and memory")
    _add_sampling_arguments(parser)
    add_engine_arguments(parser)
    return parser


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    for name, kind, text in _SAMPLING_OPTIONS:
        default = getattr(_DEFAULTS, name)
        note = "" if default is None else f" (default: {default})"
        add(f"--{name.replace('_', '-')}", type=kind, default=default, metavar="X", help=text + note)
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given more than once")
    add("--stop-token-ids", action="append", type=int, metavar="ID", help="end at this token; likewise")
    add("--ignore-eos", action="store_true", help="go on after the end of sequence")


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    names = {field.name for field in dataclasses.fields(SamplingParams) if field.init}
    return SamplingParams(**{name: value for name, value in vars(arguments).items() if name in names})


def _read_prompts(arguments: argparse.Namespace) -> list[str]:
    if arguments.prompts and arguments.file:
        raise ValueError("there are prompts and a --file; give one or the other")
    if arguments.prompts:
        return arguments.prompts
    if arguments.file not in (None, "-"):
        return [_decode(Path(arguments.file).read_bytes(), arguments.file)]
    if arguments.file == "-" or not (sys.stdin is None or sys.stdin.isatty()):
        return [_decode(sys.stdin.buffer.read(), "standard input")]
    raise ValueError('there is no prompt; give one, as in: python -m jaxllm.generate "Once upon a time"')


def _decode(data: bytes, source: str) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text ({error}); convert it") from error
    if not text:
        raise ValueError(f"there is no prompt: {source} is empty; give a text to complete")
    return text.removesuffix("\n")  # editors and echo add it, and it would end the sentence to complete


def _generate(arguments: argparse.Namespace) -> int:
    prompts, params = _read_prompts(arguments), _sampling_params(arguments)
    setup_compilation_cache()
    from jaxllm.llm import LLM  # imports jax, which --help need not wait for

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?"
    seed = secrets.randbits(63)  # of requests without one: another text each time
    with LLM(**engine_kwargs(arguments), seed=seed) as llm:
        printer = Printer(prompts, params.n, echo=not arguments.no_echo, out=sys.stdout)
        meter = Meter()
        was_interrupted = _stream(llm, prompts, params, printer, meter)
        if not arguments.quiet:
            print(meter.summary(llm.stats()), file=sys.stderr)
    for index, error in meter.errors.items():
        print(f"error: prompt {index + 1} failed: {error}", file=sys.stderr)
    return EXIT_INTERRUPTED if was_interrupted else int(bool(meter.errors))


def _stream(llm: Any, prompts: list[str], params: SamplingParams, printer: "Printer", meter: "Meter") -> bool:
    """Shows completions as they come in. Returns whether Ctrl-C ended them; no request is left running."""
    try:
        with closing(llm.stream(prompts, params)) as updates:
            printer.start()
            for index, output in updates:
                meter.update(index, output)
                printer.update(index, output)
    except KeyboardInterrupt:
        printer.interrupt()
        return True
    except JaxLLMError:
        printer.interrupt()
        raise
    return False


class Printer:
    """Writes completions in order: the first unfinished one as it grows, later ones when it is their turn."""

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
        """Ends the line that was being written."""
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
        """Writes what is new; returns whether nothing more will come."""
        if completion is None:
            return False
        self._out.write(self._clean(completion.text[self._num_shown :]))
        self._num_shown = len(completion.text)
        if completion.finished:
            self._out.write("\n")
        return completion.finished

    def _clean(self, text: str) -> str:
        return _CONTROL.sub("\ufffd", text) if self._is_terminal else text


class Meter:
    """Counts tokens and time from its creation on, and remembers which prompts failed."""

    def __init__(self) -> None:
        self.errors: dict[int, str] = {}  # by prompt
        self._num_tokens: dict[int, int] = {}  # by prompt
        self._start_s = time.perf_counter()
        self._first: tuple[float, int] | None = None  # when tokens came first, and how many
        self._last: tuple[float, int] | None = None

    def update(self, index: int, output: RequestOutput) -> None:
        self._num_tokens[index] = sum(len(completion.token_ids) for completion in output.outputs)
        if output.error is not None:
            self.errors[index] = output.error
        total = sum(self._num_tokens.values())
        if total > (self._last[1] if self._last else 0):
            self._last = time.perf_counter(), total
            self._first = self._first or self._last

    def summary(self, stats: Any) -> str:
        """One line; `stats` are the engine's (`EngineStats`)."""
        parts = [f"{self._last[1] if self._last else 0} tokens"]
        if self._first and self._last:
            seconds, num_decoded = (last - first for first, last in zip(self._first, self._last, strict=True))
            if num_decoded and seconds:
                parts.append(f"{num_decoded / seconds:.1f} tokens/s")
            parts.append(f"first token after {self._first[0] - self._start_s:.2f} s")
        share = stats.peak_blocks_used / stats.num_blocks
        parts.append(f"KV peak {stats.peak_blocks_used} of {stats.num_blocks} blocks ({share:.1%})")
        if stats.num_preemptions:
            parts.append(f"{stats.num_preemptions} preemptions")
        parts.append(f"compiled {stats.num_compiled} of {stats.num_executables} in {stats.compile_s:.1f} s")
        return f"[{', '.join(parts)}]"


if __name__ == "__main__":
    sys.exit(main())
