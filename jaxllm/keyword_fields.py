"""Dataclasses whose fields are given by name, may be changed, and are kept unchanged by whoever uses them."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, TypeVar

from jaxllm.argument_checks import plain_number
from jaxllm.from_vllm.rules import Rule, translate, unknown

_Fields = TypeVar("_Fields", bound="KeywordFields")
_PLAIN = frozenset((int, float, str, bool, type(None), list, dict, tuple))


class KeywordFields:
    """Base of such a dataclass, whose `__init__` calls `_set_fields`, and whose `__post_init__` checks the fields and
    ends with `_keep`. Numbers of other libraries become Python's."""

    __slots__ = ("_kept",)
    _foreign: ClassVar[Mapping[str, Rule]] = {}  # names of vLLM's that are no fields
    _elsewhere: ClassVar[Mapping[str, str]] = {}  # other libraries' names, and what is theirs here
    _kept: dict[str, Any]  # the fields as they were checked; their lists are no one else's

    @classmethod
    @cache
    def _defaults(cls) -> dict[str, Any]:
        return {field.name: field.default for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]

    def _set_fields(self, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        defaults, name = self._defaults(), type(self).__name__
        if args:
            first = next(iter(defaults))
            raise TypeError(
                f"{name} takes no fields by position; give each by its name: {name}({first}={args[0]!r:.50})"
            )
        if not given.keys() <= defaults.keys():
            given = self._without_foreign(given)
        for field, value in given.items():
            if type(value) not in _PLAIN:
                given[field] = plain_number(value)
        self.__dict__.update(defaults)
        self.__dict__.update(given)
        self.__post_init__()

    def __post_init__(self) -> None:
        raise NotImplementedError

    def _without_foreign(self, given: dict[str, Any]) -> dict[str, Any]:
        name, defaults = type(self).__name__, self._defaults()
        foreign = {field: value for field, value in given.items() if field not in defaults}
        for field in foreign:
            if field not in self._foreign:
                raise unknown(name, field, [*defaults, *self._foreign], self._elsewhere)
        translate(name, foreign, self._foreign)
        return {field: value for field, value in given.items() if field in defaults}

    def _keep(self) -> None:
        self._kept = _copied(self.__dict__)

    def clone(self: _Fields) -> _Fields:
        """A copy, with lists of its own."""
        other = object.__new__(type(self))
        other.__dict__ = _copied(self.__dict__)
        other._kept = self._kept
        return other

    def snapshot(self: _Fields) -> _Fields:
        """What a request keeps: it is not to be changed, and does not change with this. Fields that were changed since
        they were checked are checked now."""
        kept = self._kept
        if self.__dict__ is kept:
            return self
        if self._is_changed(kept):
            init = self._defaults()
            unknown_names = [name for name in self.__dict__ if name not in kept]
            given = {name: value for name, value in self.__dict__.items() if name in init or name in unknown_names}
            checked = type(self)(**given)
            self._kept = checked._kept
            return checked.snapshot()
        snapshot = object.__new__(type(self))
        snapshot.__dict__ = snapshot._kept = kept
        return snapshot

    def _is_changed(self, kept: dict[str, Any]) -> bool:
        try:
            return self.__dict__ != kept
        except ValueError:  # an array, which has no truth value
            return True


def _copied(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value.copy() if type(value) in (list, dict) else value for name, value in fields.items()}
