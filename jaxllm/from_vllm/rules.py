"""What becomes of a vLLM argument that is none of ours, and the errors for names that are nobody's."""

import logging
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

log = logging.getLogger(__name__)


class Hint(NamedTuple):
    """Any value is accepted: it says how vLLM shall work, not what shall come out, and `note` is why that is moot."""

    note: str


class Only(NamedTuple):
    """The values that ask for nothing, or for what is so anyway, are accepted; `refusal` is why others are not, and
    what to do instead."""

    accepted: tuple[Any, ...] | Callable[[Any], bool]
    refusal: str

    def accepts(self, value: Any) -> bool:
        if callable(self.accepted):
            return self.accepted(value)
        return any(value is one or (type(value) is type(one) and value == one) for one in self.accepted)


class Renamed(NamedTuple):
    """The same under another name."""

    ours: str


Rule = Hint | Only | Renamed


def translate(call: str, given: Mapping[str, Any], rules: Mapping[str, Rule]) -> dict[str, Any]:
    """Our arguments in the place of vLLM's. Raises `ValueError` for a value that asks for what is not there; all
    names in `given` must be in `rules`."""
    ours = {}
    for name, value in given.items():
        rule = rules[name]
        if isinstance(rule, Renamed):
            if value is not None:
                ours[rule.ours] = value
        elif isinstance(rule, Hint):
            if value is not None:
                log.info("%s: %s=%r changes nothing: %s", call, name, value, rule.note)
        elif not rule.accepts(value):
            raise ValueError(f"{name}={value!r:.100} is not supported: {rule.refusal}")
    return ours


def check_names(kind: type[Any], given: Mapping[str, Any]) -> None:
    """Raises `TypeError` for a name that is no field of the dataclass `kind`."""
    fields = kind.__dataclass_fields__
    for name in given:
        if name not in fields:
            raise unknown(kind.__name__, name, fields, {})


def unknown(call: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> TypeError:
    """The error for an argument that nobody knows, with the name that was probably meant. `elsewhere` says of names of
    other libraries what is theirs here."""
    if name in elsewhere:
        return TypeError(f"{call} has no argument {name!r}: {elsewhere[name]}")
    near = get_close_matches(name, list(known), 1)
    return TypeError(f"{call} has no argument {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
