import codecs
import contextlib
import itertools
import string

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxllm.sampling_params import SamplingParams
from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.foreign_tokenizer import wrap
from jaxllm.text.streams import MAX_HELD_TOKENS, ByteStream, ByteTable, PieceStream, PieceTable, WindowStream
from jaxllm.text.tokenizer import Tokenizer

SPECIAL, ADDED = "<|end|>", "<tool é>"
WORDS = ["▁", "▁a", "a", "ab", "b", "c", "▁b▁", "\n", "é", "##b", "b</w>", "."]


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ã", "©")]
    vocab = {token: i for i, token in enumerate([*alphabet, *map("".join, merges)])}
    return _finish(models.BPE(vocab, merges), decoders.ByteLevel())


def sentencepiece(decoder: decoders.Decoder | None) -> Tokenizer:
    """The decoder's own kind matters here; the vocabulary has words, and bytes as Llama 2's has."""
    names = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    return _finish(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="a"), decoder)


def _finish(model: models.Model, decoder: decoders.Decoder | None) -> Tokenizer:
    backend = tokenizers.Tokenizer(model)
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([SPECIAL])
    backend.add_tokens([AddedToken(ADDED)])
    return wrap(backend)


def fallback(*more: decoders.Decoder) -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more])


TOKENIZERS = {
    "byte_level": (byte_level(), ByteStream),
    "llama": (sentencepiece(fallback(decoders.Strip(" ", 1, 0))), PieceStream),
    "gemma": (sentencepiece(fallback()), PieceStream),
    "metaspace": (sentencepiece(decoders.Metaspace()), PieceStream),
    "metaspace_bytes": (sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])), PieceStream),
    "wordpiece": (sentencepiece(decoders.WordPiece()), PieceStream),
    "no_decoder": (sentencepiece(None), PieceStream),
    "bpe_suffix": (sentencepiece(decoders.BPEDecoder(suffix="</w>")), WindowStream),
}
every_tokenizer = pytest.mark.parametrize("kind", TOKENIZERS)
quick = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def completions(draw, tokenizer: Tokenizer) -> list[list[int]]:
    """Random tokens, some that make text likely, in random chunks."""
    names = ["<0xC3>", "<0xA9>", "<0x0A>", "<0x61>", "<0xFF>", "Ã", "©", "ÿ", "Ċ", SPECIAL, ADDED, *WORDS]
    likely = [i for i in map(tokenizer._backend.token_to_id, names) if i is not None]
    token = st.one_of(st.sampled_from(likely), st.integers(0, tokenizer.vocab_size + 2))
    return draw(st.lists(st.lists(token, max_size=6), max_size=12))


