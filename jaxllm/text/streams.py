"""Incremental decoding: token ids in, settled text out, at constant cost per token.

Text is settled when no later token can change it. An incomplete UTF-8 character is not settled, and neither is a run
of byte tokens (`<0xE2>`): decoders replace every byte of a run if any part of it is not UTF-8.
"""

import codecs
import copy
import re
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, runtime_checkable

import tokenizers

REPLACEMENT = "\ufffd"
# Bounds delay and work when a model writes only byte tokens. A longer run is settled in parts, so that an
# invalid byte spoils its own part only.
MAX_HELD_TOKENS = 64
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTEXT_TOKENS = 8
_CHARACTER_BYTES = 4  # at most


@runtime_checkable
class TextStream(Protocol):
    """Decodes one completion. The joined text equals `decode` of all ids."""

    def push(self, token: int) -> str:
        """Takes the next token; returns the text that it settles."""
        ...

    @property
    def held(self) -> str:
        """Whole characters that the pending tokens decode to and that a later token may still change."""
        ...

    def flush(self) -> str:
        """The rest of the text, when no token follows."""
        ...

    def end(self) -> str:
        """As `flush`, without a character at the end whose bytes are not all there."""
        ...

    def clone(self) -> "TextStream":
        """An independent copy, for a completion with the same beginning."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes in byte-level vocabularies: printable bytes stand for themselves."""
    printable = [byte for first, last in ("!~", "¡¬", "®ÿ") for byte in range(ord(first), ord(last) + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


class ByteTable(dict[int, bytes]):
    """Token id -> its bytes in a byte-level vocabulary; filled on first use of a token."""

    def __init__(self, backend: tokenizers.Tokenizer, skipped: Collection[str]):
        super().__init__()
        self._backend, self._skipped = backend, skipped

    def __missing__(self, token: int) -> bytes:
        text = self._backend.id_to_token(token)
        if text is None or text in self._skipped:
            value = b""
        elif all(char in _BYTES for char in text):
            value = bytes(_BYTES[char] for char in text)
        else:  # an added token, which is stored as plain text
            value = text.encode()
        self[token] = value
        return value


class ByteStream:
    """For byte-level decoders, which join the tokens' bytes and decode them as UTF-8."""

    held = ""

    def __init__(self, table: ByteTable):
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._table[token])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def end(self) -> str:
        return ""  # what waits is a part of a character

    def clone(self) -> "ByteStream":
        other = ByteStream(self._table)
        other._decoder.setstate(self._decoder.getstate())
        return other


class PieceTable(dict[int, str | int | None]):
    """Token id -> its text inside a sentence, its byte, or None for no text; filled on first use of a token.

    `anchor` is any token with visible text: a token adds the same text after it as after any other.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped: Collection[str], anchor: int, has_bytes: bool):
        super().__init__()
        self._backend, self._skipped, self._has_bytes = backend, skipped, has_bytes
        self._anchor, self._anchor_len = anchor, len(backend.decode([anchor], skip_special_tokens=False))

    def __missing__(self, token: int) -> str | int | None:
        name = self._backend.id_to_token(token)
        value: str | int | None
        if name is None or name in self._skipped:
            value = None
        elif self._has_bytes and (match := _BYTE_TOKEN.fullmatch(name)):
            value = int(match[1], 16)
        else:
            value = self.text([token], first=False)
        self[token] = value
        return value

    def text(self, tokens: list[int], *, first: bool) -> str:
        """What `tokens` decode to at the start of a text, where spaces are stripped, or inside one."""
        if first:
            return self._backend.decode(tokens, skip_special_tokens=False)
        return self._backend.decode([self._anchor, *tokens], skip_special_tokens=False)[self._anchor_len :]


class PieceStream:
    """For decoders that decode each token by itself, except the first token and runs of byte tokens."""

    def __init__(self, table: PieceTable, prompt_token_ids: Sequence[int]):
        self._table = table
        self._first = all(table[token] is None for token in prompt_token_ids)
        self._run: list[int] = []  # byte tokens that are UTF-8 so far
        self._run_is_broken = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")

    def push(self, token: int) -> str:
        piece = self._table[token]
        if piece is None:
            return ""
        if isinstance(piece, int):
            return self._push_byte(token, piece)
        text = self.flush() if self._run else ""
        self._run_is_broken = False
        if self._first:
            self._first = False
            return self._table.text([token], first=True)
        return text + piece

    def _push_byte(self, token: int, byte: int) -> str:
        if self._run_is_broken:
            return REPLACEMENT
        self._run.append(token)
        try:
            self._decoder.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self._run_is_broken = True
            return self.flush()
        return self.flush() if len(self._run) >= MAX_HELD_TOKENS and not self._is_mid_character else ""

    @property
    def _is_mid_character(self) -> bool:
        return bool(self._decoder.getstate()[0])

    @property
    def held(self) -> str:
        if not self._run or self._is_mid_character:
            return ""
        return self._table.text(self._run, first=self._first)

    def flush(self) -> str:
        if not self._run:
            return ""
        text = self._table.text(self._run, first=self._first)
        self._first, self._run = False, []
        self._decoder.reset()
        return text

    def end(self) -> str:
        num_open = len(self._decoder.getstate()[0])  # bytes, and as many tokens
        if num_open:
            del self._run[-num_open:]
        return self.flush()

    def clone(self) -> "PieceStream":
        other = copy.copy(self)
        other._run = list(self._run)
        other._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        other._decoder.setstate(self._decoder.getstate())
        return other


class WindowStream:
    """For unknown decoders: decodes new tokens after those of the text before.

    Correct for any decoder that looks only at neighbours and writes U+FFFD for an incomplete character.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int]):
        self._decode = decode
        self._context = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._context_len = len(decode(self._context)) if self._context else 0  # characters
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        self._pending.append(token)
        text = self._pending_text()
        if (not text or text.endswith(REPLACEMENT)) and len(self._pending) < MAX_HELD_TOKENS:
            return ""
        return self._settle(text)

    @property
    def held(self) -> str:
        return self._pending_text().rstrip(REPLACEMENT)

    def flush(self) -> str:
        return self._settle(self._pending_text())

    def end(self) -> str:
        is_open = len(self._pending) < _CHARACTER_BYTES  # or its bytes are no character's
        return self._settle(self.held if is_open else self._pending_text())

    def clone(self) -> "WindowStream":
        other = copy.copy(self)
        other._pending = list(self._pending)
        return other

    def _pending_text(self) -> str:
        return self._decode(self._context + self._pending)[self._context_len :] if self._pending else ""

    def _settle(self, text: str) -> str:
        if text:  # tokens without text, such as special tokens, are no context for the next
            self._context = self._pending
            self._context_len = len(self._decode(self._context))
        self._pending = []
        return text
