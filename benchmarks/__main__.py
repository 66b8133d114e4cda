"""`python -m benchmarks`: what the engine's developers measure, as text or JSON. Users have `jaxllm bench`."""

import argparse
import json
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from jaxllm.bench.options import add_model_arguments, check_at_least, model_options
from jaxllm.cli.common import run_command, setup_compilation_cache


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code, as `run_command` does."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _COMMANDS[arguments.command](arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_preemption(commands)
    _add_penalties(commands)
    steps = commands.add_parser("steps", help="host time of a decode step by number of running requests")
    steps.add_argument("--running", type=int, nargs="+", default=[1, 16, 64, 128, 256], metavar="N")
    steps.add_argument("--steps", type=int, default=200, help="decode steps measured for each N (default 200)")
    steps.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    followers = commands.add_parser("followers", help="what sending a decode step's commands to other hosts costs")
    followers.add_argument("--followers", type=int, default=8, metavar="N", help="processes here (default: 8)")
    followers.add_argument("--running", type=int, nargs="+", default=[1, 16, 64, 256], metavar="N")
    followers.add_argument("--steps", type=int, default=400, help="decode steps measured for each N (default 400)")
    followers.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    _add_memory(commands)
    _add_tokenizers(commands)
    _add_compiling(commands)
    _add_embeddings(commands)
    _add_experts(commands)
    _add_rollouts(commands)
    _add_checkpoints(commands)
    _add_harness(commands)
    return parser


def _add_memory(commands: Any) -> None:
    text = "KV memory without a token in it by block size, and blocks saved by sharing, as in the PagedAttention paper"
    parser = commands.add_parser("memory", help=text, description=text, allow_abbrev=False)
    add = parser.add_argument
    add("--requests", type=int, default=1000, metavar="N", help="of each trace of lengths (default: 1000)")
    add(
        "--beam-requests",
        type=int,
        default=16,
        metavar="N",
        help="searches with ShareGPT-like lengths, by the embedded model; eight times as many with Alpaca-like ones, "
        "which are short (default: 16)",
    )
    add("--no-beams", action="store_true", help="leave out the searches, which take longest")
    add("--max-len", type=int, default=2048, metavar="N", help="most tokens of a sequence (default: 2048)")
    add("--seed", type=int, default=0, metavar="N", help="of lengths, prompts and arrivals (default: 0)")
    add("--json", action="store_true", help="one JSON object instead of tables")
    add("--plot", metavar="FILE", help="draw the figures as well, in a PNG file")


def _add_preemption(commands: Any) -> None:
    text = "throughput when requests want several times the KV memory there is, by kind of preemption"
    parser = commands.add_parser("preemption", help=text, description=text, allow_abbrev=False)
    _add_requests(parser, requests=64, output_len=128)
    what = "times the pool that all requests together want (default: 8)"
    parser.add_argument("--overcommit", type=float, default=8.0, metavar="N", help=what)
    add_model_arguments(parser)


def _add_penalties(commands: Any) -> None:
    text = "throughput with penalties for tokens that prompt or output have, beside that without"
    parser = commands.add_parser("penalties", help=text, description=text, allow_abbrev=False)
    _add_requests(parser, requests=256, output_len=64)
    add_model_arguments(parser)


def _add_tokenizers(commands: Any) -> None:
    text = "time and memory to load tokenizers and to use them"
    parser = commands.add_parser("tokenizers", help=text, description=text, allow_abbrev=False)
    parser.add_argument("directories", nargs="+", metavar="DIR", help="with a tokenizer.json each")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="processes for each (default: 3)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def _add_compiling(commands: Any) -> None:
    text = "speed of requests while executables compile behind them, beside that when all are there"
    parser = commands.add_parser("compiling", help=text, description=text, allow_abbrev=False)
    _add_requests(parser, requests=64, output_len=96)
    what = "for which a lone request is repeated (default: 12)"
    parser.add_argument("--seconds", type=int, default=12, metavar="N", help=what)
    add_model_arguments(parser)


