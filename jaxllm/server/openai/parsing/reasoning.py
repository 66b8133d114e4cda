"""Reasoning: the text between <think> and </think> before the answer."""

from jaxllm.server.openai.parsing.events import Event, Parser, Reasoning
from jaxllm.text.overlap import overlap_start

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser:
    """Splits reasoning off and lets `inner` parse the rest. A text has reasoning if it begins with <think>, or if its
    prompt ended with <think> (`is_open`)."""

    def __init__(self, inner: Parser, *, is_open: bool):
        self._inner = inner
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
        if rest.startswith(OPEN):
            self._held, self._state, self.was_reasoning = rest[len(OPEN) :], "thinking", True
        elif not OPEN.startswith(rest):
            self._state = "answer"

    def _think(self) -> list[Event]:
        if self._trims:
            self._held = self._held.lstrip("\n")
            self._trims = not self._held
        thought, close, rest = self._held.partition(CLOSE)
        if close:
            self._held, self._state = rest, "after"
            thought = thought.rstrip("\n")
        else:
            # Withhold what may be the beginning of the mark, and the newlines before it.
            thought = thought[: overlap_start(thought, CLOSE)].rstrip("\n")
            self._held = self._held[len(thought) :]
        return [Reasoning(thought)] if thought else []

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._state == "thinking":
            return [Reasoning(held)] if held.strip("\n") else []
        return (self._inner.push(held) if held else []) + self._inner.finish()
