"""Text to token ids and back, through the `tokenizers` library."""

import json
import os
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from jaxllm.checkpoint.files import check_no_pointer, local, read_json
from jaxllm.errors import ModelFormatError
from jaxllm.text import cut
from jaxllm.text.chat_template import ChatTemplates, read_templates
from jaxllm.text.streams import REPLACEMENT, ByteStream, ByteTable, PieceStream, PieceTable, TextStream, WindowStream
from jaxllm.text.token_text import text_after
from jaxllm.text.tokenizer_interface import TokenizerInterface

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
MAX_FILE_BYTES = 100_000_000
_OTHER_FORMATS = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json", "*.tiktoken")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Decoders that treat each token alone, except the first token and byte tokens.
_TOKENWISE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}


class Tokenizer(TokenizerInterface):
    """A fast tokenizer. `eos_token_id` is None if the tokenizer names no end of sequence; `tells_pairs` says whether it
    gives the second text of a pair another type."""

    tells_pairs = False

    def __init__(
        self, backend: tokenizers.Tokenizer, *, eos_token: str | None = None, chat: ChatTemplates | None = None
    ):
        """Takes ownership of `backend` and disables its stored padding and truncation, which are for training."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._special = _special_contents(backend)
        self._tables: dict[bool, ByteTable | PieceTable | None] = {}
        self.eos_token_id: int | None = None if eos_token is None else backend.token_to_id(eos_token)
        self.chat = chat or ChatTemplates()

    @classmethod
    def from_dir(cls, model_dir: str | os.PathLike[str]) -> "Tokenizer":
        """Reads `tokenizer.json`, and special token names from `tokenizer_config.json` if it exists.

        Raises `ModelFormatError` if a file is missing, damaged or larger than 100 MB.
        """
        path = local(model_dir) / FILE
        if not path.is_file():
            raise ModelFormatError(_missing(path))
        check_no_pointer(path)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelFormatError(f"{path} is larger than {MAX_FILE_BYTES} bytes; download it again")
        config = read_json(path.with_name(CONFIG)) if path.with_name(CONFIG).is_file() else {}
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
            _encode(backend, "a", True)  # some damage shows only when encoding
            tells_pairs = cut.tells_pairs(backend, config)
        except Exception as error:  # the library raises the bare class
            raise ModelFormatError(f"{path} is not a sound tokenizer ({error}); download it again") from error
        names = _special_tokens(path.with_name(CONFIG), config)
        # The configuration is the newer file of the two: a token may have become special only there.
        unmarked = sorted(set(names.values()) - _special_contents(backend))
        backend.add_special_tokens([name for name in unmarked if backend.token_to_id(name) is not None])
        chat = ChatTemplates(read_templates(path.parent), names)
        tokenizer = cls(backend, eos_token=names.get("eos_token"), chat=chat)
        tokenizer.tells_pairs = tells_pairs
        return tokenizer

    @property
    def vocab_size(self) -> int | None:
        """The number of tokens, added tokens included; None if unknown."""
        return self._backend.get_vocab_size()

    @property
    def text_vocab_size(self) -> int | None:
        """The number of tokens that ordinary text becomes: without added ones. None if unknown."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    @property
    def json(self) -> str | None:
        """The content of a `tokenizer.json`; None for a tokenizer of another kind."""
        return self._backend.to_str()

    def save(self, folder: Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, as `from_dir` reads them."""
        (folder / FILE).write_text(self._backend.to_str(), encoding="utf-8")
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.chat.special_tokens}
        if templates := self.chat.templates:
            named = [{"name": name, "template": source} for name, source in templates.items()]
            config["chat_template"] = templates["default"] if templates.keys() == {"default"} else named
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the tokenizer's rules add. Raises `ValueError`."""
        return _encode(self._backend, text, add_special_tokens)

    def encode_within(self, text: str, max_len: int, side: str = "right") -> list[int]:
        """At most `max_len` ids of a text with its special tokens: it is cut on the `side` "left" or "right". Raises
        `ValueError`."""
        return _sound(lambda: cut.cut_text(self._backend, text, max_len, side), text)

    def encode_pair(self, first: str, second: str, max_len: int | None = None) -> list[int]:
        """Ids of two texts, as the tokenizer's rules join them. With `max_len` the longer one is cut until they fit or
        are of one length, then both are. Raises `ValueError`."""
        return _sound(lambda: cut.cut_pair(self._backend, first, second, max_len), first + second)

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        chat_template: Any = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """The prompt of one conversation as ids or text. `variables` are passed to the template; see `LLM.chat`."""
        text = self.chat.render(
            conversation,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids without a token give no text."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, text: str) -> int | None:
        """The id of the token with this text; None if there is none, or if the tokenizer does not say."""
        return self._backend.token_to_id(text)

    def special_id(self, text: str) -> int | None:
        """The id of the special token with this text; None as in `token_id`."""
        return self._backend.token_to_id(text) if text in self._special else None

    def token_text(self, token: int) -> str:
        """The text that the token adds inside a text; an incomplete character is U+FFFD."""
        table = self._table(skip_special_tokens=False)
        piece = table[token] if table is not None else self.decode([token], skip_special_tokens=False)
        if isinstance(piece, int):
            piece = bytes([piece])
        return piece.decode(errors="replace") if isinstance(piece, bytes) else piece or ""

    def token_text_after(self, token: int, before: Sequence[int]) -> str:
        """The text that the token adds after others: of a character in several tokens, all is the last one's."""
        text = self.token_text(token)
        if REPLACEMENT not in text:
            return text
        decode = partial(self.decode, skip_special_tokens=False)
        return text_after(token, before, self._table(skip_special_tokens=False), decode)

    def stream(
        self,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
        spaces_between_special_tokens: bool = True,
    ) -> TextStream:
        """An incremental decoder of the text after the prompt.

        After a prompt the first token keeps its leading space, which `decode` strips at the start of a text. (Only
        slow tokenizers put spaces between special tokens; here the option has no effect.)
        """
        table = self._table(skip_special_tokens)
        if isinstance(table, ByteTable):
            return ByteStream(table)
        if isinstance(table, PieceTable):
            return PieceStream(table, prompt_token_ids)
        return WindowStream(lambda ids: self.decode(ids, skip_special_tokens), prompt_token_ids)

    def _table(self, skip_special_tokens: bool) -> ByteTable | PieceTable | None:
        """What each token decodes to; None if the decoder's output depends on more than the token."""
        if skip_special_tokens not in self._tables:
            self._tables[skip_special_tokens] = self._make_table(skip_special_tokens)
        return self._tables[skip_special_tokens]

    def _make_table(self, skip_special_tokens: bool) -> ByteTable | PieceTable | None:
        skipped = self._special if skip_special_tokens else frozenset()
        decoder = self._backend.decoder
        steps = [] if decoder is None else _flatten(json.loads(decoder.__getstate__()))
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return ByteTable(self._backend, skipped)
        anchor = self._anchor()
        if anchor is None or not all(_is_tokenwise(step) for step in steps):
            return None
        has_bytes = any(step["type"] == "ByteFallback" for step in steps)
        return PieceTable(self._backend, skipped, anchor, has_bytes)

    def _anchor(self) -> int | None:
        """A token that ends in a letter or digit: decoders strip nothing after it."""
        for token in range(self._backend.get_vocab_size()):
            name = self._backend.id_to_token(token)
            if name and name[-1].isalnum() and name not in self._special:
                return token
        return None


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    return _sound(lambda: backend.encode(text, add_special_tokens=add_special_tokens).ids, text)


def _sound(encode: Callable[[], list[int]], text: str) -> list[int]:
    """What `encode` makes of `text`, with errors that say what is wrong with it or the tokenizer."""
    try:
        return encode()
    except TypeError as error:
        halves = [i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"]
        raise ValueError(
            f"the text has half of a surrogate pair at character {halves[0]}, which is not valid Unicode; "
            "decode its source as UTF-8, or with errors='replace'"
        ) from error
    except BaseException as error:
        # The library's panics on damaged files are not Exceptions and would end a server.
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer is damaged and failed on a text ({error}); download it again") from error


def _missing(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"{folder} is not a directory; pass the directory that holds {FILE}"
    others = sorted({file.name for pattern in _OTHER_FORMATS for file in folder.glob(pattern)})
    if not others:
        return f"{path} is missing; take the whole model directory, in Hugging Face format"
    return (
        f"{path} is missing; the directory has {', '.join(others)}, but a fast {FILE} is needed. Create it with "
        f"python -m jaxllm.convert {shlex.quote(str(folder))} NEW_DIR"
    )


def _special_tokens(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """The special tokens that the `tokenizer_config.json` at `path` names: {"eos_token": "</s>"}."""
    names = {}
    for key in _SPECIAL_TOKENS:
        token = config.get(key)
        name = token.get("content") if isinstance(token, dict) else token
        if not isinstance(name, str | None):
            raise ModelFormatError(f"{path}: {key}={token!r:.100} must be a string; download it again")
        if name:
            names[key] = name
    return names


def _special_contents(backend: tokenizers.Tokenizer) -> set[str]:
    return {token.content for token in backend.get_added_tokens_decoder().values() if token.special}


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def _is_tokenwise(step: dict[str, Any]) -> bool:
    if step["type"] == "Strip":  # more than one space could reach the second token, the end any token
        return step["start"] <= 1 and step["stop"] == 0
    if step["type"] == "Replace":  # a longer pattern could match across tokens
        return len(step["pattern"].get("String", "")) == 1
    return step["type"] in _TOKENWISE
