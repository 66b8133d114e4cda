"""The settings of a quantisation in a model's files, which may be hostile: each is checked when it is read."""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jaxllm.errors import ModelFormatError

_MAX_NAMES = 20_000  # of a list; the longest name each layer's modules one by one
_MAX_PATTERN = 1000  # characters
_MAX_REPEATS = 5  # in a pattern: the time that matching takes grows with their power


class Options:
    """A JSON object, and where it was found."""

    def __init__(self, where: str, values: Mapping[str, Any]):
        self.where, self.values = where, values

    def error(self, problem: str, remedy: str = "take the original weights, or a GGUF file of the model"):
        return ModelFormatError(f"{self.where}: {problem}; {remedy}")

    def integer(self, key: str, default: int | None, *, least: int, most: int) -> int | None:
        value = self._value(key, default)
        if value is not default and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.error(f"{key}={value!r:.100} must be an integer", "download it again")
        if value is not None and not least <= value <= most:
            raise self.error(f"{key}={value!r:.100} must be between {least} and {most}", "download it again")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key}={value!r:.100} must be true or false", "download it again")
        return value

    def choice(self, key: str, known: Sequence[str | None], default: str | None) -> str | None:
        """One of `known`, in lower case."""
        value = self._value(key, default)
        value = value.lower() if isinstance(value, str) else value
        if value not in list(known):
            raise self.error(f"{key}={value!r:.100} is not supported; supported: {[one for one in known if one]}")
        return value

    def names(self, *keys: str) -> tuple[str, ...] | None:
        """What the lists under these keys hold, each entry checked as a pattern; None if all are missing."""
        lists = [(key, self.values[key]) for key in keys if self.values.get(key) is not None]
        for key, names in lists:
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise self.error(f"{key}={names!r:.100} must be a list of names", "download it again")
            if len(names) > _MAX_NAMES:
                raise self.error(f"{key} has {len(names)} names; at most {_MAX_NAMES} are read", "download it again")
            for name in names:
                self.check_pattern(key, name.removeprefix("re:") if name.startswith("re:") else "")
        return tuple(name for _, names in lists for name in names) if lists else None

    def section(self, key: str) -> "Options | None":
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{key}={value!r:.100} must be an object", "download it again")
        return Options(f"{self.where}.{key:.100}", value)

    def check_pattern(self, key: str, pattern: str) -> None:
        """ModelFormatError unless it is a regular expression whose matching ends soon for any name."""
        try:
            if len(pattern) > _MAX_PATTERN or _may_take_long(pattern):
                raise self.error(
                    f"{key}: the pattern {pattern!r:.100} is longer than {_MAX_PATTERN} characters, has more than "
                    f"{_MAX_REPEATS} repetitions, or one within a repeated group, and may take for ever",
                    "write it without",
                )
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise self.error(f"{key}: {pattern!r:.100} is no pattern ({error})", "download it again") from error

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def _may_take_long(pattern: str) -> bool:
    """Whether a group that is repeated holds a repetition or a choice, or there are many repetitions."""
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", pattern, flags=re.DOTALL)
    plain = re.sub(r"\(\?([:=!>]|<[=!])", "(", plain)
    holds = [False]  # for each open group, whether it has a repetition or a choice so far
    for i, letter in enumerate(plain):
        if letter == "(":
            holds.append(False)
        elif letter == ")":
            inner = len(holds) > 1 and holds.pop()
            if inner and plain[i + 1 : i + 2] in ("*", "+", "{"):
                return True
            holds[-1] |= inner
        elif letter in "*+{?|":
            holds[-1] = True
    return sum(plain.count(letter) for letter in "*+{") > _MAX_REPEATS


def matches(entry: str, name: str) -> bool:
    """Whether a list's entry names the module: by a regular expression after "re:", by the pattern of a file name, or
    by parts of the name between dots."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    if any(letter in entry for letter in "*?["):
        return fnmatch.fnmatchcase(name, entry)
    return bool(entry) and f".{entry}." in f".{name}."


def matches_any(entries: tuple[str, ...], name: str) -> bool:
    """Whether one of the entries does. Plain ones are looked up by the parts of the name: a mixture of experts has tens
    of thousands of modules."""
    plain, patterns = _kinds(entries)
    if plain:
        parts = name.split(".")
        runs = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        if not plain.isdisjoint(runs):
            return True
    return any(matches(entry, name) for entry in patterns)


def may_match_any(entries: tuple[str, ...], name: str) -> bool:
    """Whether one names the module in any dialect: also by letters within the name."""
    return matches_any(entries, name) or any(entry and entry in name for entry in entries)


def is_left_in(excluded: tuple[str, ...] | None, name: str) -> bool | None:
    """Whether a list of modules that are not quantised, if there is one, leaves the module quantised; None where that
    does not tell."""
    if excluded is None:
        return None
    if matches_any(excluded, name):
        return False
    return None if may_match_any(excluded, name) else True


@lru_cache(maxsize=8)
def _kinds(entries: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Plain names, and what is matched as a pattern."""
    patterns = tuple(one for one in entries if one.startswith("re:") or any(letter in one for letter in "*?["))
    return frozenset(entries) - {"", *patterns}, patterns
