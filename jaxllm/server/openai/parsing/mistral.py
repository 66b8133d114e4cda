"""Mistral's tool calls: [TOOL_CALLS] with a list of JSON objects, or with a name, [ARGS] and JSON in newer models."""

from jaxllm.server.openai.parsing.calls import CallScanner, ObjectScanner
from jaxllm.server.openai.parsing.events import Event
from jaxllm.server.openai.parsing.marked import MarkedCalls, is_name

OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MARKS = {"content": (OPEN,), "name": (ARGUMENTS, CALL_ID, "{"), "id": (ARGUMENTS,)}


class MistralParser(MarkedCalls):
    """Reads either form; which one it is shows after the mark."""

    def __init__(self) -> None:
        super().__init__()
        self._name: list[str] = []
        self._scanner = CallScanner(0, ())  # of the list's current object
        self._object = ObjectScanner()

    @property
    def _marks(self) -> tuple[str, ...]:
        return _MARKS.get(self._state, ())

    def _text(self, text: str, events: list[Event]) -> int:
        match self._state:
            case "content":
                self._content(text, events)
            case "opened":
                return self._opened(text, events)
            case "list":
                return self._between(text, events)
            case "call":
                return self._call(text, events)
            case "arguments":
                return self._pass_arguments(text, events)
            case _:
                if self._state == "name":
                    self._name.append(text)
                self._keep(text, events)
        return len(text)

    def _opened(self, text: str, events: list[Event]) -> int:
        rest = text.lstrip()
        self._keep(text[: len(text) - len(rest)], events)
        if rest:
            self._state = "list" if rest[0] in "[{" else "name"
            if rest[0] == "[":
                self._raw.append("[")
                return len(text) - len(rest) + 1
        return len(text) - len(rest)

    def _between(self, text: str, events: list[Event]) -> int:
        """Before an object of the list, or after the last."""
        rest = text.lstrip(" \t\r\n,")
        skipped = len(text) - len(rest)
        if not self._num_calls:
            self._keep(text[:skipped], events)
        if rest.startswith("{"):
            self._scanner, self._state = CallScanner(self._num_calls, ("arguments", "parameters")), "call"
        elif rest.startswith("]") and self._num_calls:
            self._state = "content"
            return skipped + 1
        elif rest:
            self._give_up(events)
        return skipped

    def _call(self, text: str, events: list[Event]) -> int:
        scanner = self._scanner
        call_events, used = scanner.push(text)
        if scanner.has_started and self._raw:
            self._raw, self._num_raw, self._space = [], 0, []
        elif not scanner.has_started:
            self._keep(text[:used], events)
        events += call_events
        if self._state != "call":  # it was too long
            return used
        if scanner.is_broken and not scanner.has_started:
            self._give_up(events)
        elif scanner.is_over:
            self._num_calls, self._state = self._num_calls + scanner.has_started, "list"
        return used

    def _pass_arguments(self, text: str, events: list[Event]) -> int:
        used = self._object.push(text)
        self._arguments(text[:used], events)
        if self._object.is_over:
            self._state = "content"
        return used

    def _mark(self, mark: str, events: list[Event]) -> None:
        if self._state == "content":
            self._name, self._state = [], "opened"
            self._raw.append(mark)
            return
        self._raw.append(mark)
        name = "".join(self._name).strip()
        if mark == CALL_ID:
            self._state = "id"
        elif not is_name(name):
            self._give_up(events)
        else:
            self._start(name, events)
            self._state, self._object = "arguments", ObjectScanner()
            if mark == "{":
                self._object.push(mark)
                self._arguments(mark, events)
