"""Reads texts that marks divide, such as special tokens written out: what parsers of tool calls have in common."""

import re
from functools import lru_cache

from jaxllm.server.openai.parsing.calls import MAX_HELD_CHARS
from jaxllm.server.openai.parsing.events import CallArguments, CallStart, Event, content, pieces
from jaxllm.text.overlap import overlap_start


class MarkedText:
    """Splits a text at the marks of the current state, wherever its parts are cut. In a state without marks `_text`
    takes as much of the text as belongs to it; in others all of it."""

    def __init__(self) -> None:
        self._rest = ""  # may be the beginning of a mark

    @property
    def _marks(self) -> tuple[str, ...]:
        """The marks that end the current state."""
        raise NotImplementedError

    def _text(self, text: str, events: list[Event]) -> int:
        """Takes text of the current state; returns how many characters it used."""
        raise NotImplementedError

    def _mark(self, mark: str, events: list[Event]) -> None:
        """Goes to the next state."""
        raise NotImplementedError

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        for piece in pieces(text):
            self._push(piece, events)
        return events

    def _push(self, text: str, events: list[Event]) -> None:
        text, at = self._rest + text, 0
        while at < len(text):
            marks = self._marks
            found = _pattern(marks).search(text, at) if marks else None
            end = found.start() if found else _safe_end(text, at, marks)
            if at < end:
                at += self._text(text[at:end], events)
            elif found:
                at = found.end()
                self._mark(found[0], events)
            else:
                break
        self._rest = text[at:]


@lru_cache(maxsize=256)
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


def _safe_end(text: str, at: int, marks: tuple[str, ...]) -> int:
    """The end of what can't be the beginning of a mark."""
    start = max(at, len(text) - max(map(len, marks), default=0))
    tail = text[start:]
    return start + min((overlap_start(tail, mark) for mark in marks), default=len(tail))


class MarkedCalls(MarkedText):
    """Content with tool calls. Text that turns out to be no call is content, marks included."""

    def __init__(self) -> None:
        super().__init__()
        self._state = "content"
        self._space: list[str] = []  # whitespace, which is no content before and between calls
        self._raw: list[str] = []  # text since the last content, until a call has started
        self._num_raw = self._num_calls = 0

    def _content(self, text: str, events: list[Event]) -> None:
        shown = text.rstrip()
        if shown:
            events += content("".join(self._space) + shown)
            self._space = []
        self._space.append(text[len(shown) :])

    def _keep(self, text: str, events: list[Event]) -> None:
        """Keeps text of what may be a call; too much of it is none."""
        self._raw.append(text)
        self._num_raw += len(text)
        if self._num_raw > MAX_HELD_CHARS:
            self._give_up(events)

    def _give_up(self, events: list[Event]) -> None:
        """It is no call."""
        raw, self._raw, self._num_raw, self._state = "".join(self._raw), [], 0, "content"
        self._content(raw, events)

    def _start(self, name: str, events: list[Event]) -> None:
        self._raw, self._num_raw, self._space = [], 0, []
        self._num_calls += 1
        events.append(CallStart(self._num_calls - 1, name))

    def _arguments(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(CallArguments(self._num_calls - 1, text))

    def finish(self) -> list[Event]:
        events: list[Event] = []
        rest, self._rest = self._rest, ""
        if self._raw or self._state == "content" or not self._num_calls:
            self._raw.append(rest)
            self._give_up(events)
            if not self._num_calls:
                events += content("".join(self._space))
        else:
            self._cut(rest, events)
        self._space = []
        return events

    def _cut(self, rest: str, events: list[Event]) -> None:
        """The text ended within a call. `rest` may have become a mark."""


def is_name(text: str) -> bool:
    """Whether a function may be called so."""
    return bool(text) and len(text) <= 256 and not any(char.isspace() or char in '"{}[]<>|' for char in text)
