"""What parsers of a model's text tell, in the order in which it comes."""

from typing import NamedTuple, Protocol, runtime_checkable


class Reasoning(NamedTuple):
    text: str


class Content(NamedTuple):
    text: str


class CallStart(NamedTuple):
    index: int
    name: str


class CallArguments(NamedTuple):
    index: int
    text: str  # a part of the JSON


Event = Reasoning | Content | CallStart | CallArguments


@runtime_checkable
class Parser(Protocol):
    """Takes a text in parts of any size; what it tells does not depend on where they end, but for how it is cut."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """No more text comes: what was withheld is told."""


class Plain:
    """A parser for text that is nothing but content."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []
