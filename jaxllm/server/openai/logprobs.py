"""Log-probabilities in the formats of OpenAI's API."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxllm.outputs import Logprob, Logprobs
from jaxllm.server.openai.schemas import ChatRequest, CompletionRequest, Sampling


def token_text(token: int, entry: Logprob) -> str:
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token


def has_logprobs(request: CompletionRequest | ChatRequest) -> bool:
    """Whether the answer has log-probabilities, which may make it large."""
    return request.prompt_logprobs is not None or request.logprobs not in (None, False)


class LogprobsFormat(NamedTuple):
    """How a request wants its log-probabilities."""

    num_top: int
    token_ids: Sequence[int] | None  # these in the place of the most likely tokens
    names_ids: bool  # tokens are called "token_id:5"

    @classmethod
    def of(cls, request: Sampling, num_top: int | None) -> "LogprobsFormat":
        return cls(num_top or 0, request.logprob_token_ids, bool(request.return_tokens_as_token_ids))

    def text(self, token: int, entry: Logprob) -> str:
        return f"token_id:{token}" if self.names_ids else token_text(token, entry)

    def top(self, entries: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
        if self.token_ids is not None:
            return [(token, entries[token]) for token in self.token_ids if token in entries]  # a prompt's have others
        return _top(entries, self.num_top)


def _top(entries: Mapping[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The most likely tokens; the sampled token, first in `entries`, need not be among them."""
    ranked = [(token, entry) for token, entry in entries.items() if entry.rank is not None and entry.rank <= count]
    return sorted(ranked, key=lambda item: item[1].rank)[:count]


class CompletionLogprobs:
    """The log-probabilities of one choice, in parts."""

    def __init__(self, form: LogprobsFormat):
        self._form, self._offset = form, 0

    def part(
        self, token_ids: Sequence[int], logprobs: Logprobs, *, first: str = "", has_first: bool = True
    ) -> dict[str, Any]:
        """The entries of `token_ids`. The first token of a prompt has no log-probability; `first` is its text, and
        `has_first` whether the shown text begins with it."""
        part: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entries in zip(token_ids, logprobs, strict=True):
            own = None if entries is None else entries[token]
            text = first if own is None else token_text(token, own)
            part["tokens"].append(f"token_id:{token}" if self._form.names_ids else text)
            part["token_logprobs"].append(None if own is None else own.logprob)
            part["top_logprobs"].append(None if entries is None else self._named(token, entries))
            part["text_offset"].append(self._offset)
            self._offset += len(text) if own is not None or has_first else 0
        return part

    def _named(self, token: int, entries: Mapping[int, Logprob]) -> dict[str, float]:
        form = self._form
        named = {form.text(other, entry): entry.logprob for other, entry in form.top(entries)}
        named.setdefault(form.text(token, entries[token]), entries[token].logprob)
        return named


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def chat_logprobs(token_ids: Sequence[int], logprobs: Logprobs, form: LogprobsFormat) -> list[dict[str, Any]]:
    """The entries of `content`, one per token."""
    return [
        _chat_entry(token, entries[token], form)
        | {"top_logprobs": [_chat_entry(other, entry, form) for other, entry in form.top(entries)]}
        for token, entries in zip(token_ids, logprobs, strict=True)
    ]


def _chat_entry(token: int, entry: Logprob, form: LogprobsFormat) -> dict[str, Any]:
    text = entry.decoded_token
    known = None if text is None or "\ufffd" in text else list(text.encode())  # bytes of a part are unknown
    return {"token": form.text(token, entry), "logprob": entry.logprob, "bytes": known}


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
