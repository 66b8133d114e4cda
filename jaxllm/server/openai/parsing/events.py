"""The events that parsers of a model's text emit, in text order."""

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
    """Takes a text in parts of any size. Where parts end changes only how events are split, not what they contain."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """Ends the text: emits what was withheld."""


class Plain:
    """A parser for text that is content only."""

    def push(self, text: str) -> list[Event]:
        return content(text)

    def finish(self) -> list[Event]:
        return []


def content(text: str) -> list[Event]:
    return [Content(text)] if text else []
