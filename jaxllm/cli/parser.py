"""The argument parser of all commands: options with - or _, errors in three lines, examples at the end of the help."""

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from jaxllm.cli.streams import flushed
from jaxllm.cli.texts import as_utf8

EXIT_USAGE = 2


class Example:
    """A command line for the end of a help text, without `jaxllm`, and what it does."""

    def __init__(self, line: str, text: str):
        self.line, self.text = line, text

    def __str__(self) -> str:
        return f"  jaxllm {self.line}\n      {self.text}"


class CommandParser(argparse.ArgumentParser):
    """Takes `--max_len 8` and `--max-len=8` for `--max-len 8`. An error comes first, then one line of usage, then where
    the options are listed."""

    def __init__(self, prog: str, *, examples: Sequence[Example] = (), **options: Any):
        options = {"allow_abbrev": False, "formatter_class": _HelpFormatter} | options
        if examples:
            options["epilog"] = "\n".join(["examples:", *map(str, examples), *filter(None, [options.get("epilog")])])
        super().__init__(prog, **options)
        self.register("type", str, _text)  # names of files have no type, as they keep their bytes
        self.register("type", int, _integer)
        self.register("type", float, _number)

    def add_subparsers(self, **options: Any) -> Any:
        return super().add_subparsers(**{"prog": self.prog, "required": True, "metavar": "COMMAND"} | options)

    def format_usage(self) -> str:
        positionals = [_usage_of(action) for action in self._get_positional_actions()]
        return " ".join([f"usage: {self.prog} [OPTIONS]", *filter(None, positionals)]) + "\n"

    def format_help(self) -> str:
        self.usage = self.format_usage().removeprefix("usage: ").rstrip()
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        """As `parse_args`: what is not known is an error, of the subcommand that it was given to."""
        given = list(sys.argv[1:] if args is None else args)
        found, unknown = super().parse_known_args([*self._with_hyphens(given)], namespace)
        if unknown:
            self.error(self.unknown(unknown[0]))
        return found, []

    def _with_hyphens(self, given: Iterable[str]) -> Iterable[str]:
        """`given` with the known options among them as they are spelt here."""
        is_over = False
        for word in given:
            is_over = is_over or word == "--"
            name, equals, value = word.partition("=")
            spelt = name.replace("_", "-")
            is_option = not is_over and word.startswith("--") and spelt in self._option_string_actions
            yield f"{spelt}{equals}{value}" if is_option else word

    def option(self, name: str) -> argparse.Action | None:
        """The option that is called so, with - or _."""
        return self._option_string_actions.get(name) or self._option_string_actions.get(name.replace("_", "-"))

    def unknown(self, word: str) -> str:
        """The error for a word that is no argument."""
        name = word.partition("=")[0]
        if not name.startswith("-"):
            return f"{word!r} is one argument too many"
        if "." in name and self.option(whole := name.partition(".")[0]) is not None:
            return f"{name} sets a part of {whole}; give that, as JSON"
        return f"there is no option {name}{self._suggestion(name.replace('_', '-'))}"

    def _suggestion(self, name: str) -> str:
        shown = {
            option
            for option, action in self._option_string_actions.items()
            if option.startswith("--") and action.help != argparse.SUPPRESS
        }
        near = difflib.get_close_matches(name, sorted(shown), n=1, cutoff=0.7)
        return f"; did you mean {near[0]}?" if near else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = list(map(str, action.choices))
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise argparse.ArgumentError(action, f"{value!r} is not one of {', '.join(choices)}{hint}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        super().exit(flushed(status), message)  # of a help text the reader may have gone

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace("expected one argument", "a value is missing")
        message = message.replace("the following arguments are required:", "something is missing:")
        self.exit(EXIT_USAGE, f"error: {message}\n{self.format_usage()}{self.prog} --help lists the options\n")


def _usage_of(action: argparse.Action) -> str:
    if action.help == argparse.SUPPRESS:
        return ""
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    suffix = {"?": "", None: "", argparse.PARSER: " ..."}.get(action.nargs, " ...")
    return f"{name}{suffix}" if action.nargs in (None, argparse.PARSER, "+") else f"[{name}{suffix}]"


class _HelpFormatter(argparse.HelpFormatter):
    """Keeps the lines of texts that have several."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def _text(text: str) -> str:
    try:
        return as_utf8(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer; give one such as 8") from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; give one such as 0.5") from error


def json_object(text: str) -> dict[str, Any]:
    """For options whose value is an object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r:.100} is not a JSON object, such as {{"name": 0.5}}')
    return value


class StoreModel(argparse.Action):
    """Stores the model, which may be given in its place or by `--model`, but not as two."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values is None:  # in its place there is none
            return
        before = getattr(namespace, self.dest)
        if before not in (None, values):
            raise argparse.ArgumentError(None, f"the model is given twice, as {before!r} and {values!r}; give one")
        setattr(namespace, self.dest, values)
