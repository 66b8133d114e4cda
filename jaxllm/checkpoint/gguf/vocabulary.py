"""The vocabulary in a GGUF file's metadata: tokens, what each is for, and the special ones."""

from functools import cached_property
from typing import Any

import numpy as np

from jaxllm.checkpoint.gguf.metadata import Metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # of a token

_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # as the format spells it
    "mask_token": "mask_token_id",
}
_SENTENCEPIECE_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}  # where the file names none
# Older files name no end of turn, though chats end with it.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")


class Vocabulary:
    """Raises `ModelFormatError` for what does not fit together."""

    def __init__(self, metadata: Metadata):
        self.metadata = metadata
        self.model: str = metadata.text("tokenizer.ggml.model")
        self.tokens: list[str] = metadata.strings("tokenizer.ggml.tokens")

    @cached_property
    def kinds(self) -> list[int]:
        """Of each token."""
        return self._each("token_type", "iu").tolist()

    @cached_property
    def scores(self) -> list[float]:
        """Of each token; the better one is merged first."""
        return self._each("scores", "f").tolist()

    @property
    def special_ids(self) -> dict[str, int]:
        """Ids by the names that chat templates have for them: {"bos_token": 1}."""
        defaults = _SENTENCEPIECE_IDS if self.model == "llama" else {}
        ids = {name: self._id(key, defaults.get(name)) for name, key in _KEYS.items()}
        return {name: token for name, token in ids.items() if token is not None}

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end a generation: of the text, of a turn, of a message."""
        named = [self._id(key, None) for key in ("eot_token_id", "eom_token_id")]
        ids = [self.special_ids.get("eos_token"), *named]
        if named[0] is None:
            tokens = enumerate(zip(self.tokens, self.kinds, strict=True))
            ids += [i for i, (token, kind) in tokens if token in _TURN_ENDS and kind in (CONTROL, USER_DEFINED)]
        return [token for token in dict.fromkeys(ids) if token is not None]

    def adds(self, what: str, default: bool) -> bool:
        """Whether texts get a "bos" or "eos" token, or a "space_prefix"."""
        key = "tokenizer.ggml.add_space_prefix" if what == "space_prefix" else f"tokenizer.ggml.add_{what}_token"
        return self.metadata.flag(key, default)

    def _id(self, key: str, default: int | None) -> int | None:
        token = self.metadata.token(f"tokenizer.ggml.{key}", default)
        if token is not None and not 0 <= token < len(self.tokens):
            raise self.metadata.error(
                f"tokenizer.ggml.{key}", f"must be the id of one of the {len(self.tokens)} tokens ({token})"
            )
        return token

    def _each(self, key: str, kinds: str) -> Any:
        values: np.ndarray = self.metadata.numbers(f"tokenizer.ggml.{key}")
        if values.dtype.kind not in kinds or len(values) != len(self.tokens):
            raise self.metadata.error(
                f"tokenizer.ggml.{key}", f"must have a number for each of the {len(self.tokens)} tokens"
            )
        return values


def stop_ids(metadata: Metadata) -> list[int]:
    return Vocabulary(metadata).stop_ids if "tokenizer.ggml.tokens" in metadata else []
