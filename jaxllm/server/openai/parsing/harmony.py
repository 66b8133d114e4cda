"""gpt-oss's messages: <|channel|>analysis is reasoning, commentary to=functions.NAME a call, and the rest content."""

import re

from jaxllm.server.openai.parsing.calls import MAX_HELD_CHARS
from jaxllm.server.openai.parsing.events import CallArguments, CallStart, Content, Event, Reasoning, content
from jaxllm.server.openai.parsing.marked import MarkedText

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ROLE, TOOLS = "assistant", "functions."
_ENDS = (END, CALL, RETURN, START)
_MARKS = {"head": (MESSAGE, *_ENDS), "body": _ENDS, "between": _ENDS, "plain": ()}
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_HEADS = (CHANNEL, "to=", CONSTRAIN)  # what a head begins with, after the role
_SURE_CHARS = 32  # of a head, after which it is one


class HarmonyParser(MarkedText):
    """`prompt` ends within the first message's head, as templates leave it, or further on. Without `has_tools` a
    call is content."""

    def __init__(self, prompt: str, *, has_tools: bool):
        super().__init__()
        self._has_tools = has_tools
        self._state, self._head, self._num_head = "head", [], 0
        self._kind = "final"
        self._separator = ""  # before the next text of its kind
        self._shown: set[str] = set()  # kinds of which there is text
        self._num_calls = 0
        begun = prompt.rfind(START)
        if begun >= 0:
            self.push(prompt[begun:])
            self._shown, self._separator = set(), ""

    @property
    def _marks(self) -> tuple[str, ...]:
        return _MARKS[self._state]

    def _text(self, text: str, events: list[Event]) -> int:
        if self._state == "head":
            self._in_head(text, events)
        elif self._state == "between" and not text.strip():
            pass
        else:
            if self._state == "between":
                self._begin("final", events)
            self._tell(text, events)
        return len(text)

    def _in_head(self, text: str, events: list[Event]) -> None:
        is_open = self._num_head <= _SURE_CHARS
        self._head.append(text)
        self._num_head += len(text)
        if self._num_head > MAX_HELD_CHARS or is_open and not self._may_be_head():
            text = "".join(self._head).removeprefix(ROLE)
            self._begin("final", events)
            self._tell(text, events)

    def _may_be_head(self) -> bool:
        head = "".join(self._head)
        rest = head.removeprefix(ROLE).lstrip()
        return ROLE.startswith(head) or any(rest.startswith(one) or one.startswith(rest) for one in _HEADS)

    def _mark(self, mark: str, events: list[Event]) -> None:
        if mark == START:
            self._state, self._head, self._num_head = "head", [], 0
        elif mark == MESSAGE:
            self._begin(_kind("".join(self._head)), events)
        else:
            self._state = "between"

    def _begin(self, kind: str, events: list[Event]) -> None:
        """Begins a message's text."""
        self._state, self._head, self._kind = "body", [], kind
        if kind.startswith(TOOLS) and self._has_tools:
            events.append(CallStart(self._num_calls, kind.removeprefix(TOOLS)))
            self._num_calls += 1
        shown = "thought" if kind == "analysis" else "content"
        self._separator = "\n" if shown in self._shown else ""

    def _tell(self, text: str, events: list[Event]) -> None:
        if self._kind.startswith(TOOLS) and self._has_tools:
            events.append(CallArguments(self._num_calls - 1, text))
            return
        text, self._separator = self._separator + text, ""
        is_thought = self._kind == "analysis"
        self._shown.add("thought" if is_thought else "content")
        events.append(Reasoning(text) if is_thought else Content(text))

    def finish(self) -> list[Event]:
        events: list[Event] = []
        rest, self._rest = self._rest, ""
        if rest and self._state == "body":
            self._tell(rest, events)
        elif self._state == "between":
            events += content(rest)
        return events


def _kind(head: str) -> str:
    """Of a message with this head: its recipient if that is a function, else analysis or final."""
    recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
    if recipient is not None:
        is_function = recipient[1].startswith(TOOLS) and len(recipient[1]) > len(TOOLS)
        return recipient[1] if is_function else "analysis"
    return "analysis" if channel is not None and channel[1] == "analysis" else "final"
