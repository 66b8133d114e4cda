"""Runs a JSON lines job: checks the input, feeds the engine, writes results as they finish."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from jaxllm.cli.common import EXIT_INTERRUPTED, EXIT_USER_ERROR
from jaxllm.cli.jsonl.requests import BadJsonlLine, JsonlRequest, Settings, conversation, read_lines
from jaxllm.cli.jsonl.results import Results, output_fields
from jaxllm.interrupts import HeldSignals
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams

_NOTICE = b"\nstopping after this step; interrupt once more to stop at once\n"
MAX_REPORTED = 20  # invalid lines printed by the check before the run


class JsonlOptions(NamedTuple):
    input: Path | None  # None: standard input
    output: Path | None  # None: standard output
    settings: Settings
    resume: bool = False
    skip_invalid: bool = False
    token_ids: bool = False  # in the results
    quiet: bool = False

    @property
    def name(self) -> str:
        return str(self.input or "standard input")

    def open(self) -> BufferedIOBase:
        return sys.stdin.buffer if self.input is None else self.input.open("rb")


def run_jsonl(options: JsonlOptions, open_llm: Callable[[], AbstractContextManager[Any]]) -> int:
    """Returns the exit code: 1 if some requests failed or were skipped, 2 if an invalid line ended the job, 130 or 143
    for an interrupt. An input that can be read twice is checked completely before the model is loaded."""
    with options.open() as stream, Results(options.output, resume=options.resume) as results:
        num_requests = None
        if stream.seekable():
            num_requests = check_input(options, stream, results)
            stream.seek(0)
            if num_requests == results.num_done:
                print(f"all {num_requests} lines have their results", file=sys.stderr)
                return 0
        with open_llm() as llm, HeldSignals(signal.SIGINT, signal.SIGTERM, notice=_NOTICE) as interrupts:
            if options.settings.chat:  # a model that can't chat is reported before any line
                llm.chat_prompt(
                    conversation("Hello", options.settings.system), chat_template=options.settings.chat_template
                )
            jsonl_run = JsonlRun(llm, options, results, interrupts, num_requests)
            jsonl_run.run(read_lines(stream, options.settings))
        jsonl_run.report()
        if interrupts.signal is not None:
            return EXIT_INTERRUPTED if interrupts.signal == signal.SIGINT else 128 + interrupts.signal
        if jsonl_run.ended_by_bad_line:
            return EXIT_USER_ERROR
        return int(bool(jsonl_run.num_failed or jsonl_run.num_invalid))


def check_input(options: JsonlOptions, stream: BufferedIOBase, results: Results) -> int:
    """Checks the whole input without running any of it; returns the number of lines to run or report.

    Prints invalid lines, and raises `ValueError` if there are any, unless they are skipped.
    """
    num_lines = num_invalid = last = 0
    for line in read_lines(stream, options.settings):
        num_lines, last = num_lines + 1, line.number
        error = line.error if isinstance(line, BadJsonlLine) and not options.skip_invalid else _conflict(line, results)
        if error is not None:
            num_invalid += 1
            if num_invalid <= MAX_REPORTED:
                print(f"{options.name}, line {line.number}: {error}", file=sys.stderr)
    if num_invalid > MAX_REPORTED:
        print(f"... and {num_invalid - MAX_REPORTED} more lines", file=sys.stderr)
    if results.last_line > last:
        raise ValueError(f"{results.path} has a result of line {results.last_line}, but {options.name} ends at {last}")
    if num_invalid:
        raise ValueError(
            f"{num_invalid} of {num_lines} lines can't be run, so nothing was. Correct them, or skip broken ones "
            "with --skip-invalid"
        )
    return num_lines


def _conflict(line: JsonlRequest | BadJsonlLine, results: Results) -> str | None:
    try:
        results.done(line)
    except ValueError as error:
        return str(error)
    return None


class JsonlRun:
    """The requests of a job in the engine, and their counts."""

    def __init__(
        self, llm: Any, options: JsonlOptions, results: Results, interrupts: HeldSignals, num_requests: int | None
    ):
        self._llm, self._options, self._results, self._interrupts = llm, options, results, interrupts
        self.num_finished = self.num_failed = self.num_invalid = self.num_tokens = 0
        self.ended_by_bad_line = False
        self._running: dict[int, JsonlRequest] = {}
        self._start_s = time.perf_counter()
        self._bar = tqdm(
            total=num_requests,
            initial=results.num_done,
            desc="requests",
            unit="req",
            file=sys.stderr,
            disable=True if options.quiet else None,
        )

    def run(self, lines: Iterator[JsonlRequest | BadJsonlLine]) -> None:
        """Runs all lines. After an invalid line, running requests finish; an interrupt ends it after the step."""
        with self._bar, closing(self._llm.generate_iter(self._requests(lines))) as steps:
            for finished in steps:
                for index, output in finished:
                    self._finish(self._running.pop(index), output)
                if self._interrupts.signal is not None:
                    return

    def _requests(self, lines: Iterator[JsonlRequest | BadJsonlLine]) -> Iterator[tuple[Any, SamplingParams]]:
        index = 0
        for line in lines:
            conflict = _conflict(line, self._results)
            if conflict is not None:
                self._refuse(line, conflict, skip=False)
            elif not self._results.done(line) and (prompt := self._prompt(line)) is not None:
                self._running[index] = line
                index += 1
                yield prompt, line.params
            if self.ended_by_bad_line or self._interrupts.signal is not None:
                return

    def _prompt(self, line: JsonlRequest | BadJsonlLine) -> Any:
        """The line's prompt for the engine; None for a line that can't be run, which is reported."""
        if isinstance(line, BadJsonlLine):
            self._refuse(line, line.error)
            return None
        if line.messages is None:
            return line.prompt
        try:
            return self._llm.chat_prompt(line.messages, **line.chat_options)
        except ValueError as error:
            self._refuse(line, str(error))
            return None

    def _finish(self, line: JsonlRequest, output: RequestOutput) -> None:
        if output.error is not None and not output.outputs:  # the engine refused it
            self._refuse(line, output.error)
            return
        self._results.write(line, output_fields(output, token_ids=self._options.token_ids))
        self.num_finished += 1
        self.num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if output.error is not None:
            self.num_failed += 1
            self._tell(line, output.error)
        self._bar.set_postfix_str(f"{self._speed:.1f} tokens/s, {self.num_failed} failed", refresh=False)
        self._bar.update()

    def _refuse(self, line: JsonlRequest | BadJsonlLine, error: str, *, skip: bool = True) -> None:
        """Reports a line that can't be run, which ends the job unless such lines are skipped."""
        self._tell(line, error)
        self.num_invalid += 1
        if not skip or not self._options.skip_invalid:
            self.ended_by_bad_line = True
            return
        self._results.write(line, {"outputs": [], "error": error})
        self._bar.update()

    def _tell(self, line: JsonlRequest | BadJsonlLine, error: str) -> None:
        tqdm.write(f"{self._options.name}, line {line.number}: {error}", file=sys.stderr)

    @property
    def _speed(self) -> float:
        """Tokens per second."""
        return self.num_tokens / max(time.perf_counter() - self._start_s, 1e-9)

    def report(self) -> None:
        """Prints what was done, and after an early end how to continue."""
        if not self._options.quiet:
            parts = [f"{self.num_finished} requests", f"{self.num_tokens} tokens", f"{self._speed:.1f} tokens/s"]
            parts += [f"{self.num_failed} failed"] * bool(self.num_failed)
            parts += [f"{self.num_invalid} lines not run"] * bool(self.num_invalid)
            print(f"[{', '.join(parts)}]", file=sys.stderr)
        if self._interrupts.signal is None and not self.ended_by_bad_line:
            return
        where = "on standard output" if self._options.output is None else f"in {self._options.output}"
        advice = "" if self._options.output is None else "; continue with --resume"
        if self.ended_by_bad_line:
            advice += " after correcting the line" if advice else "; correct the line"
            advice += ", or with --skip-invalid"
        print(f"ended early: what has finished is {where}{advice}", file=sys.stderr)
