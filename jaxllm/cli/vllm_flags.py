"""vLLM's flags on our commands: what has no option of ours is accepted where it asks for what is so, else refused."""

import argparse
import json
import logging
from typing import Any

from jaxllm.from_vllm.rules import Hint, Only, Renamed
from jaxllm.from_vllm.serve_flags import FLAGS, SEVERAL, SHORT, SWITCHES

log = logging.getLogger(__name__)

NOTES = "vllm_notes"  # the namespace's: why flags change nothing


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Adds those that the parser lacks. They are not in the help."""
    for name, rule in FLAGS.items():
        if isinstance(rule, Renamed):
            continue
        options = [f"--{name.replace('_', '-')}", *filter(None, [SHORT.get(name)])]
        if name in SWITCHES:
            options.append(f"--no-{options[0][2:]}")
        missing = [option for option in options if option not in parser._option_string_actions]
        if missing:
            nargs = 0 if name in SWITCHES else "+" if name in SEVERAL else None
            parser.add_argument(*missing, dest=NOTES, nargs=nargs, action=_RuledFlag, rule=rule, help=argparse.SUPPRESS)


class _RuledFlag(argparse.Action):
    """A flag of vLLM's whose value is judged by a rule, and leaves at most a note."""

    def __init__(self, *args: Any, rule: Hint | Only, **options: Any):
        super().__init__(*args, default=(), **options)
        self._rule = rule

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        value = not str(option_string).startswith("--no-") if self.nargs == 0 else _value(values)
        if isinstance(self._rule, Hint):
            setattr(
                namespace, NOTES, (*getattr(namespace, NOTES), f"{option_string} changes nothing: {self._rule.note}")
            )
        elif not self._rule.accepts(value):
            shown = "" if self.nargs == 0 else f" {values if isinstance(values, str) else ' '.join(values)}"
            raise argparse.ArgumentError(None, f"{option_string}{shown} is not supported: {self._rule.refusal}")


def _value(text: str | list[str]) -> Any:
    """What a flag's text stands for in Python: JSON if it is that."""
    if isinstance(text, list):
        return text
    try:
        return None if text == "None" else json.loads(text)
    except ValueError:
        return text


def log_notes(arguments: argparse.Namespace) -> None:
    """Logs which of the given flags change nothing, and why."""
    for note in getattr(arguments, NOTES):
        log.info("%s", note)