def replay(tokenizer: Tokenizer, chunks: list[list[int]], **params) -> tuple[Detokenizer, list[str]]:
    """A finished detokenizer, and the text it showed after each chunk."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(max_tokens=None, **params))
    shown = []
    for chunk in chunks:
        stop = detokenizer.push(chunk)
        shown.append(detokenizer.text)
        if stop is not None:
            break
    detokenizer.finish()
    return detokenizer, [*shown, detokenizer.text]


def ended(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
    """What `ids` decode to, less a character at the end whose last bytes are missing."""
    table = tokenizer._table(skip_special_tokens)
    if isinstance(table, ByteTable):
        return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(table[token] for token in ids))
    if isinstance(table, PieceTable):
        ids = [token for token in ids if table[token] is not None]
        run = list(itertools.takewhile(lambda token: isinstance(table[token], int), reversed(ids)))[::-1]
        decoder = codecs.getincrementaldecoder("utf-8")("strict")
        with contextlib.suppress(UnicodeDecodeError):
            decoder.decode(bytes(table[token] for token in run))
            ids = ids[: len(ids) - len(decoder.getstate()[0])]
    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def assert_never_retracts(shown: list[str]) -> None:
    for before, after in zip(shown, shown[1:], strict=False):
        assert after.startswith(before)


@every_tokenizer
def test_tokenizers_get_the_stream_that_fits_their_decoder(kind):
    tokenizer, stream = TOKENIZERS[kind]
    assert type(tokenizer.stream()) is stream


@every_tokenizer
@quick
@given(data=st.data(), skip=st.booleans())
def test_streamed_text_equals_decode(kind, data, skip):
    tokenizer, _ = TOKENIZERS[kind]
    chunks = data.draw(completions(tokenizer))
    detokenizer, shown = replay(tokenizer, chunks, skip_special_tokens=skip)
    assert detokenizer.text == ended(tokenizer, sum(chunks, []), skip)
    assert_never_retracts(shown)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "metaspace"])
@quick
@given(data=st.data())
def test_text_after_a_prompt_continues_it(kind, data):
    tokenizer, _ = TOKENIZERS[kind]
    ids = sum(data.draw(completions(tokenizer)), [])
    prompt = [tokenizer._backend.token_to_id(name) for name in (SPECIAL, "a")]
    detokenizer = Detokenizer(tokenizer, SamplingParams(), prompt)
    detokenizer.push(ids)
    detokenizer.finish()
    assert tokenizer.decode(prompt) + detokenizer.text == ended(tokenizer, prompt + ids)


def naive_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Reads `text` one character after the other until it ends in a stop string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


stop_lists = st.lists(st.text("aab \né", min_size=1, max_size=4), min_size=1, max_size=3)


@every_tokenizer
@quick
@given(data=st.data(), stops=stop_lists)
def test_stop_strings_equal_a_naive_search(kind, data, stops):
    tokenizer, _ = TOKENIZERS[kind]
    chunks = data.draw(completions(tokenizer))
    ids = sum(chunks, [])
    # A stop string in valid bytes ends a completion before an invalid byte could follow them.
    lengths = (n for n in range(len(ids) + 1) if naive_stop(tokenizer.decode(ids[:n]), stops)[1])
    text, stop = naive_stop(ended(tokenizer, ids[: next(lengths, None)]), stops)
    detokenizer, shown = replay(tokenizer, chunks, stop=stops)
    assert (detokenizer.text, detokenizer.stop) == (text, stop)
    assert_never_retracts(shown)


@quick
@given(data=st.data(), stops=stop_lists)
def test_only_what_may_become_a_stop_string_is_withheld(data, stops):
    tokenizer, _ = TOKENIZERS["byte_level"]
    ids = data.draw(st.lists(st.sampled_from([tokenizer._backend.token_to_id(c) for c in ("a", "b", "ab")])))
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stops))
    for n, token in enumerate(ids, 1):
        if detokenizer.push([token]):
            break
        text = tokenizer.decode(ids[:n])
        starts = [i for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in stops)]
        assert detokenizer.text == text[: min(starts, default=len(text))]


@every_tokenizer
@quick
@given(data=st.data(), stops=st.just([]) | stop_lists, skip=st.booleans())
def test_a_clone_and_its_original_go_on_independently(kind, data, stops, skip):
    tokenizer, _ = TOKENIZERS[kind]
    options = dict(stop=stops, skip_special_tokens=skip, min_tokens=data.draw(st.integers(0, 3)))
    params = SamplingParams(max_tokens=None, **options)
    shared, *tails = (sum(data.draw(completions(tokenizer)), []) for _ in range(4))
    prompt = data.draw(st.sampled_from([[], [tokenizer._backend.token_to_id("a")]]))
    original = Detokenizer(tokenizer, params, prompt)
    original.push(shared)
    copies = [original, original.clone()]
    copies.append(copies[1].clone())
    for i in range(max(map(len, tails))):  # in turns, so that each could disturb the others
        for detokenizer, tail in zip(copies, tails, strict=True):
            detokenizer.push(tail[i : i + 1])
    for detokenizer, tail in zip(copies, tails, strict=True):
        alone = Detokenizer(tokenizer, params, prompt)
        alone.push(shared + tail)
        assert (detokenizer.text, detokenizer.stop) == (alone.text, alone.stop)
        detokenizer.finish()
        alone.finish()
        assert detokenizer.text == alone.text


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Byte by byte."""
    table = tokenizer.stream()._table
    by_byte = {table[i]: i for i in range(256)}
    return [by_byte[bytes((byte,))] for byte in text.encode()]


def test_half_a_character_is_held_back_until_it_is_whole():
    tokenizer, _ = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    seen = []
    for token in ids_of(tokenizer, "a€🙂"):
        detokenizer.push([token])
        seen.append(detokenizer.text)
    assert seen == ["a", "a", "a", "a€", "a€", "a€", "a€", "a€🙂"]


