"""Parsers of tool calls: Hermes and Qwen use <tool_call> tags, Llama 3 bare JSON."""

from jaxllm.server.openai.parsing.calls import CallScanner
from jaxllm.server.openai.parsing.events import Event, content, pieces
from jaxllm.text.overlap import overlap_start

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class HermesParser:
    """Content with calls in tags. Text in tags that is not a call is content, tags included."""

    def __init__(self) -> None:
        self._held = ""  # content that may be the beginning of a tag
        self._raw: list[str] = []  # text of the call, until the call has started
        self._scanner: CallScanner | None = None
        self._num_calls = 0
        self._is_closing = False  # after a call, before its closing tag

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        for piece in pieces(text):
            while piece:
                if self._scanner is not None:
                    piece = self._call(piece, events)
                elif self._is_closing:
                    piece = self._close(piece)
                else:
                    piece = self._content(piece, events)
        return events

    def _content(self, text: str, events: list[Event]) -> str:
        """Withholds whitespace, which is no content before and between calls, and what may begin a tag."""
        before, tag, rest = (self._held + text).partition(OPEN)
        shown = before[: None if tag else overlap_start(before, OPEN)].rstrip()
        events += content(shown)
        self._held = "" if tag else before[len(shown) :]
        if tag:
            self._scanner, self._raw = CallScanner(self._num_calls, ("arguments", "parameters")), [OPEN]
        return rest

    def _call(self, text: str, events: list[Event]) -> str:
        scanner = self._scanner
        call_events, used = scanner.push(text)
        events += call_events
        if not scanner.has_started:
            self._raw.append(text[:used])
        if scanner.is_broken and not scanner.has_started:
            events += content("".join(self._raw))
            self._scanner = None
        elif scanner.is_over:
            self._scanner, self._is_closing, self._num_calls = None, True, self._num_calls + 1
        return text[used:]

    def _close(self, text: str) -> str:
        """Drops the text up to the closing tag."""
        whole = self._held + text
        before, tag, rest = whole.partition(CLOSE)
        if tag:
            self._held, self._is_closing = "", False
            return rest
        if before.strip() and not CLOSE.startswith(before.strip()) and not before.strip().startswith(CLOSE):
            self._held, self._is_closing = "", False  # the model left the tag out
            return before
        self._held = before
        return ""

    def finish(self) -> list[Event]:
        scanner, self._scanner = self._scanner, None
        if scanner is not None and not scanner.has_started:
            return content("".join(self._raw))
        held, self._held = self._held, ""
        return [] if self._is_closing or self._num_calls and not held.strip() else content(held)


class LlamaParser:
    """A text that begins with calls, {"name": ..., "parameters": {...}}, separated by ; or nothing; any other text is
    content."""

    def __init__(self) -> None:
        self._held = ""
        self._raw: list[str] = []
        self._scanner: CallScanner | None = None
        self._num_calls = 0
        self._is_content = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        for piece in pieces(text):
            while piece:
                if self._is_content:
                    events += content(piece)
                    break
                piece = self._between(piece, events) if self._scanner is None else self._call(piece, events)
        return events

    def _between(self, text: str, events: list[Event]) -> str:
        whole = self._held + text
        rest = whole.lstrip("; \n\t\r" if self._num_calls else " \n\t\r").removeprefix(PYTHON_TAG).lstrip()
        if rest.startswith("{"):
            self._raw, self._held = [whole[: len(whole) - len(rest)]], ""
            self._scanner = CallScanner(self._num_calls, ("parameters", "arguments"))
            return rest
        if not rest or PYTHON_TAG.startswith(rest):
            self._held = whole
            return ""
        self._held, self._is_content = "", True
        return whole

    def _call(self, text: str, events: list[Event]) -> str:
        scanner = self._scanner
        call_events, used = scanner.push(text)
        events += call_events
        if not scanner.has_started:
            self._raw.append(text[:used])
        if scanner.is_broken and not scanner.has_started:
            self._scanner, self._is_content = None, True
            return "".join(self._raw) + text[used:]
        if scanner.is_over:
            self._scanner, self._num_calls = None, self._num_calls + 1
            self._is_content = scanner.is_broken
        return text[used:]

    def finish(self) -> list[Event]:
        scanner, self._scanner = self._scanner, None
        if scanner is not None:
            return [] if scanner.has_started else content("".join(self._raw))
        held, self._held = self._held, ""
        return [] if self._num_calls else content(held)
