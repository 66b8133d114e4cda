"""What one token adds to a text, when the tokens before it are known: of a character in several tokens, all is the last
one's."""

import codecs
from collections.abc import Callable, Sequence

from jaxllm.text.streams import REPLACEMENT, ByteTable, PieceTable

MOST_BEFORE = 4  # tokens; a character has at most four bytes


def text_after(
    token: int, before: Sequence[int], table: ByteTable | PieceTable | None, decode: Callable[[list[int]], str]
) -> str:
    """The text of `token` inside a text, after the tokens `before`: empty while a character is incomplete. `table` says
    what each token decodes to, if it does so by itself; `decode` is for others."""
    near = list(before[-MOST_BEFORE:])
    if table is None:
        return _decoded_after(token, near, decode)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    for one in (*near, token):
        piece = table[one]
        if isinstance(piece, int):
            piece = bytes((piece,))
        if isinstance(piece, str):
            decoder.reset()
            text = piece
        else:
            text = decoder.decode(piece or b"")
    return text


def _decoded_after(token: int, near: list[int], decode: Callable[[list[int]], str]) -> str:
    """As `text_after`, for any decoder that writes U+FFFD for bytes that are no character."""
    for num_open in range(len(near) + 1):  # tokens that the character began with
        before = near[len(near) - num_open :]
        whole = decode([*before, token])
        if REPLACEMENT not in whole:
            return whole[len(decode(before).rstrip(REPLACEMENT)) :]
    return ""
