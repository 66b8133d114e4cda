"""Reads messages from standard input: lines with editing and history in a terminal, plain lines from a pipe."""

import contextlib
import logging
import os
import sys
from pathlib import Path

from jaxllm.cli.texts import as_utf8

log = logging.getLogger(__name__)

PROMPT, MORE = ">>> ", "... "
_QUOTES = '"""'
_MAX_LINES = 1000  # of the history


class GivenLine:
    """One message, in the place of `LineInput`."""

    is_terminal = has_colours = False

    def __init__(self, text: str):
        self._texts = [text]

    def __enter__(self) -> "GivenLine":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self) -> str | None:
        return self._texts.pop() if self._texts else None


class LineInput:
    """Reads lines. As a context manager it loads and saves the history of conversations."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
        self.has_colours = self.is_terminal and not os.environ.get("NO_COLOR")
        self._history: Path | None = None

    def __enter__(self) -> "LineInput":
        if self.is_terminal:
            with contextlib.suppress(ImportError):  # a Python without readline has no editing
                self._open_history()
        return self

    def __exit__(self, *_: object) -> None:
        if self._history is not None:
            import readline

            try:
                readline.set_history_length(_MAX_LINES)
                readline.write_history_file(self._history)
            except OSError as error:
                log.warning("the chat history could not be saved: %s", error)

    def _open_history(self) -> None:
        import readline

        base = Path(os.environ.get("XDG_STATE_HOME", ""))
        try:
            folder = (base if base.is_absolute() else Path.home() / ".local" / "state") / "jaxllm"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = folder / "chat_history"
            file.touch(mode=0o600)
            readline.read_history_file(file)
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
            log.warning("the chat history could not be read: %s", error)
        else:
            self._history = file

    def read(self) -> str | None:
        """The next message, which may have several lines between triple quotes; None at the end. Raises `ValueError`
        for input that is not UTF-8."""
        line = self._line(PROMPT)
        if line is None or not line.lstrip().startswith(_QUOTES):
            return line
        text = line.lstrip()[len(_QUOTES) :]
        while _QUOTES not in text:
            more = self._line(MORE)
            if more is None:
                break
            text += "\n" + more
        return text.partition(_QUOTES)[0].strip("\n")

    def _line(self, prompt: str) -> str | None:
        if self.is_terminal:
            try:
                return as_utf8(input(prompt))
            except EOFError:
                print()
                return None
        line = "" if sys.stdin is None else sys.stdin.readline()
        return as_utf8(line.removesuffix("\n")) if line else None
