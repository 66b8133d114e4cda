"""The events that parsers of a model's text emit, in text order."""

from collections.abc import Iterator
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


_PIECE_CHARS = 4096


def pieces(text: str) -> Iterator[str]:
    """`text` in parts so small that a parser may copy the rest of one for each call in it."""
    for start in range(0, len(text), _PIECE_CHARS):
        yield text[start : start + _PIECE_CHARS]


def content(text: str) -> list[Event]:
    return [Content(text)] if text else []
