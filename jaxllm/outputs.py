"""What a request returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


class Logprob(NamedTuple):
    """A token's log-probability (nats; at least -9999, so that it is valid JSON)."""

    logprob: float
    rank: int | None  # 1 is the most likely of all tokens
    decoded_token: str | None  # None without a tokenizer


Logprobs = list[Mapping[int, Logprob] | None]  # a position's token and others wanted there; None: it has none


@dataclass(kw_only=True)
class CompletionOutput:
    """One completion. `token_ids`, `text` and `logprobs` are cumulative, or what is new, as `output_kind` says."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # of all tokens so far, if log-probabilities are wanted
    logprobs: Logprobs | None = None  # one a token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended it; None for end of sequence

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(kw_only=True)
class RequestOutput:
    """A request so far: `outputs` has one entry for each of its `n` completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: Logprobs | None = None  # one a prompt token, None for the first; there when it is all computed
    finished: bool = False
    num_cached_tokens: int = 0  # prompt tokens whose keys and values came from the prefix cache
    error: str | None = None  # why a completion has finish_reason "error"

    def followed_by(self, newer: "RequestOutput") -> "RequestOutput":
        """Two deltas in one."""
        outputs = {completion.index: completion for completion in self.outputs}
        for new in newer.outputs:
            old = outputs.get(new.index)
            if old is not None:
                logprobs = None if new.logprobs is None else (old.logprobs or []) + new.logprobs
                new = replace(new, text=old.text + new.text, token_ids=old.token_ids + new.token_ids, logprobs=logprobs)
            outputs[new.index] = new
        return replace(newer, outputs=list(outputs.values()))
