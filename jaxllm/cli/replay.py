"""`jaxllm replay`: applies the commands that an engine has recorded, and says whether the same comes of them."""

import argparse
import logging
from collections.abc import Sequence

from jaxllm.cli.common import run_command, setup_compilation_cache, setup_device_memory
from jaxllm.cli.parser import CommandParser, Example


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if something differs or can't be replayed, 2 for bad input."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _replay(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "jaxllm replay",
        description="Replays what --record FILE has written: builds the same engine, asks the same of its device, and "
        "compares the results, bit by bit.",
        examples=[Example("replay run.commands", "says whether the same comes of it, or where it first differs")],
    )
    parser.add_argument("file", metavar="FILE", help="a recording; replay only those of people you trust")
    parser.add_argument("--model", metavar="NAME", help="the model, as for other commands (default: where it was)")
    return parser


def _replay(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with open(arguments.file, "rb") as file:
        setup_device_memory(None)
        setup_compilation_cache()
        from jaxllm.engine.replay import replay  # imports jax, which --help does not need
        from jaxllm.hub.locate import locate

        report = replay(file, locate(arguments.model))
    print(report)
    return int(not report.is_equal)
