"""GPT-2's byte-level BPE (`vocab.json` and `merges.txt`): the fast tokenizer, and its rules in plain Python."""

import json
from pathlib import Path

import regex
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
DEFAULT_TOKEN = "<|endoftext|>"  # noqa: S105 - of text


class ByteLevelSource:
    """A `TokenizerSource`. Raises `ValueError` for damaged files."""

    has_ties = False
    own_added: tuple[AddedToken, ...] = ()

    def __init__(self, vocab_file: Path, merges_file: Path, unknown: str = DEFAULT_TOKEN):
        self._vocabulary = _read_vocabulary(vocab_file)
        merges = _read_merges(merges_file)
        self._letters = _letters()
        missing = sorted(set(self._letters.values()) - self._vocabulary.keys())
        self._unknown = self._vocabulary.get(unknown)
        if missing and self._unknown is None:
            raise ValueError(f"{vocab_file} has neither {missing[0]!r}, a byte's own token, nor {unknown!r} for it")
        try:
            unk_token = unknown if missing else None
            self._model = models.BPE(self._vocabulary, merges, unk_token=unk_token, fuse_unk=False)
        except Exception as error:  # the library raises the bare class
            raise ValueError(f"{merges_file} does not fit {vocab_file} ({error}); take both from one model") from error
        self._ranks = {merge: rank for rank, merge in enumerate(merges)}
        self._bytes = {letter: byte for byte, letter in self._letters.items()}
        self._tokens = {token: text for text, token in self._vocabulary.items()}
        names = ("bos_token", "eos_token", "unk_token") if DEFAULT_TOKEN in self._vocabulary else ()
        self.special_names = dict.fromkeys(names, DEFAULT_TOKEN)
        texts = map(self._text, (text for text in self._vocabulary if self._bytes.keys() >= set(text)))
        self.pieces = [text for text in texts if "\ufffd" not in text]

    def backend(self) -> Tokenizer:
        backend = Tokenizer(self._model)
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        return backend

    def encode(self, segment: str, is_first: bool) -> list[int]:
        words = ("".join(self._letters[byte] for byte in word.encode()) for word in _WORDS.findall(segment))
        return [self._vocabulary.get(part, self._unknown) for word in words for part in self._merge(list(word))]

    def _merge(self, parts: list[str]) -> list[str]:
        """Applies the highest-ranked merge repeatedly, until none applies."""
        while len(parts) > 1:
            best = min(zip(parts, parts[1:], strict=False), key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            merged: list[str] = []
            for part in parts:
                if merged and (merged[-1], part) == best:
                    merged[-1] += part
                    continue
                merged.append(part)
            parts = merged
        return parts

    def decode(self, ids: list[int]) -> str | None:
        return None if self._unknown in ids else self._text("".join(self._tokens[token] for token in ids))

    def _text(self, letters: str) -> str:
        return bytes(self._bytes[letter] for letter in letters).decode(errors="replace")


def _letters() -> dict[int, str]:
    """The character of each byte: printable bytes stand for themselves, the others map to U+0100 and up."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    rest = iter(range(256, 512))
    return {byte: chr(byte if byte in printable else next(rest)) for byte in range(256)}


def _read_vocabulary(file: Path) -> dict[str, int]:
    try:
        vocabulary = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}); download it again") from error
    if not isinstance(vocabulary, dict) or not vocabulary or not all(type(i) is int for i in vocabulary.values()):
        raise ValueError(f"{file} must map texts to ids; download it again")
    ids = set(vocabulary.values())
    if ids != set(range(len(vocabulary))):
        raise ValueError(f"{file} must give {len(vocabulary)} texts the ids from 0 on, each once; download it again")
    return vocabulary


def _read_merges(file: Path) -> list[tuple[str, str]]:
    lines = file.read_text(encoding="utf-8").split("\n")
    if lines[0].startswith("#version"):  # other lines may begin with "#" too
        del lines[0]
    merges = [tuple(line.split(" ")) for line in lines if line]
    if not all(len(merge) == 2 and all(merge) for merge in merges):
        raise ValueError(f"{file} must hold two parts in each line; download it again")
    return merges
