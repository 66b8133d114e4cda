"""Token ids of a text, or of a pair of texts, within a number of tokens: texts are cut, special tokens are kept."""

from typing import Any

import tokenizers

_PLAIN = "TokenizersBackend"  # of transformers: a tokenizer of no family, which gives no types unless the file says so


def cut_text(backend: tokenizers.Tokenizer, text: str, max_len: int, side: str = "right") -> list[int]:
    """At most `max_len` ids of the text, which loses tokens on the `side` "left" or "right"."""
    encoding = backend.encode(text, add_special_tokens=False)
    encoding.truncate(_room(backend, max_len, is_pair=False), direction=side)
    return backend.post_process(encoding).ids


def cut_pair(backend: tokenizers.Tokenizer, first: str, second: str, max_len: int | None) -> list[int]:
    """At most `max_len` ids of both, as the tokenizer joins them. The longer text is cut until it is as long as the
    other, then both are ("longest_first")."""
    one, two = (backend.encode(text, add_special_tokens=False) for text in (first, second))
    if max_len is not None:
        room = _room(backend, max_len, is_pair=True)
        if len(one) + len(two) > room:
            least = min(len(one), len(two), room // 2)
            is_first_longer = len(one) > len(two)
            one.truncate(room - least if is_first_longer else least)
            two.truncate(least if is_first_longer else room - least)
    return backend.post_process(one, two).ids


def tells_pairs(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> bool:
    """Whether the second text of a pair is of type 1, by the tokenizer and its `tokenizer_config.json`."""
    inputs = config.get("model_input_names")
    given = "token_type_ids" in inputs if isinstance(inputs, list) else config.get("tokenizer_class") != _PLAIN
    return given and 1 in backend.encode("a", "a").type_ids


def _room(backend: tokenizers.Tokenizer, max_len: int, *, is_pair: bool) -> int:
    """Tokens that the texts may have beside special ones. Raises `ValueError` if there is no room for any."""
    special = backend.num_special_tokens_to_add(is_pair)
    if max_len <= special:
        raise ValueError(f"at most {max_len} tokens are wanted, but {special} special tokens go with any text")
    return max_len - special
