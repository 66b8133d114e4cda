"""Log-probabilities in the formats of OpenAI's API."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.outputs import Logprob, Logprobs


def _text(token: int, entry: Logprob) -> str:
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token


def _top(entries: Mapping[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The most likely tokens; the sampled token, first in `entries`, need not be among them."""
    ranked = [(token, entry) for token, entry in entries.items() if entry.rank is not None and entry.rank <= count]
    return sorted(ranked, key=lambda item: item[1].rank)[:count]


class CompletionLogprobs:
    """The log-probabilities of one choice, in parts."""

    def __init__(self, num_top: int):
        self._num_top, self._offset = num_top, 0

    def part(self, token_ids: Sequence[int], logprobs: Logprobs, *, first: str = "") -> dict[str, Any]:
        """The entries of `token_ids`. The first token of a prompt has no log-probability; `first` is its text."""
        part: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entries in zip(token_ids, logprobs, strict=True):
            own = None if entries is None else entries[token]
            text = first if own is None else _text(token, own)
            part["tokens"].append(text)
            part["token_logprobs"].append(None if own is None else own.logprob)
            part["top_logprobs"].append(None if entries is None else self._named(token, entries))
            part["text_offset"].append(self._offset)
            self._offset += len(text)
        return part

    def _named(self, token: int, entries: Mapping[int, Logprob]) -> dict[str, float]:
        named = {_text(other, entry): entry.logprob for other, entry in _top(entries, self._num_top)}
        named.setdefault(_text(token, entries[token]), entries[token].logprob)
        return named


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def chat_logprobs(token_ids: Sequence[int], logprobs: Logprobs, num_top: int) -> list[dict[str, Any]]:
    """The entries of `content`, one per token."""
    return [
        _chat_entry(token, entries[token])
        | {"top_logprobs": [_chat_entry(other, entry) for other, entry in _top(entries, num_top)]}
        for token, entries in zip(token_ids, logprobs, strict=True)
    ]


def _chat_entry(token: int, entry: Logprob) -> dict[str, Any]:
    text = _text(token, entry)
    is_whole = entry.decoded_token is not None and "\ufffd" not in text  # bytes of a part are unknown
    return {"token": text, "logprob": entry.logprob, "bytes": list(text.encode()) if is_whole else None}


def prompt_logprobs(logprobs: Logprobs | None) -> list[Any] | None:
    """vLLM's format: a dict by token id for each token except the first."""
    if logprobs is None:
        return None
    return [
        entries
        and {
            str(token): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token, entry in entries.items()
        }
        for entries in logprobs
    ]
