"""`python -m jaxllm.generate`: completes prompts in the terminal, or a file of requests in JSON lines."""

import argparse
import secrets
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from jaxllm.cli.cluster import add_cluster_arguments, cluster_of, keep_stdout
from jaxllm.cli.common import (
    EXIT_INTERRUPTED,
    add_engine_arguments,
    engine_kwargs,
    program,
    recommended_fields,
    run_command,
    setup_compilation_cache,
    setup_device_memory,
)
from jaxllm.cli.parser import CommandParser, Example
from jaxllm.cli.sampling_options import add_sampling_arguments, sampling_fields, with_defaults
from jaxllm.cli.terminal import JsonPrinter, Meter, Printer
from jaxllm.errors import JaxLLMError
from jaxllm.sampling_params import SamplingParams, drawing_fields


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a request failed, 2 for bad input, 130 on Ctrl-C, 141 on a closed pipe."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _run(arguments), prints=arguments.output in (None, "-"))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        program("generate"),
        description="Completes prompts. Without a prompt, reads it from standard input.",
        examples=[
            Example('generate "def read_lines(path"', "with the embedded model, a small one that writes Python"),
            Example('generate "Once upon a time" --model smollm2 --max-tokens 64', "with a model that is fetched"),
            Example('generate --chat "Why is the sky blue?" --model Qwen/Qwen3-0.6B', "as a question to a chat model"),
            Example("generate --input requests.jsonl --output results.jsonl", "a file of requests"),
        ],
    )
    add = parser.add_argument
    add("prompts", nargs="*", type=str, metavar="PROMPT", help="a text to complete")
    add("--file", metavar="FILE", help="read one prompt from a file, less a newline at its end; - is standard input")
    add("--json", action="store_true", help="print one JSON object per prompt and line when it has finished")
    add("--token-ids", action="store_true", help="include token ids in JSON")
    add("--no-echo", action="store_true", help="do not print the prompt before its completion")
    add("--quiet", action="store_true", help="do not print progress and the closing line with speed and memory")
    add = parser.add_argument_group("chat").add_argument
    add("--chat", action="store_true", help="treat prompts as user messages and apply the model's chat template")
    add("--system", type=str, metavar="TEXT", help="what the conversation begins with")
    add("--chat-template", metavar="NAME", help="one of the model's own, vicuna, llama2, or a file")
    _add_jsonl_arguments(parser)
    add_sampling_arguments(parser)
    add_engine_arguments(parser)
    add_cluster_arguments(parser)
    return parser


def _add_jsonl_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "JSON lines",
        "Each line of the input is a string, or an object with prompt, prompt_token_ids or messages, and optionally an "
        "id and sampling parameters. Results are written as they finish and contain the number of their line.",
    ).add_argument
    add("--input", metavar="FILE", help="read requests in JSON lines; - is standard input")
    add("--output", metavar="FILE", help="write results in JSON lines (default: standard output)")
    add("--resume", action="store_true", help="skip requests whose results are in the output")
    add("--skip-invalid", action="store_true", help="write an error as the result of invalid lines instead of stopping")


def _run(arguments: argparse.Namespace) -> int:
    cluster = cluster_of(arguments)
    if cluster is not None:
        keep_stdout()
    if cluster is not None and not cluster.is_leader:
        _open_llm(arguments)  # which ends the program once the first host has done its work
    if arguments.input is not None:
        return _run_jsonl(arguments)
    for name in ("output", "resume", "skip_invalid"):
        if getattr(arguments, name):
            raise ValueError(f"--{name.replace('_', '-')} is for JSON lines; give the requests with --input")
    for name in ("system", "chat_template"):
        if getattr(arguments, name) is not None and not arguments.chat:
            raise ValueError(f"--{name.replace('_', '-')} is for conversations; add --chat")
    return _generate(arguments)


def _run_jsonl(arguments: argparse.Namespace) -> int:
    from jaxllm.cli.jsonl.requests import Settings
    from jaxllm.cli.jsonl.run import JsonlOptions, run_jsonl

    if arguments.prompts or arguments.file:
        raise ValueError("there is a prompt beside --input; add it to the input, or leave --input out")
    if arguments.resume and arguments.output is None:
        raise ValueError("--resume needs the results so far; give their file with --output")
    fields = sampling_fields(arguments)
    SamplingParams(**with_defaults(fields))  # reports a bad option before any line
    engine = engine_kwargs(arguments)
    places = {name: engine[name] for name in ("revision", "download_dir") if name in engine}
    settings = Settings(
        fields=fields,
        recommended=recommended_fields(arguments.model, **places),
        chat=arguments.chat,
        system=arguments.system,
        chat_template=arguments.chat_template,
        model=Path(arguments.model or "").name,
    )
    options = JsonlOptions(
        input=None if arguments.input == "-" else Path(arguments.input),
        output=None if arguments.output in (None, "-") else Path(arguments.output),
        settings=settings,
        resume=arguments.resume,
        skip_invalid=arguments.skip_invalid,
        token_ids=arguments.token_ids,
        quiet=arguments.quiet,
    )
    return run_jsonl(options, lambda: _open_llm(arguments))


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
    return text.removesuffix("\n")  # editors and echo add it; it would end the text to complete


def _open_llm(arguments: argparse.Namespace) -> Any:
    setup_device_memory(arguments.gpu_memory_utilization)
    setup_compilation_cache()
    from jaxllm.llm import LLM  # imports jax, which --help does not need

    cluster = cluster_of(arguments)
    group: dict[str, Any] = {} if cluster is None else {"cluster": cluster}
    # A random seed: requests without one give a different text each time.
    return LLM(**engine_kwargs(arguments), **group, seed=secrets.randbits(63))


def _generate(arguments: argparse.Namespace) -> int:
    prompts, fields = _read_prompts(arguments), sampling_fields(arguments)
    SamplingParams(**with_defaults(fields))  # reports a bad option before the model is loaded
    with _open_llm(arguments) as llm:
        params = SamplingParams(**with_defaults(fields, drawing_fields(llm.get_default_sampling_params())))
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?"
        requests = [_chat_prompt(llm, prompt, arguments) for prompt in prompts] if arguments.chat else prompts
        printer, meter = _printer(arguments, prompts, params.n), Meter()
        was_interrupted = _stream(llm, requests, params, printer, meter)
        if not arguments.quiet:
            print(meter.summary(llm.stats()), file=sys.stderr)
    for index, error in meter.errors.items():
        print(f"error: prompt {index + 1} failed: {error}", file=sys.stderr)
    return EXIT_INTERRUPTED if was_interrupted else int(bool(meter.errors))


def _chat_prompt(llm: Any, prompt: str, arguments: argparse.Namespace) -> Any:
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    messages = [*system, {"role": "user", "content": prompt}]
    return llm.chat_prompt(messages, chat_template=arguments.chat_template)


def _printer(arguments: argparse.Namespace, prompts: list[str], n: int) -> Printer | JsonPrinter:
    if arguments.json:
        return JsonPrinter(prompts, token_ids=arguments.token_ids, out=sys.stdout)
    if arguments.chat:
        prompts = [f"{prompt}\n" for prompt in prompts]  # the answer begins on a line of its own
    return Printer(prompts, n, echo=not arguments.no_echo, out=sys.stdout)


def _stream(llm: Any, requests: list, params: SamplingParams, printer: Printer | JsonPrinter, meter: Meter) -> bool:
    """Prints completions as they grow. Returns whether Ctrl-C stopped them; no request keeps running."""
    try:
        with closing(llm.stream(requests, params)) as updates:
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
