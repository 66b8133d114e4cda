"""What one token adds to a text, after those before it."""

import pytest

from jaxllm.text.foreign_tokenizer import wrap
from tests.text.test_detokenizer import TOKENIZERS, ids_of


def texts(tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text_after(token, ids[:i]) for i, token in enumerate(ids)]


def byte_tokens(tokenizer, text: str) -> list[int]:
    return [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


class Bytes:
    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("kind", ["byte_level", "llama", "foreign"])
def test_a_character_is_its_last_tokens(kind):
    if kind == "byte_level":
        tokenizer = TOKENIZERS[kind][0]
        ids = ids_of(tokenizer, "a€🙂é")
    elif kind == "llama":
        tokenizer = TOKENIZERS[kind][0]
        ids = byte_tokens(tokenizer, "a€🙂é")
    else:
        tokenizer = wrap(Bytes())
        ids = tokenizer.encode("a€🙂é")
    assert texts(tokenizer, ids) == ["a", "", "", "€", "", "", "", "🙂", "", "é"]


def test_a_candidate_is_read_in_the_place_of_the_token():
    tokenizer, _ = TOKENIZERS["byte_level"]
    before = ids_of(tokenizer, "x€")[:-1]
    (letter,), last = ids_of(tokenizer, "y"), ids_of(tokenizer, "€")[-1]
    assert tokenizer.token_text_after(last, before) == "€"
    assert tokenizer.token_text_after(letter, before) == "y"  # alone it is text, so that is what it is
    assert tokenizer.token_text_after(last, []) == "\ufffd"  # it ends a character that was never begun


def test_a_text_between_bytes_begins_anew():
    tokenizer, _ = TOKENIZERS["llama"]
    open_, word = byte_tokens(tokenizer, "€")[0], tokenizer._backend.token_to_id("ab")
    assert texts(tokenizer, [open_, word, *byte_tokens(tokenizer, "é")]) == ["", "ab", "", "é"]
