"""DeepSeek's tool calls, V3's (R1's too) and V3.1's. A call is function<sep>NAME with a fenced block of JSON in V3, and
NAME<sep>JSON in V3.1."""

from jaxllm.server.openai.parsing.events import Event
from jaxllm.server.openai.parsing.marked import MarkedCalls, is_name

CALLS_OPEN, CALLS_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, SEPARATOR, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_CLOSE = "\n```json\n", "\n```"
_MARKS = {
    "content": (CALLS_OPEN, OPEN),
    "between": (OPEN, CALLS_CLOSE),
    "type": (SEPARATOR, CLOSE, CALLS_CLOSE),
    "separated": (),
    "name": (FENCE, CLOSE, CALLS_CLOSE),
    "arguments": (FENCE_CLOSE + CLOSE, CLOSE, CALLS_CLOSE),
}
_NEXT = {
    ("content", CALLS_OPEN): "between",
    ("content", OPEN): "type",
    ("between", OPEN): "type",
    ("type", SEPARATOR): "separated",
    ("arguments", FENCE_CLOSE + CLOSE): "between",
    ("arguments", CLOSE): "between",
    ("arguments", CALLS_CLOSE): "content",
}


class DeepSeekParser(MarkedCalls):
    """Reads either form."""

    def __init__(self) -> None:
        super().__init__()
        self._word: list[str] = []  # before the separator, or the name

    @property
    def _marks(self) -> tuple[str, ...]:
        return _MARKS[self._state]

    def _text(self, text: str, events: list[Event]) -> int:
        match self._state:
            case "content":
                self._content(text, events)
            case "arguments":
                self._arguments(text, events)
            case "between" if text.strip():
                self._raw.append(text)
                self._give_up(events)
            case "between":
                self._keep(text, events)
            case "separated":
                return self._after_separator(text, events)
            case _:
                self._word.append(text)
                self._keep(text, events)
        return len(text)

    def _after_separator(self, text: str, events: list[Event]) -> int:
        """V3.1 has the arguments here, V3 the name."""
        rest = text.lstrip()
        if not rest:
            self._keep(text, events)
        elif rest.startswith("{"):
            self._named("".join(self._word), events)
        else:
            self._word, self._state = [], "name"
        return len(text) - len(rest)

    def _named(self, name: str, events: list[Event]) -> None:
        if is_name(name.strip()):
            self._start(name.strip(), events)
            self._state = "arguments"
        else:
            self._give_up(events)

    def _mark(self, mark: str, events: list[Event]) -> None:
        state = self._state
        if state != "arguments":
            self._raw.append(mark)
        if mark == OPEN:
            self._word = []
        if state == "name" and mark == FENCE:
            self._named("".join(self._word), events)
        elif state == "between" and mark == CALLS_CLOSE and self._num_calls:
            self._raw, self._state = [], "content"
        elif (state, mark) in _NEXT:
            self._state = _NEXT[state, mark]
        else:
            self._give_up(events)

    def _cut(self, rest: str, events: list[Event]) -> None:
        if self._state == "arguments":
            self._arguments(rest, events)