def _add_embeddings(commands: Any) -> None:
    text = "embeddings of texts of mixed length, beside transformers (extra: test)"
    parser = commands.add_parser("embeddings", help=text, description=text, allow_abbrev=False)
    for name, default, what in (("--texts", 256, "to embed"), ("--repeats", 3, "of each"), ("--seed", 0, "of them")):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def _add_rollouts(commands: Any) -> None:
    text = "host time of a token in samples as arrays"
    parser = commands.add_parser("rollouts", help=text, description=text, allow_abbrev=False)
    add = parser.add_argument
    add("--slots", type=int, nargs="+", default=[64, 256], metavar="N", help="sequences at once (default: 64 256)")
    add("--tokens", type=int, nargs="+", default=[16, 64], metavar="N", help="of each sample (default: 16 64)")
    numbers = ("--prompts", 128, "of 8 samples"), ("--repeats", 3, "of each"), ("--seed", 0, "of all")
    for name, default, what in numbers:
        add(name, type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    add("--json", action="store_true", help="one JSON object instead of a table")


def _add_checkpoints(commands: Any) -> None:
    text = "saving parameters and loading them on another mesh, as safetensors and with Orbax (extra: orbax)"
    parser = commands.add_parser("checkpoints", help=text, description=text, allow_abbrev=False)
    add = parser.add_argument
    add("--meshes", nargs="+", default=["tensor=1"], metavar="MESH", help='as LLM takes them (default: "tensor=1")')
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help="of files and engine (default: float32)")
    add("--layers", type=int, default=16, metavar="N", help="12.6 million parameters each (default: 16)")
    add("--repeats", type=int, default=5, metavar="N", help="of each (default: 5)")
    add("--json", action="store_true", help="one JSON object instead of a table")


