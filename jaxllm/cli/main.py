"""`jaxllm COMMAND`: dispatches to the commands of this folder."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import jaxllm
from jaxllm.cli.completion import VARIABLE, complete

COMMANDS = {  # modules of this folder
    "serve": "serves OpenAI's API over HTTP, and a chat page",
    "chat": "holds a conversation in the terminal",
    "generate": "completes prompts, or a file of requests",
    "models": "lists, fetches and removes models of the hub",
    "bench": "measures the engine",
    "replay": "repeats on the device what an engine has recorded, for bug reports",
    "convert": "converts pickled weights and slow tokenizers",
    "aot": "compiles for TPUs and GPUs without having one, and reports what a model needs there",
}
_HELP, _VERSION = ("-h", "--help", "help"), ("-V", "--version", "version")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the command's exit code; 2 if there is no such command."""
    if argv is None and VARIABLE in os.environ:
        complete(COMMANDS)
    name, *rest = [*(sys.argv[1:] if argv is None else argv), ""]
    if name in COMMANDS:
        return import_module(f"jaxllm.cli.{name}").main(rest[:-1])
    if name in _VERSION:
        print(f"jaxllm {jaxllm.__version__}")
        return 0
    if name in _HELP:
        print(_usage())
        return 0
    print(f"error: {name!r} is not a command\n\n{_usage()}" if name else _usage(), file=sys.stderr)
    return 2


def _usage() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return f"usage: jaxllm COMMAND [OPTIONS]\n\n{commands}\n\njaxllm COMMAND --help lists its options; jaxllm --version"
