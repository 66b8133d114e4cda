"""`jaxllm run-batch`: answers a file of requests in OpenAI's batch format, as a server would."""

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from jaxllm.cli.common import EXIT_INTERRUPTED, add_engine_arguments, add_model_argument, located_kwargs, run_command
from jaxllm.cli.environment import LEVEL_VARIABLES, logging_level
from jaxllm.cli.jsonl.line_file import LineFile
from jaxllm.cli.jsonl.requests import MAX_LINE_BYTES, raw_lines
from jaxllm.cli.parser import CommandParser, Example
from jaxllm.cli.serve_options import add_answer_arguments, answer_settings
from jaxllm.cli.vllm_flags import log_notes
from jaxllm.errors import EngineDeadError
from jaxllm.interrupts import asyncios_interrupts

if TYPE_CHECKING:
    from jaxllm.server.batch import BatchAnswers
    from jaxllm.server.config import ServerConfig

_AHEAD = 2  # times max_num_seqs: lines that are answered at once, so that a step never lacks some
_NO_LIMIT_S = 1e8


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a request was not answered, 2 for bad input, 130 on Ctrl-C."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _run(arguments), prints=arguments.output_file == "-")


def _parser() -> CommandParser:
    parser = CommandParser(
        "jaxllm run-batch",
        description="Answers a file of requests in OpenAI's batch format: each line is an object with custom_id, url "
        "(/v1/chat/completions, /v1/completions or /v1/responses) and body. Answers are written as they finish, and "
        "name their custom_id; a request that is refused has an error in its place.",
        examples=[Example("run-batch -i requests.jsonl -o answers.jsonl --model smollm2", "answers each line")],
    )
    add_model_argument(parser)
    add = parser.add_argument
    add("-i", "--input-file", required=True, metavar="FILE", help="the requests")
    add("-o", "--output-file", required=True, metavar="FILE", help="a new file for the answers; - is standard output")
    add("--quiet", action="store_true", help="do not print progress and the closing line")
    add_answer_arguments(parser)
    add_engine_arguments(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from jaxllm.server.config import ServerConfig

    os.environ.setdefault(LEVEL_VARIABLES[0], "WARNING")  # the engine's process has it too
    logging.basicConfig(level=logging_level(), format="%(levelname)s %(name)s: %(message)s")
    log_notes(arguments)
    for option in ("input_file", "output_file"):
        if getattr(arguments, option).startswith(("http://", "https://")):
            raise ValueError(
                f"--{option.replace('_', '-')} is a URL; files are read and written here, so fetch or send it"
            )
    config = ServerConfig(
        request_timeout_s=_NO_LIMIT_S,
        max_queued_requests=2**31,
        max_body_bytes=MAX_LINE_BYTES,
        max_body_memory_bytes=sys.maxsize,  # lines are read as they are answered
        **answer_settings(arguments),
    )
    output = None if arguments.output_file == "-" else Path(arguments.output_file)
    with open(arguments.input_file, "rb") as stream:
        file = LineFile(output)
        try:
            if file.size:
                raise ValueError(f"{output} is there already, and not empty; give another --output-file, or remove it")
            seed = secrets.randbits(63) if arguments.seed is None else arguments.seed
            options = located_kwargs(arguments) | {"seed": seed}
            with asyncios_interrupts():
                return asyncio.run(_answer(config, options, raw_lines(stream), file, quiet=arguments.quiet))
        finally:
            file.close()


async def _answer(
    config: "ServerConfig", options: dict[str, Any], lines: Iterator[tuple[int, bytes]], file: LineFile, *, quiet: bool
) -> int:
    from jaxllm.server.batch import BatchAnswers
    from jaxllm.server.engine.process_client import ProcessClient
    from jaxllm.server.http.app import create_app
    from jaxllm.server.served_model import read_model
    from jaxllm.server.server import Server

    client = ProcessClient(options)
    model = read_model(config, options.get("model"), options.get("tokenizer"), created=int(time.time()))
    server = Server(config, client, model)
    answers = BatchAnswers(create_app(server))
    job = _BatchRun(answers, file, quiet=quiet)
    try:
        await job.until_signal(server.start())
        if job.signal is None:
            await job.until_signal(job.run(lines, server))
    finally:
        await server.close()
    job.report()
    if job.signal is not None:
        return EXIT_INTERRUPTED if job.signal == signal.SIGINT else 128 + job.signal
    return int(bool(answers.num_failed))


class _BatchRun:
    """Lines that are being answered, a bounded number at once, until the last or a signal."""

    def __init__(self, answers: "BatchAnswers", file: LineFile, *, quiet: bool):
        self._answers, self._file, self._quiet = answers, file, quiet
        self.signal: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def until_signal(self, work: Any) -> None:
        """Runs `work`, which Ctrl-C or SIGTERM cancels."""
        task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()

        def stop(number: int) -> None:
            self.signal = number
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            await task
        except asyncio.CancelledError:
            if self.signal is None:
                raise
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def run(self, lines: Iterator[tuple[int, bytes]], server: Any) -> None:
        most = _AHEAD * server.client.info.config.most_running
        disable = True if self._quiet else None
        try:
            with tqdm(desc="requests", unit="req", file=sys.stderr, disable=disable) as bar:
                for number, raw in lines:
                    if not server.client.health().is_alive:
                        raise EngineDeadError("the engine has stopped; what was answered is in the output")
                    task = asyncio.create_task(self._answer(number, raw, bar))
                    self._tasks.add(task)
                    while len(self._tasks) >= most:
                        await self._some()
                while self._tasks:
                    await self._some()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _some(self) -> None:
        """Waits until at least one line is answered. Raises what kept it from being written."""
        done, self._tasks = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _answer(self, number: int, raw: bytes, bar: Any) -> None:
        self._file.write(await self._answers.answer(number, raw))
        bar.update()

    def report(self) -> None:
        if self.signal is not None:
            print("ended early: the output has the answers so far, each of them whole", file=sys.stderr)
        if not self._quiet:
            failed = f", {self._answers.num_failed} refused or failed" if self._answers.num_failed else ""
            print(f"[{self._answers.num_answered} answered{failed}]", file=sys.stderr)