def test_finish_shows_half_a_stop_string_and_no_half_of_a_character():
    tokenizer, _ = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="bcd"))
    detokenizer.push(ids_of(tokenizer, "abc€")[:-1])
    assert detokenizer.text == "a"
    detokenizer.finish()
    detokenizer.finish()
    assert detokenizer.text == "abc"


def test_a_stop_string_ends_the_completion_for_good():
    tokenizer, _ = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["xyz", "b"]))
    assert detokenizer.push(ids_of(tokenizer, "abab")) == "b"
    assert detokenizer.push(ids_of(tokenizer, "a")) == "b"
    detokenizer.finish()
    assert detokenizer.text == "a"


def test_a_newline_byte_stops_at_once_though_it_is_shown_later():
    tokenizer, _ = TOKENIZERS["llama"]
    word, newline = (tokenizer._backend.token_to_id(name) for name in ("▁a", "<0x0A>"))
    shown = Detokenizer(tokenizer, SamplingParams())
    shown.push([word, newline])
    assert shown.text == "a"
    shown.push([word])
    assert shown.text == "a\n a"
    stopped = Detokenizer(tokenizer, SamplingParams(stop="\n"))
    assert [stopped.push([word]), stopped.push([newline])] == [None, "\n"]
    assert stopped.text == "a"


def test_a_long_run_of_byte_tokens_is_shown_in_parts():
    tokenizer, _ = TOKENIZERS["gemma"]
    emoji = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    detokenizer.push(emoji * (MAX_HELD_TOKENS // 4))
    assert detokenizer.text == "🙂" * (MAX_HELD_TOKENS // 4)


def test_min_tokens_defers_stop_strings():
    tokenizer, _ = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="ab", min_tokens=2))
    assert detokenizer.push(ids_of(tokenizer, "abab")) == "ab"
    assert detokenizer.text == "ab"
    straddling = Detokenizer(tokenizer, SamplingParams(stop="bc", min_tokens=2))
    assert straddling.push(ids_of(tokenizer, "abc")) == "bc"
    assert straddling.text == "a"


def test_detokenize_false_does_nothing():
    tokenizer, _ = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, SamplingParams(detokenize=False))
    assert detokenizer.push([1, 2]) is None
    detokenizer.finish()
    assert detokenizer.text == ""


class Letters:
    """A user's own tokenizer: UTF-8 bytes."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


@quick
@given(text=st.text(string.ascii_letters + "é€🙂", max_size=30), size=st.integers(1, 5))
def test_a_foreign_tokenizer_streams_whole_characters(text, size):
    tokenizer = wrap(Letters())
    ids = tokenizer.encode(text)
    detokenizer, shown = replay(tokenizer, [ids[i : i + size] for i in range(0, len(ids), size)])
    assert detokenizer.text == text
    assert_never_retracts(shown)
    assert not any("\ufffd" in part for part in shown)


@quick
@given(texts=st.lists(st.text("ab\u20ac\U0001f642", max_size=8), min_size=3, max_size=3), cut=st.integers(0, 30))
def test_a_clone_over_a_foreign_tokenizer(texts, cut):
    tokenizer = wrap(Letters())
    first, *tails = (tokenizer.encode(text) for text in texts)
    shared, rest = first[:cut], first[cut:]  # perhaps inside of a character
    original = Detokenizer(tokenizer, SamplingParams(stop="ba"))
    original.push(shared)
    copies = [original, original.clone()]
    for detokenizer, tail in zip(copies, tails, strict=True):
        for token in rest + tail:
            detokenizer.push([token])
    for detokenizer, tail in zip(copies, tails, strict=True):
        alone, _ = replay(tokenizer, [first + tail], stop="ba")
        detokenizer.finish()
        assert (detokenizer.text, detokenizer.stop) == (alone.text, alone.stop)


def test_a_foreign_tokenizer_with_endless_invalid_bytes_keeps_its_pace():
    calls = []

    class Counting(Letters):
        def decode(self, ids):
            calls.append(len(ids))
            return super().decode(ids)

    detokenizer = Detokenizer(wrap(Counting()), SamplingParams())
    detokenizer.push([0xFF] * 1000)
    assert max(calls) <= 2 * MAX_HELD_TOKENS
    detokenizer.finish()
    assert detokenizer.text == "\ufffd" * 1000
