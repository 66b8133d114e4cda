"""What programs ask of a tokenizer of transformers, asked of ours."""

from collections import UserDict
from collections.abc import Sequence
from typing import Any

import tokenizers


class Encoding(UserDict[str, Any]):
    """The result of calling a tokenizer: `input_ids` and `attention_mask`, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in ("input_ids", "attention_mask"):
            return self.data[name]
        raise AttributeError(f"an encoding has input_ids and attention_mask, not {name!r}")


class TokenizerInterface:
    """Names and behaviour of `PreTrainedTokenizerFast`, without padding and tensors."""

    _backend: tokenizers.Tokenizer
    chat: Any
    encode: Any
    decode: Any
    eos_token_id: int | None

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoding:
        """The ids of a text, or of each of several texts."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        each = [self.encode(one, add_special_tokens) for one in text]
        return Encoding(input_ids=each, attention_mask=[[1] * len(ids) for ids in each])

    def __len__(self) -> int:
        """The number of tokens, added tokens included."""
        return self._backend.get_vocab_size()

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self._backend.get_vocab()

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens))

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """The token of an id, or those of several; None for an id without a token."""
        if isinstance(ids, int):
            return self._backend.id_to_token(ids)
        return [self._backend.id_to_token(int(token)) for token in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or those of several; that of the unknown token, or None, for what is none."""
        if isinstance(tokens, str):
            found = self._backend.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Special tokens by what they are for: {"eos_token": "</s>"}."""
        return dict(self.chat.special_tokens)

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys(self.special_tokens_map.values()))

    @property
    def all_special_ids(self) -> list[int]:
        return self.convert_tokens_to_ids(self.all_special_tokens)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens_map.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self.special_tokens_map.get("unk_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._special_id("unk_token")

    @property
    def sep_token_id(self) -> int | None:
        return self._special_id("sep_token")

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self._backend.token_to_id(token)