def _add_harness(commands: Any) -> None:
    text = "multiple choice of lm-evaluation-harness, beside its Hugging Face back end (extras: lm-eval, test)"
    parser = commands.add_parser("harness", help=text, description=text, allow_abbrev=False)
    parser.add_argument("--model", metavar="DIR", help="of both (default: the embedded one)")
    numbers = ("--questions", 48, "with four choices"), ("--batch", 16, "of Hugging Face"), ("--threads", 2, "of torch")
    for name, default, what in (*numbers, ("--repeats", 3, "of each")):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def _add_experts(commands: Any) -> None:
    text = "decoding with a mixture of experts, beside transformers (extra: test) and vLLM"
    parser = commands.add_parser("experts", help=text, description=text, allow_abbrev=False)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], metavar="N", help="rows (default: 1 8)")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment that has vLLM, which then takes its turns")
    for name, default, what in (
        ("--layers", 12, "25 million parameters each"),
        ("--output-len", 64, "tokens of each output"),
        ("--repeats", 5, "of each"),
        ("--seed", 0, "of weights and prompts"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def _add_requests(parser: argparse.ArgumentParser, *, requests: int, output_len: int) -> None:
    for name, default, what in (
        ("--requests", requests, "handed in at once"),
        ("--input-len", 64, "tokens of each prompt"),
        ("--output-len", output_len, "tokens of each output"),
        ("--seed", 0, "of the prompts"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{what} (default: {default})")


def _preemption(arguments: argparse.Namespace) -> int:
    return _run("preemption", arguments, "overcommit")


def _penalties(arguments: argparse.Namespace) -> int:
    return _run("penalties", arguments)


def _run(name: str, arguments: argparse.Namespace, *more: str) -> int:
    """A benchmark of requests like each other on one model. It is imported once the options are checked."""
    sizes = {name: getattr(arguments, name) for name in ("requests", "input_len", "output_len", "repeats", *more)}
    check_at_least(1, **sizes)
    model = model_options(arguments)
    if name != "compiling":
        setup_compilation_cache()
    benchmark = import_module(f"benchmarks.{name}")
    return _print(benchmark.run(model, **sizes, seed=arguments.seed), benchmark.table, arguments)


def _compiling(arguments: argparse.Namespace) -> int:
    return _run("compiling", arguments, "seconds")


def _steps(arguments: argparse.Namespace) -> int:
    setup_compilation_cache()
    from benchmarks.steps import measure, table

    return _print({"steps": measure(arguments.running, arguments.steps)}, lambda r: table(r["steps"]), arguments)


def _followers(arguments: argparse.Namespace) -> int:
    check_at_least(1, followers=arguments.followers, running=min(arguments.running))
    check_at_least(10, steps=arguments.steps)
    from benchmarks.followers import measure, table

    found = measure(arguments.followers, arguments.running, arguments.steps)
    return _print({"followers": arguments.followers, "steps": found}, lambda r: table(r["steps"]), arguments)


def _memory(arguments: argparse.Namespace) -> int:
    check_at_least(1, requests=arguments.requests, beam_requests=arguments.beam_requests)
    check_at_least(2, max_len=arguments.max_len)
    from benchmarks.paper import memory, memory_plot

    memory.check_max_len(arguments.max_len)
    plot = None if arguments.plot is None else Path(arguments.plot)
    if plot is not None:
        memory_plot.check(plot)  # before the minutes of work
    if not arguments.no_beams:
        setup_compilation_cache()
    report = memory.run(
        requests=arguments.requests,
        beam_requests=0 if arguments.no_beams else arguments.beam_requests,
        seed=arguments.seed,
        max_len=arguments.max_len,
    )
    _print(report, memory.table, arguments)
    if plot is not None:
        memory_plot.draw(report, plot)
    return 0


def _tokenizers(arguments: argparse.Namespace) -> int:
    check_at_least(1, repeats=arguments.repeats)
    from benchmarks import tokenizers

    return _print(tokenizers.run(arguments.directories, arguments.repeats), tokenizers.table, arguments)


def _embeddings(arguments: argparse.Namespace) -> int:
    check_at_least(1, texts=arguments.texts, repeats=arguments.repeats)
    setup_compilation_cache()
    from benchmarks import embeddings

    report = embeddings.run(texts=arguments.texts, repeats=arguments.repeats, seed=arguments.seed)
    return _print(report, embeddings.table, arguments)


def _rollouts(arguments: argparse.Namespace) -> int:
    names = ("slots", "tokens", "prompts", "repeats", "seed")
    options = {name: getattr(arguments, name) for name in names}
    check_at_least(1, prompts=arguments.prompts, repeats=arguments.repeats)
    for name in ("slots", "tokens"):
        check_at_least(1, **{name: min(options[name])})
    setup_compilation_cache()
    from benchmarks import rollouts

    return _print(rollouts.run(**options), rollouts.table, arguments)


def _checkpoints(arguments: argparse.Namespace) -> int:
    options = {name: getattr(arguments, name) for name in ("layers", "meshes", "dtype", "repeats")}
    check_at_least(1, layers=arguments.layers, repeats=arguments.repeats)
    from benchmarks import checkpoints

    return _print(checkpoints.run(**options), checkpoints.table, arguments)


def _harness(arguments: argparse.Namespace) -> int:
    names = ("questions", "batch", "threads", "repeats")
    options = {name: getattr(arguments, name) for name in names}
    check_at_least(1, **options)
    setup_compilation_cache()
    from benchmarks import harness

    return _print(harness.run(model=arguments.model, **options), harness.table, arguments)


def _experts(arguments: argparse.Namespace) -> int:
    names = ("batches", "layers", "output_len", "repeats", "seed", "dtype", "vllm")
    options = {name: getattr(arguments, name) for name in names}
    check_at_least(1, layers=arguments.layers, output_len=arguments.output_len, repeats=arguments.repeats)
    setup_compilation_cache()
    from benchmarks import experts

    return _print(experts.run(**options), experts.table, arguments)


def _print(report: dict[str, Any], table: Callable[[dict[str, Any]], str], arguments: argparse.Namespace) -> int:
    print(json.dumps(report) if arguments.json else table(report))
    return 0


_COMMANDS = {
    "preemption": _preemption,
    "penalties": _penalties,
    "steps": _steps,
    "followers": _followers,
    "memory": _memory,
    "tokenizers": _tokenizers,
    "compiling": _compiling,
    "embeddings": _embeddings,
    "harness": _harness,
    "experts": _experts,
    "rollouts": _rollouts,
    "checkpoints": _checkpoints,
}


if __name__ == "__main__":
    raise SystemExit(main())
