"""Scans one tool call in JSON, {"name": ..., "arguments": {...}}, character by character, in linear time."""

import enum
import json
from collections.abc import Sequence

from jaxllm.server.openai.parsing.events import CallArguments, CallStart, Event

MAX_HELD_CHARS = 1 << 16  # before the name is known
_SPACE = " \t\r\n"


class ScanState(enum.Enum):
    START = enum.auto()  # before the {
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()  # before the value's first character
    INSIDE = enum.auto()  # the value
    NEXT = enum.auto()  # after a value: a comma, or the end
    END = enum.auto()
    BROKEN = enum.auto()


class CallScanner:
    """Emits a call's start once its name is known, then its arguments as they arrive. `is_broken`: not a call."""

    def __init__(self, index: int, argument_keys: Sequence[str]):
        self.index, self._argument_keys = index, argument_keys
        self.state = ScanState.START
        self.name: str | None = None
        self._key = ""
        self._token: list[str] = []  # characters of the current string or value
        self._depth, self._in_string, self._escaped = 0, False, False
        self._arguments: list[str] = []  # not emitted yet, for example because the name comes later
        self._has_arguments = False
        self._num_held = 0

    @property
    def is_over(self) -> bool:
        return self.state in (ScanState.END, ScanState.BROKEN)

    @property
    def is_broken(self) -> bool:
        return self.state is ScanState.BROKEN

    @property
    def has_started(self) -> bool:
        """Whether the call's start was emitted, so that it cannot be taken back."""
        return self.name is not None

    def push(self, text: str) -> tuple[list[Event], int]:
        """The events of `text`, and how many of its characters belong to the call."""
        events: list[Event] = []
        used = 0
        for char in text:
            if self.is_over:
                break
            used += 1
            self._step(char, events)
        events += self._flush()
        return events, used

    def _step(self, char: str, events: list[Event]) -> None:
        if self.name is None:
            self._num_held += 1
            if self._num_held > MAX_HELD_CHARS:
                self.state = ScanState.BROKEN
                return
        match self.state:
            case ScanState.START | ScanState.COLON | ScanState.NEXT:
                self._between(char)
            case ScanState.KEY:
                self._in_key(char)
            case ScanState.VALUE:
                if char not in _SPACE:
                    self._token, self._depth = [], 0
                    self.state = ScanState.INSIDE
                    self._in_value(char, events)
            case ScanState.INSIDE:
                self._in_value(char, events)

    def _between(self, char: str) -> None:
        if char in _SPACE:
            return
        expected = {
            (ScanState.START, "{"): ScanState.KEY,
            (ScanState.COLON, ":"): ScanState.VALUE,
            (ScanState.NEXT, ","): ScanState.KEY,
            (ScanState.NEXT, "}"): ScanState.END,
        }
        self.state = expected.get((self.state, char), ScanState.BROKEN)
        if self.state is ScanState.END and self.name is None:
            self.state = ScanState.BROKEN
        self._token = []

    def _in_key(self, char: str) -> None:
        if not self._in_string:
            if char == '"':
                self._in_string, self._token = True, [char]
            elif char not in _SPACE:
                self.state = ScanState.BROKEN
            return
        self._token.append(char)
        if self._string_ends(char):
            self._key = _loads("".join(self._token))
            self.state = ScanState.COLON if isinstance(self._key, str) else ScanState.BROKEN

    def _string_ends(self, char: str) -> bool:
        """Advances inside a string; returns whether `char` closes it."""
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            return True
        return False

    def _in_value(self, char: str, events: list[Event]) -> None:
        if self._in_string:
            self._keep(char)
            if self._string_ends(char) and self._depth == 0:
                self._end_value(events)
        elif char == '"':
            self._in_string = True
            self._keep(char)
        elif char in "{[":
            self._depth += 1
            self._keep(char)
        elif char in "}]" and self._depth:
            self._depth -= 1
            self._keep(char)
            if self._depth == 0:
                self._end_value(events)
        elif self._depth == 0 and char in ",}":  # the end of a number, true, false or null
            self._end_value(events)
            if self.state is not ScanState.BROKEN:
                self._between(char)
        else:
            self._keep(char)

    def _keep(self, char: str) -> None:
        self._token.append(char)
        if self._is_arguments and self._token[0] == "{":
            self._arguments.append(char)

    @property
    def _is_arguments(self) -> bool:
        return self._key in self._argument_keys

    def _end_value(self, events: list[Event]) -> None:
        self.state = ScanState.NEXT
        if self._key == "name":
            name = _loads("".join(self._token))
            if not isinstance(name, str) or not name or self.name is not None:
                self.state = ScanState.BROKEN
                return
            self.name = name
            events.append(CallStart(self.index, name))
        elif self._is_arguments:
            self._has_arguments = True
            if self._token[0] == '"':  # JSON in a string
                inner = _loads("".join(self._token))
                self._arguments.append(inner if isinstance(inner, str) else "{}")
            elif self._token[0] != "{":
                self._arguments.append("{}" if "".join(self._token).strip() == "null" else "".join(self._token))

    def _flush(self) -> list[Event]:
        if self.name is None:
            return []
        if self.state is ScanState.END and not self._has_arguments:
            self._has_arguments = True
            self._arguments.append("{}")
        text, self._arguments = "".join(self._arguments), []
        return [CallArguments(self.index, text)] if text else []


class ObjectScanner:
    """Finds the end of a JSON object that is passed on as it is."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False
        self.is_over = False

    def push(self, text: str) -> int:
        """How many characters of `text` belong to the object."""
        for i, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = self._in_string
            elif char == '"':
                self._in_string = not self._in_string
            elif not self._in_string and char in "{[":
                self._depth += 1
            elif not self._in_string and char in "]}":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_over = True
                    return i + 1
        return len(text)


def _loads(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
