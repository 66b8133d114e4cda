"""Rewrites Python's literals as JSON, character by character, in linear time."""

import json
import math
import re

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_CODES = {"x": 2, "u": 4, "U": 8}  # hexadecimal digits after \x, \u and \U
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSING = {"[": "]", "(": "]", "{": "}"}
_ENDS = {"]": "[", ")": "(", "}": "{"}
_WORD = re.compile(r"[\w.+-]")
MAX_WORD_CHARS = 4096  # of a number
MAX_INT_DIGITS = 1000


class LiteralWriter:
    """Takes the characters of one literal. After a depth of 0 is reached again, `is_over`; a number or a word is over
    at the first character that is none of its own, which is not taken."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._quote = ""
        self._escape: str | None = None  # what follows a backslash, so far
        self._word: list[str] = []
        self._has_comma = False  # one that is not written yet: it may be the last before a bracket
        self._is_key = False
        self._last = ""
        self.is_over = self.is_broken = False

    def take(self, char: str) -> str | None:
        """The JSON that `char` completes; None: the literal ended before it."""
        if self._quote:
            return self._in_string(char)
        if self._word and not _WORD.match(char):
            return self._end_word(char)
        if char.isspace():
            return ""
        if char in "'\"":
            self._quote = char
            return self._comma() + '"'
        if char in "[({":
            written = self._comma() + {"[": "[", "(": "[", "{": "{"}[char]
            self._stack.append(char)
            self._is_key = char == "{"
            return written
        if char in _ENDS or char in ",:":
            return self._punctuation(char)
        if _WORD.match(char):
            self._word.append(char)
            self.is_broken = len(self._word) > MAX_WORD_CHARS
            return ""
        self.is_broken = True
        return ""

    def _comma(self) -> str:
        had, self._has_comma = self._has_comma, False
        return ", " if had else ""

    def _in_string(self, char: str) -> str:
        if self._escape is not None:
            return self._in_escape(char)
        if char == "\\":
            self._escape = ""
            return ""
        if char == self._quote:
            self._quote = ""
            self.is_over = not self._stack
            return '"'
        return json.dumps(char, ensure_ascii=False)[1:-1]

    def _in_escape(self, char: str) -> str:
        assert self._escape is not None
        self._escape += char
        kind, digits = self._escape[0], self._escape[1:]
        if kind in _CODES and all(digit in "0123456789abcdefABCDEF" for digit in digits):
            if len(digits) < _CODES[kind]:
                return ""
            code = int(digits, 16)
            self._escape = None
            return json.dumps(chr(code) if code < 0x110000 else "\ufffd")[1:-1]
        whole, self._escape = self._escape, None
        if whole == "\n":  # a line that goes on
            return ""
        text = _ESCAPES.get(whole, whole if whole in "\\'\"" else f"\\{whole}")
        return json.dumps(text, ensure_ascii=False)[1:-1]

    def _end_word(self, char: str) -> str | None:
        word, self._word = "".join(self._word), []
        written = self._comma() + _scalar(word, as_key=self._is_key)
        if not self._stack:
            self.is_over = True
            self._last = written
            return None
        return written + (self.take(char) or "")

    def last(self) -> str:
        """The JSON of a word that `take` ended."""
        return self._last

    def _punctuation(self, char: str) -> str | None:
        if not self._stack:
            self.is_broken = True
            return ""
        if char == ",":
            self._has_comma, self._is_key = True, self._stack[-1] == "{"
            return ""
        if char == ":":
            self._is_key = False
            return ": "
        if _ENDS[char] != self._stack.pop():
            self.is_broken = True
            return ""
        self._has_comma, self._is_key = False, False
        self.is_over = not self._stack
        return "}" if char == "}" else "]"


def _scalar(word: str, *, as_key: bool) -> str:
    """A number or a constant in JSON; anything else as a string. Keys of JSON are strings."""
    known = _WORDS.get(word) or _number(word)
    if known is None or as_key:
        return json.dumps(word)
    return known


def _number(word: str) -> str | None:
    digits = word.lstrip("+-")
    if digits.isascii() and digits.isdecimal() and len(digits) < MAX_INT_DIGITS:
        is_padded = digits[0] == "0" and len(digits) > 1  # no number in Python
        return None if is_padded or len(word) - len(digits) > 1 else str(int(word))
    try:
        value = float(word)
    except ValueError:
        return None
    return json.dumps(value) if math.isfinite(value) else None


def as_json(text: str) -> str | None:
    """A whole literal in JSON; None if it is none."""
    writer, parts = LiteralWriter(), []
    for char in text.strip() + "\n":
        if writer.is_over:
            return "".join(parts) if char == "\n" else None
        written = writer.take(char)
        if writer.is_broken:
            return None
        if written is None:
            return writer.last() if char == "\n" else None
        parts.append(written)
    return "".join(parts) if writer.is_over else None
