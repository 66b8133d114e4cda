"""Reasoning: the text between two marks before the answer."""

from jaxllm.server.openai.parsing.events import Event, Parser, Reasoning
from jaxllm.text.overlap import overlap_start

MARKS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}  # by format


class ThinkParser:
    """Splits reasoning off and lets `inner` parse the rest. A text has reasoning if it begins with the first mark, or
    if its prompt ended with that (`is_open`)."""

    def __init__(self, inner: Parser, *, is_open: bool, marks: tuple[str, str] = MARKS["think"]):
        self._inner = inner
        self._open_mark, self._close_mark = marks
        self._state = "thinking" if is_open else "start"
        self._held = ""  # may be the beginning of a mark
        self._trims = True  # newlines around the reasoning are not part of it
        self.was_reasoning = is_open

    def push(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        if self._state == "start":
            self._begin()
        if self._state == "thinking":
            events += self._think()
        if self._state == "after":
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = "answer"
        if self._state == "answer":
            events += self._inner.push(self._held)
            self._held = ""
        return events

    def _begin(self) -> None:
        rest = self._held.lstrip()
        if rest.startswith(self._open_mark):
            self._held, self._state, self.was_reasoning = rest[len(self._open_mark) :], "thinking", True
        elif not self._open_mark.startswith(rest):
            self._state = "answer"

    def _think(self) -> list[Event]:
        if self._trims:
            self._held = self._held.lstrip("\n")
            self._trims = not self._held
        thought, close, rest = self._held.partition(self._close_mark)
        if close:
            self._held, self._state = rest, "after"
            thought = thought.rstrip("\n")
        else:
            # Withhold what may be the beginning of the mark, and the newlines before it.
            thought = thought[: overlap_start(thought, self._close_mark)].rstrip("\n")
            self._held = self._held[len(thought) :]
        return [Reasoning(thought)] if thought else []

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._state == "thinking":
            return [Reasoning(held)] if held.strip("\n") else []
        return (self._inner.push(held) if held else []) + self._inner.finish()
