"""`jaxllm complete`: completes prompts with the model of a server that runs."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from jaxllm.cli.common import EXIT_INTERRUPTED, run_command
from jaxllm.cli.parser import CommandParser, Example
from jaxllm.cli.remote import DEFAULT_URL, Remote, add_remote_arguments, open_remote
from jaxllm.cli.sampling_options import DEFAULTS, add_sampling_arguments, check_one_answer, sampling_fields
from jaxllm.cli.terminal import clean
from jaxllm.cli.terminal_input import LineInput
from jaxllm.cli.texts import as_utf8


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 if there is no server or it refuses, 130 on Ctrl-C."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _run(arguments))


def _parser() -> CommandParser:
    parser = CommandParser(
        "jaxllm complete",
        description="Completes a prompt with the model of a server that runs, which may be another program than this "
        "with OpenAI's API. Without a prompt, reads one from standard input; in a terminal, one after the other.",
        examples=[Example('complete "def read_lines(path" --max-tokens 64', "with the server at port 8000")],
    )
    parser.add_argument("prompt", nargs="?", type=str, metavar="PROMPT", help="the text to complete")
    parser.add_argument("-q", "--quick", type=str, metavar="PROMPT", help="the same")
    add_remote_arguments(parser, url=DEFAULT_URL)
    add_sampling_arguments(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    if arguments.prompt is not None and arguments.quick is not None:
        raise ValueError("there is a prompt beside --quick; give one of them")
    fields = sampling_fields(arguments)
    check_one_answer(fields, "a completion of a server")
    fields = {"max_tokens": DEFAULTS["max_tokens"]} | fields
    prompt = arguments.quick if arguments.prompt is None else arguments.prompt
    remote = open_remote(arguments)
    if prompt is not None:
        return _complete(remote, prompt, fields)
    with LineInput() as lines:
        if not lines.is_terminal:
            return _complete(remote, as_utf8(sys.stdin.read()).removesuffix("\n"), fields)
        while (prompt := lines.read()) is not None:
            if prompt.strip():
                _complete(remote, prompt, fields)
    return 0


def _complete(remote: Remote, prompt: str, fields: dict[str, Any]) -> int:
    """Writes the completion as it grows."""
    try:
        with closing(remote.events("/completions", {"prompt": prompt, **fields})) as choices:
            for choice in choices:
                text = choice.get("text") or ""
                sys.stdout.write(clean(text) if sys.stdout.isatty() else text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        print(flush=True)
        return EXIT_INTERRUPTED
    print(flush=True)
    return 0
