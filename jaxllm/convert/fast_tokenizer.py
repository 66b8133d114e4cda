"""Builds a fast `tokenizer.json` from a SentencePiece model or from vocabulary and merges. Runs in the worker.

It also returns probes, texts with the ids that the source format's own rules give, which the parent compares.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tokenizers import AddedToken, Tokenizer

from jaxllm.text.fast_parts import bos_and_eos

_TEXTS = (
    "Hello world",
    " Hello  two",
    "",
    " ",
    "   ",
    "a\n\nb\tc\r\n",
    "def f(x):\n    return x + 1  ",
    "1234567890 3.14",
    "don't I'll we're THEY'VE",
    "naïve café, 東京 and 🙂👍🏽",
    "①②㎏ ﬁ e\u0301 \u00a0x\u3000y",
    "مرحبا שלום नमस्ते",
    "x▁y <0x0A>",
    "aaaaaaa bbbb ----------",
    "".join(" " * n + "x" for n in range(1, 20)),
)
_NUM_VOCABULARY_TEXTS, _PIECES_IN_TEXT, _NUM_SPECIAL_TEXTS = 16, 64, 64


@runtime_checkable
class TokenizerSource(Protocol):
    """A source format: builds the fast tokenizer, and encodes and decodes by its own rules for comparison."""

    special_names: dict[str, str]  # its defaults: {"bos_token": "<s>"}
    own_added: Sequence[AddedToken]  # vocabulary pieces that are matched before any others
    pieces: Sequence[str]  # texts of the other pieces
    has_ties: bool  # whether two ways to cut a text can be equally good

    def backend(self) -> Tokenizer: ...

    def encode(self, segment: str, is_first: bool) -> list[int]:
        """Ids of a text, or a part of one, without added tokens."""
        ...

    def decode(self, ids: list[int]) -> str | None:
        """The text; None if the format does not define it."""
        ...


def convert(job: Mapping[str, Any]) -> dict[str, Any]:
    """Writes `job["out"]`, a `tokenizer.json`. Returns {"names": special tokens, "probes": [[text, ids, decoded]]}.

    Raises `ValueError` for a damaged or unsupported source.
    """
    source = _source(job)
    names = source.special_names | job["names"]
    backend = source.backend()
    added = _added_tokens(names, job)
    own = [token for token in source.own_added if token.content not in {other.content for other in added}]
    backend.add_tokens([*own, *added])
    _check_ids(backend, job["added"])
    before, after = (_ids_of(backend, names, key) if job[f"add_{key}"] else [] for key in ("bos_token", "eos_token"))
    if before or after:
        backend.post_processor = bos_and_eos(before, after)
    backend.save(job["out"])
    # The source finds its own pieces in a text, but not its special tokens.
    cut = [token for token in own if token.special] + added
    reference = _Reference(source, backend, cut, before, after)
    probes = [reference.probe(text) for text in _probe_texts(source.pieces, [*added, *own])]
    if source.has_ties:
        probes = [(text, ids, decoded) for text, ids, decoded in probes if not _is_tie(ids, backend.encode(text).ids)]
    return {"names": names, "probes": probes}


def _source(job: Mapping[str, Any]) -> TokenizerSource:
    if job["kind"] == "sentencepiece":
        from jaxllm.convert.sentencepiece_source import SentencePieceSource

        return SentencePieceSource(Path(job["files"][0]), is_legacy=job["is_legacy"])
    from jaxllm.convert.byte_level_source import DEFAULT_TOKEN, ByteLevelSource

    vocab_file, merges_file = map(Path, job["files"])
    return ByteLevelSource(vocab_file, merges_file, job["names"].get("unk_token", DEFAULT_TOKEN))


def _added_tokens(names: Mapping[str, str], job: Mapping[str, Any]) -> list[AddedToken]:
    """The tokens that the directory's JSON files add, by id, and those that they only call special."""
    special = dict.fromkeys([*names.values(), *job["additional_special_tokens"]])
    added = {
        token["content"]: AddedToken(
            token["content"],
            lstrip=token["lstrip"],
            rstrip=token["rstrip"],
            normalized=False,
            special=token["special"] or token["content"] in special,
        )
        for token in sorted(job["added"], key=lambda token: token["id"])
    }
    rest = [AddedToken(name, normalized=False, special=True) for name in special if name not in added]
    return [*added.values(), *rest]


def _check_ids(backend: Tokenizer, added: Sequence[Mapping[str, Any]]) -> None:
    for token in added:
        got = backend.token_to_id(token["content"])
        if got != token["id"]:
            raise ValueError(
                f"the added token {token['content']!r:.100} has id {token['id']}, but follows the vocabulary as {got}; "
                "take the tokenizer's files from one model"
            )


def _ids_of(backend: Tokenizer, names: Mapping[str, str], key: str) -> list[tuple[str, int]]:
    name = names.get(key)
    token = None if name is None else backend.token_to_id(name)
    if token is None:
        raise ValueError(f"add_{key} is true, but {key} is {name!r:.100}; name one in tokenizer_config.json")
    return [(name, token)]


class _Reference:
    """Encodes texts with added tokens by the source's rules: splits at them, and encodes the parts between."""

    def __init__(self, source: TokenizerSource, backend: Tokenizer, cut: list[AddedToken], before: list, after: list):
        longest_first = sorted(cut, key=lambda token: -len(token.content))
        self._source = source
        self._cut = re.compile("|".join(map(_pattern, longest_first)) or r"(?!)")
        self._cut_ids = [backend.token_to_id(token.content) for token in longest_first]  # by group of the pattern
        self._before, self._after = [token for _, token in before], [token for _, token in after]

    def probe(self, text: str) -> tuple[str, list[int], str | None]:
        ids: list[int] = []
        start = 0
        for match in self._cut.finditer(text):
            ids += self._segment(text, start, match.start())
            ids.append(self._cut_ids[match.lastindex - 1])
            start = match.end()
        ids += self._segment(text, start, len(text))
        decoded = None if self._cut.search(text) else self._source.decode(ids)
        return text, [*self._before, *ids, *self._after], decoded

    def _segment(self, text: str, start: int, end: int) -> list[int]:
        return self._source.encode(text[start:end], is_first=start == 0) if start < end else []


def _pattern(token: AddedToken) -> str:
    return (r"\s*" if token.lstrip else "") + f"({re.escape(token.content)})" + (r"\s*" if token.rstrip else "")


def _is_tie(ids: list[int], other: list[int]) -> bool:
    """Whether both have the same ids in another order, which scores equally."""
    return ids != other and sorted(ids) == sorted(other)


def _probe_texts(pieces: Sequence[str], added: list[AddedToken]) -> Iterator[str]:
    yield from _TEXTS
    step = max(1, len(pieces) // (_NUM_VOCABULARY_TEXTS * _PIECES_IN_TEXT))
    sample = pieces[::step]
    for start in range(0, len(sample), _PIECES_IN_TEXT):
        yield "".join(sample[start : start + _PIECES_IN_TEXT])
    for token in added[:_NUM_SPECIAL_TEXTS]:
        yield f"a {token.content} b{token.content}c{token.content}{token.content} "
