"""`jaxllm COMMAND`: dispatches to the commands of this folder."""

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import jaxllm
from jaxllm.checkpoint.files import is_gguf
from jaxllm.cli.completion import VARIABLE, complete, module_of
from jaxllm.cli.streams import flushed, reader_gone
from jaxllm.hub.names import SMOLLM2
from jaxllm.stderr import say

COMMANDS = {  # modules of this folder
    "serve": "serves OpenAI's API over HTTP, and a chat page",
    "chat": "holds a conversation in the terminal",
    "generate": "completes prompts, or a file of requests",
    "run-batch": "answers a file of requests in OpenAI's batch format",
    "complete": "completes a prompt with the model of a server that runs",
    "models": "lists, fetches and removes models of the hub",
    "bench": "measures the engine",
    "eval": "measures a model: perplexity, divergence from another, choices",
    "replay": "repeats on the device what an engine has recorded, for bug reports",
    "convert": "converts pickled weights and slow tokenizers",
    "aot": "compiles for TPUs and GPUs without having one, and reports what a model needs there",
}
_TALKS = ("run", "talk", "ask", "launch", "start")  # what other programs call it
_HELP, _VERSION = ("-h", "--help", "help"), ("-V", "--version", "version")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the command's exit code; 2 if there is no such command, 141 if the reader of a text has gone."""
    if argv is None and VARIABLE in os.environ:
        complete(COMMANDS)
    name, *rest = [*(sys.argv[1:] if argv is None else argv), ""]
    if name in COMMANDS:
        return import_module(module_of(name)).main(rest[:-1])
    if name in _VERSION:
        return _print(f"jaxllm {jaxllm.__version__}")
    if name in _HELP:
        return _print(_usage())
    error = f"error: {name!r} is not a command{_suggestion(name, rest[0] if rest else '')}\n\n"
    say(f"{error if name else ''}{_usage()}")
    return 2


def _print(text: str) -> int:
    try:
        print(text)
        return flushed(0)
    except BrokenPipeError:
        return reader_gone()


def _suggestion(name: str, argument: str) -> str:
    if near := difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.75):
        return f"; did you mean jaxllm {near[0]}?"
    model = argument if name in _TALKS else name if "/" in name or name == SMOLLM2 or is_gguf(Path(name)) else ""
    return f"; to talk with that model: jaxllm chat {model}" if model else ""


def _usage() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return f"usage: jaxllm COMMAND [OPTIONS]\n\n{commands}\n\njaxllm COMMAND --help lists its options; jaxllm --version"
