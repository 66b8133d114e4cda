"""`python -m jaxllm.bench`: measures the engine and prints text or JSON."""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.bench.options import add_model_arguments, check_at_least, model_options
from jaxllm.bench.workload import KINDS, MAX_VOCAB, check_kinds
from jaxllm.cli.common import (
    add_engine_arguments,
    add_model_argument,
    located_kwargs,
    program,
    run_command,
    setup_compilation_cache,
    setup_device_memory,
)
from jaxllm.cli.parser import CommandParser, Example


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code, as `run_command` does."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _COMMANDS[arguments.command](arguments))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        program("bench"),
        description="Measures the engine, and prints text or JSON.",
        examples=[
            Example("bench throughput smollm2 --json", "tokens a second of seeded workloads"),
            Example("bench serve --streams 64 --seconds 30", "a server under load"),
        ],
    )
    commands = parser.add_subparsers(dest="command")
    _add_throughput(commands)
    _add_latency(commands)
    text = "seconds from the command to the first token, with an empty and with a filled compilation cache"
    add_model_arguments(commands.add_parser("startup", help=text, description=text))
    _add_serve(commands)
    return parser


def _add_throughput(commands: Any) -> None:
    text = "tokens per second over whole workloads of random token ids"
    parser = commands.add_parser("throughput", help=text, description=text)
    meanings = "; ".join(f"{kind}: {meaning}" for kind, meaning in KINDS.items())
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), metavar="KIND", help=f"{meanings} (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="times as many requests (default: 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the workloads (default: 0)")
    parser.add_argument(
        "--vocab", type=int, metavar="N", help=f"token ids are below it (default: the model's, at most {MAX_VOCAB})"
    )
    add_model_arguments(parser)


def _add_latency(commands: Any) -> None:
    text = "time to the first token, between tokens, and to the last"
    parser = commands.add_parser("latency", help=text, description=text)
    for name, default, what in (
        ("--batch-size", 1, "requests at a time"),
        ("--input-len", 64, "tokens of each prompt"),
        ("--output-len", 128, "tokens of each output"),
        ("--seed", 0, "of the prompts"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    add_model_arguments(parser)


def _add_serve(commands: Any) -> None:
    text = "a server under load: streams over HTTP, latencies, memory, leaks"
    parser = commands.add_parser("serve", help=text, description=text)
    for name, kind, default, what in (
        ("--streams", int, 256, "clients at once"),
        ("--seconds", float, 60.0, "duration of the load"),
        ("--input-len", int, 16, "tokens of each prompt"),
        ("--output-len", int, 32, "tokens of each output"),
        ("--seed", int, 0, "of the prompts"),
    ):
        parser.add_argument(name, type=kind, default=default, metavar="N", help=f"{what} (default: {default})")
    parser.add_argument(
        "--compare", action="store_true", help="instead: one request per client, over HTTP and through LLM.generate"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds of --compare (default: 3)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    add_model_argument(parser)
    add_engine_arguments(parser)


def _throughput(arguments: argparse.Namespace) -> int:
    check_kinds(arguments.kinds)
    check_at_least(1, repeats=arguments.repeats)
    check_at_least(0, scale=arguments.scale)
    model = model_options(arguments)
    setup_device_memory(arguments.gpu_memory_utilization)
    setup_compilation_cache()
    from jaxllm.bench import throughput

    report = throughput.run(
        model,
        kinds=arguments.kinds,
        scale=arguments.scale,
        repeats=arguments.repeats,
        seed=arguments.seed,
        vocab=arguments.vocab,
    )
    return _print(report, throughput.table, arguments)


def _latency(arguments: argparse.Namespace) -> int:
    sizes = {name: getattr(arguments, name) for name in ("batch_size", "input_len", "output_len", "repeats")}
    check_at_least(1, **sizes)
    model = model_options(arguments)
    setup_device_memory(arguments.gpu_memory_utilization)
    setup_compilation_cache()
    from jaxllm.bench import latency

    return _print(latency.run(model, **sizes, seed=arguments.seed), latency.table, arguments)


def _startup(arguments: argparse.Namespace) -> int:
    check_at_least(1, repeats=arguments.repeats)
    model = model_options(arguments)
    from jaxllm.bench import startup  # only the processes that it starts import jax

    return _print(startup.run(model, repeats=arguments.repeats), startup.table, arguments)


def _serve(arguments: argparse.Namespace) -> int:
    sizes = {name: getattr(arguments, name) for name in ("streams", "input_len", "output_len")}
    check_at_least(1, **sizes, repeats=arguments.repeats)
    check_at_least(0, seconds=arguments.seconds)
    from jaxllm.bench import serve

    engine = located_kwargs(arguments)
    if arguments.compare:
        setup_device_memory(arguments.gpu_memory_utilization)
        setup_compilation_cache()
        report = serve.compare(engine, **sizes, repeats=arguments.repeats, seed=arguments.seed)
    else:
        report = serve.run(engine, **sizes, seconds=arguments.seconds, seed=arguments.seed)
    return _print(report, serve.table, arguments)


def _print(report: dict[str, Any], table: Callable[[dict[str, Any]], str], arguments: argparse.Namespace) -> int:
    print(json.dumps(report) if arguments.json else table(report))
    return 0


_COMMANDS = {"throughput": _throughput, "latency": _latency, "startup": _startup, "serve": _serve}
