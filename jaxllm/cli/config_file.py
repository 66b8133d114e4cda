"""Options from a YAML file, as `vllm serve --config` reads them: names without the hyphens before them, and values."""

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jaxllm.cli.parser import CommandParser
from jaxllm.cli.vllm_flags import NOTES

_MODEL = ("model", "model_tag")  # what the file may call it


def parse_with_config(parser: CommandParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of `argv`, and where it leaves one out that of the file which its `--config` names."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    arguments = parser.parse_args(words)
    if arguments.config is None:
        return arguments
    typed = [parser.option(word.partition("=")[0]) for word in words if word.startswith("-")]
    given = {_key(action) for action in typed if action is not None}
    if arguments.model is not None:
        given.add("model")
    try:
        return parser.parse_args([*_words(parser, Path(arguments.config), given), *words])
    except ValueError as error:
        parser.error(f"--config {arguments.config}: {error}")


def _key(action: argparse.Action) -> Any:
    """Which argument it sets; all that leave notes share one."""
    return action if action.dest == NOTES else action.dest


def _words(parser: CommandParser, file: Path, given: Collection[Any]) -> list[str]:
    """The file's options as they would be typed, without those that are `given`. Raises `ValueError`."""
    words: list[str] = []
    for name, value in _read(file).items():
        option = "--model" if name in _MODEL else f"--{name.replace('_', '-')}"
        action = parser.option(option)
        if action is None or action.dest == "config":
            raise ValueError(parser.unknown(option))
        if _key(action) not in given:
            words += _typed(parser, option, action, value)
    return words


def _read(file: Path) -> dict[str, Any]:
    import yaml

    try:
        options = yaml.safe_load(file.read_text())
    except (OSError, UnicodeError) as error:
        raise ValueError(f"the file can't be read ({error})") from error
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ValueError("it holds no names with values, such as port: 8000")
    return options


def _typed(parser: CommandParser, option: str, action: argparse.Action, value: Any) -> list[str]:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{option[2:]} is {value!r}; it must be true or false")
        negation = f"--no-{option[2:]}"
        return [option] if value else [negation] if parser.option(negation) is not None else []
    if value is None:
        return []
    if isinstance(value, list) and action.nargs == "+":
        return [option, *map(str, value)]
    several = isinstance(value, list) and isinstance(action, argparse._AppendAction)
    return [f"{option}={one if isinstance(one, str) else json.dumps(one)}" for one in (value if several else [value])]
