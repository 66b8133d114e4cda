"""Tool calls in Python's syntax, [f(a=1), g(b="x")], which Llama 3.2, Llama 4 and others write."""

import json

from jaxllm.server.openai.parsing.events import Event
from jaxllm.server.openai.parsing.literals import LiteralWriter
from jaxllm.server.openai.parsing.marked import MarkedCalls

START, END = "<|python_start|>", "<|python_end|>"  # around the list, in Llama 4
_SPACE = " \t\r\n"
MAX_NAME_CHARS = 256


class PythonicParser(MarkedCalls):
    """A text that begins with a list of calls; any other text is content."""

    def __init__(self) -> None:
        super().__init__()
        self._state = "start"
        self._word = ""  # a name, so far
        self._name = ""  # of the current call
        self._is_open = False  # the call has started and not ended
        self._num_arguments = 0
        self._writer = LiteralWriter()
        self._json: list[str] = []  # arguments that are not emitted yet

    @property
    def _marks(self) -> tuple[str, ...]:
        return {"start": (START, "["), "end": (END,)}.get(self._state, ())

    def _mark(self, mark: str, events: list[Event]) -> None:
        if self._state == "start":
            self._raw.append(mark)
        if mark == "[":
            self._state = "name"

    def _text(self, text: str, events: list[Event]) -> int:
        if self._state == "start":
            self._keep(text, events)
            if text.strip() and self._state == "start":
                self._give_up(events)
            return len(text)
        if self._state in ("content", "end"):
            self._content(text, events)
            return len(text)
        used = 0
        while used < len(text) and self._state in ("name", "key", "value"):
            self._step(text[used], events)
            used += 1
        self._flush(events)
        return used

    def _step(self, char: str, events: list[Event]) -> None:
        if not self._is_open:
            self._keep(char, events)
        if self._state == "value":
            self._in_value(char, events)
        elif self._state == "key":
            self._in_key(char, events)
        elif self._state == "name":
            self._in_name(char, events)

    def _in_name(self, char: str, events: list[Event]) -> None:
        word = self._word
        if len(word) < MAX_NAME_CHARS and (char.isalnum() or char in "_."):
            self._word += char
        elif char == "(" and all(part.isidentifier() for part in word.split(".")):
            self._name, self._word, self._state = word, "", "key"
        elif char == "]" and self._num_calls and not word:
            self._raw, self._num_raw, self._state = [], 0, "end"
        elif char not in _SPACE + "," or word:
            self._word = ""
            self._give_up(events)

    def _in_key(self, char: str, events: list[Event]) -> None:
        word = self._word
        if len(word) < MAX_NAME_CHARS and (char.isalnum() or char == "_"):
            self._word += char
        elif char == "=" and word.isidentifier():
            self._open(events)
            self._json.append(f"{', ' if self._num_arguments else ''}{json.dumps(word)}: ")
            self._num_arguments += 1
            self._word, self._writer, self._state = "", LiteralWriter(), "value"
        elif char == ")" and not word:
            self._open(events)
            self._json.append("}")
            self._flush(events)
            self._is_open, self._state = False, "name"
        elif char not in _SPACE and (char != "," or word or not self._is_open):
            self._break(char, events)

    def _in_value(self, char: str, events: list[Event]) -> None:
        written = self._writer.take(char)
        if self._writer.is_broken:
            self._break(char, events)
            return
        self._json.append(self._writer.last() if written is None else written)
        if self._writer.is_over:
            self._state = "key"
            if written is None:
                self._in_key(char, events)

    def _open(self, events: list[Event]) -> None:
        if not self._is_open:
            self._start(self._name, events)
            self._json, self._num_arguments, self._is_open = ["{"], 0, True

    def _break(self, char: str, events: list[Event]) -> None:
        """It is no Python: what follows is content."""
        if not self._is_open:
            self._give_up(events)
            return
        self._flush(events)
        self._is_open, self._state = False, "content"
        self._content(char, events)

    def _flush(self, events: list[Event]) -> None:
        text, self._json = "".join(self._json), []
        self._arguments(text, events)
