"""`jaxllm models`: lists, fetches and removes models of the hub's cache. Needs no jax to list and remove."""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxllm.cli.common import run_command
from jaxllm.cli.completion import completes_models
from jaxllm.cli.parser import CommandParser, Example
from jaxllm.errors import ModelNotFoundError
from jaxllm.hub.names import SMOLLM2, HubName, parse_name


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if the user said no, 2 for names and downloads that failed, 130 on Ctrl-C."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _COMMANDS[arguments.command](arguments))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "jaxllm models",
        description="Models that are on this machine by name. They lie in huggingface_hub's cache (HF_HUB_CACHE), "
        "which other programs share.",
        examples=[
            Example("models pull Qwen/Qwen3-0.6B", "fetches it"),
            Example("models ls", "lists what is there"),
            Example("models rm Qwen/Qwen3-0.6B", "asks, and removes it"),
        ],
    )
    commands = parser.add_subparsers(dest="command")
    _add(commands, "ls", "list names, revisions, sizes, and when they were last used")
    pull = _add(commands, "pull", "fetch a model, without serving it; prints where it is")
    model = pull.add_argument(
        "model", metavar="NAME", help=f"org/name, org/name@revision, org/name:FILE.gguf, or {SMOLLM2}"
    )
    completes_models(model, paths=False)
    pull.add_argument("--revision", metavar="REV", help="branch, tag or commit (default: main)")
    rm = _add(commands, "rm", "remove a model, or with org/name@revision one revision of it")
    model = rm.add_argument("model", metavar="NAME", help=f"as ls prints it: org/name, org/name@revision, or {SMOLLM2}")
    completes_models(model, paths=False)
    rm.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def _add(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("--download-dir", metavar="DIR", help="cache to use (default: huggingface_hub's)")
    return parser


def _list(arguments: argparse.Namespace) -> int:
    from jaxllm.hub import cache, package_index
    from jaxllm.hub.progress import size

    folder = cache.cache_dir(arguments.download_dir)
    rows = [
        (
            model.name,
            " ".join((*model.refs, model.commit[:12])),
            size(model.num_bytes) + ("" if model.is_complete else ", incomplete"),
            _day(model.last_used_s),
        )
        for model in cache.list_models(folder)
    ]
    for name, packaged in package_index.MODELS.items():
        if path := package_index.find(name, arguments.download_dir):
            rows.append((name, packaged.version, size(packaged.num_bytes), _day(path.stat().st_atime)))
    if not rows:
        print(f"no models in {folder}; fetch one with: jaxllm models pull NAME", file=sys.stderr)
        return 0
    _print_table([("NAME", "REVISION", "SIZE", "LAST USED"), *rows])
    return 0


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _pull(arguments: argparse.Namespace) -> int:
    from jaxllm.hub.locate import locate

    print(locate(arguments.model, revision=arguments.revision, download_dir=arguments.download_dir))
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    from jaxllm.hub import cache, package_index
    from jaxllm.hub.progress import size

    name = parse_name(arguments.model)
    if name is None:
        if package_index.find(SMOLLM2, arguments.download_dir) is None:
            raise ModelNotFoundError(f"{SMOLLM2} is not on this machine; jaxllm models ls lists what is")
        if not _agrees(arguments, SMOLLM2, size(package_index.MODELS[SMOLLM2].num_bytes)):
            return 1
        package_index.remove(SMOLLM2, arguments.download_dir)
        return 0
    if not isinstance(name, HubName) or name.file is not None:
        raise ModelNotFoundError(f"{arguments.model!r} is no name that ls prints; remove your own files yourself")
    plan = cache.removal(cache.cache_dir(arguments.download_dir), name.repo, _revisions(name, arguments))
    if not _agrees(arguments, arguments.model, size(plan.expected_freed_size)):
        return 1
    plan.execute()
    return 0


def _revisions(name: HubName, arguments: argparse.Namespace) -> list[Any]:
    """Those that a name means: all, or those of `org/name@revision`, where the beginning of a commit is enough."""
    from jaxllm.hub import cache

    folder = cache.cache_dir(arguments.download_dir)
    found = cache.list_models(folder, name.repo)
    if not found:
        raise ModelNotFoundError(f"{name.repo} is not in {folder}; jaxllm models ls lists what is")
    if "@" not in arguments.model:
        return found
    chosen = [model for model in found if name.revision in model.refs or model.commit.startswith(name.revision)]
    if len(chosen) != 1:
        raise ModelNotFoundError(
            f"{arguments.model!r} means {len(chosen)} revisions; of {name.repo} there are "
            f"{', '.join(cache.describe(found))}"
        )
    return chosen


def _agrees(arguments: argparse.Namespace, what: str, freed: str) -> bool:
    """Says what is freed, and asks unless told not to."""
    if arguments.yes:
        print(f"{what}: frees {freed}")
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        raise ValueError(f"removing {what} would free {freed}; there is nobody to ask, so add --yes")
    return input(f"Remove {what}, which frees {freed}? [y/N] ").strip().lower() in ("y", "yes")


_COMMANDS = {"ls": _list, "pull": _pull, "rm": _remove}
