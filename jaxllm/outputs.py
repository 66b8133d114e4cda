"""The outputs of a request."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


class Logprob(NamedTuple):
    """A token's log-probability (nats; at least -9999, so that it is valid JSON)."""

    logprob: float
    rank: int | None  # 1 is the most likely of all tokens
    decoded_token: str | None  # None without a tokenizer


Logprobs = list[Mapping[int, Logprob] | None]  # a position's own token and the requested others; None: not scored


class _OnDemand:
    """A field that may be given as a function of no arguments, which makes the value when it is first looked at. The
    default is None."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return None
        value = instance.__dict__[self._name]
        if callable(value):
            value = instance.__dict__[self._name] = value()
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._name] = value


def _on_demand() -> Any:
    """An `_OnDemand`, for a field of any type."""
    return _OnDemand()


def assemble(kind: type[Any], fields: dict[str, Any]) -> Any:
    """An instance of one of the classes below, of all its fields: what the constructor makes, in half the time."""
    instance = object.__new__(kind)
    instance.__dict__ = fields
    return instance


def _values(self: Any) -> dict[str, Any]:
    """What a pickle holds: values, and no functions."""
    return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(kw_only=True)
class RequestStateStats:
    """When what happened to a request, under vLLM's names; 0 for what has not happened. `arrival_time` is seconds since
    1970, the others are of the monotonic clock."""

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0  # it came to the engine
    scheduled_ts: float = 0.0  # it was first in a step
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0  # of this output
    first_token_latency: float = 0.0  # seconds from `queued_ts` to `first_token_ts`


@dataclass(kw_only=True)
class CompletionOutput:
    """One completion. `token_ids`, `text` and `logprobs` are cumulative or deltas, according to `output_kind`.

    `cumulative_logprob` is set if log-probabilities are requested, with `beam_width`, and with `best_of` above `n`. It
    is the model's own: bias, masks and penalties, which count for the ranking of beams, are not included.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # nats, of all tokens so far
    logprobs: Logprobs | None = _on_demand()  # one per token; built on first access
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended it; None for end of sequence
    # Of the parameters that made the tokens so far, each from the token of this index of the completion on, as
    # `update_params` numbers them.
    versions: list[tuple[int, int]] = field(default_factory=list)

    lora_request: ClassVar[None] = None  # these two are vLLM's, for what is not there
    routed_experts: ClassVar[None] = None

    __getstate__ = _values

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(kw_only=True)
class RequestOutput:
    """A request so far: `outputs` has one entry for each of its `n` completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: Logprobs | None = _on_demand()  # one per prompt token, None for the first; set once all are there
    finished: bool = False
    num_cached_tokens: int = 0  # prompt tokens whose keys and values came from the prefix cache
    error: str | None = None  # the cause, if a completion has finish_reason "error"
    queued_s: float = 0.0  # seconds from arrival in the engine to the first step
    metrics: RequestStateStats | None = _on_demand()  # None behind a server

    # vLLM's, for what is not there.
    lora_request: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    multi_modal_placeholders: ClassVar[dict[str, Any]] = {}
    kv_transfer_params: ClassVar[None] = None

    __getstate__ = _values

    def followed_by(self, newer: "RequestOutput") -> "RequestOutput":
        """This delta and the next one, merged."""
        outputs = {completion.index: completion for completion in self.outputs}
        for new in newer.outputs:
            old = outputs.get(new.index)
            if old is not None:
                logprobs = None if new.logprobs is None else (old.logprobs or []) + new.logprobs
                new = replace(new, text=old.text + new.text, token_ids=old.token_ids + new.token_ids, logprobs=logprobs)
            outputs[new.index] = new
        prompt_logprobs = newer.prompt_logprobs or self.prompt_logprobs  # a stream may have them once
        return replace(newer, outputs=list(outputs.values()), prompt_logprobs=prompt_logprobs)


@dataclass(kw_only=True)
class BeamSearchSequence:
    """A completion found by beam search, with its prompt in front."""

    tokens: list[int]  # of prompt and output, with the end of sequence
    text: str | None  # the prompt's and the output's; None without a tokenizer
    logprobs: Logprobs  # one per output token: its own and those of the most likely tokens
    cum_logprob: float  # nats, of the output
    score: float  # cum_logprob / number of output tokens ** length_penalty
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # None for end of sequence


@dataclass(kw_only=True)
class BeamSearchOutput:
    """The result of a beam search for one prompt, best first. A failed search has an `error` and no `sequences`.

    Names are vLLM's, scores follow `transformers`: vLLM divides by the length of prompt and output, without the end of
    sequence. With `allowed_token_ids` the ranking uses log-probabilities after the mask, so that the order may differ
    from the order of `score`.
    """

    sequences: list[BeamSearchSequence]
    error: str | None = None

    @classmethod
    def of(cls, output: RequestOutput, prompt: str | None, length_penalty: float) -> "BeamSearchOutput":
        """From a finished output with log-probabilities; `prompt` is the prompt's text, None without a tokenizer."""
        if output.error is not None:
            return cls(sequences=[], error=output.error)
        return cls(sequences=[_sequence(output, found, prompt, length_penalty) for found in output.outputs])


def _sequence(
    output: RequestOutput, found: CompletionOutput, prompt: str | None, length_penalty: float
) -> BeamSearchSequence:
    return BeamSearchSequence(
        tokens=output.prompt_token_ids + found.token_ids,
        text=None if prompt is None else prompt + found.text,
        logprobs=found.logprobs,
        cum_logprob=found.cumulative_logprob,
        score=found.cumulative_logprob / len(found.token_ids) ** length_penalty,
        finish_reason=found.finish_reason,
        stop_reason=found.stop_reason,
    )
