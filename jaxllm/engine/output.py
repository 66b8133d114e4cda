"""From committed tokens to `RequestOutput`s: incremental text, stop strings, log-probabilities."""

import math
import time
from collections import abc
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxllm.engine.beam.group import BeamResult, BeamSearchGroup
from jaxllm.engine.logprobs import PackedLogprobs, to_logprobs
from jaxllm.engine.schedule.sequence import Sequence
from jaxllm.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput, RequestStateStats, assemble
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.token_text import MOST_BEFORE

Output = Sequence | BeamResult


class LogprobReader:
    """Makes dictionaries of packed log-probabilities, each once, when someone looks: in any thread."""

    def __init__(
        self, token_ids: list[int], packed: list[PackedLogprobs], num_top: int, text_after: Any, first: int = 0
    ):
        """`text_after` makes the text of a token, given those before it; `first` tokens have none packed."""
        self._token_ids, self._packed = token_ids, packed  # they may grow meanwhile
        self._num_top, self._text_after, self._first = num_top, text_after, first
        self._made: dict[int, dict[int, Logprob]] = {}

    def read(self, start: int, stop: int) -> Logprobs:
        """Those of the tokens `start` to `stop`."""
        return [self._read(i) for i in range(start, stop)]

    def after_first(self) -> Logprobs:
        """Of a prompt, whose first token comes after nothing: the others' are packed."""
        return [None, *self.read(0, len(self._packed))]

    def _read(self, i: int) -> dict[int, Logprob]:
        if i not in self._made:
            at = i + self._first
            token_text = partial(self._text_after, before=self._token_ids[max(0, at - MOST_BEFORE) : at])
            self._made[i] = to_logprobs(self._token_ids[at], self._packed[i], self._num_top, token_text)
        return self._made[i]


class Progress:
    """How far one sequence's output has got."""

    def __init__(self) -> None:
        self.detokenizer: Detokenizer | None = None
        self.num_decoded = 0  # tokens
        self.logprobs: LogprobReader | None = None
        self.num_summed = 0  # tokens whose log-probabilities are in the next
        self.cumulative_logprob = 0.0
        self.num_sent = 0  # tokens in the stream's outputs so far
        self.num_sent_chars = 0
        self.is_end_sent = False


@dataclass(eq=False, kw_only=True)
class Request:
    """One user request: its sequences, and the output of each that is returned.

    Text is decoded while tokens come in only if someone looks at it: a stream, or a stop string. Beams, of which
    `sequences` has but the first, and sequences of which the best are wanted, have one output, when all are over.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    tokenizer: Any  # None: token ids only
    stream: bool  # outputs are wanted while it runs
    lean: bool = False  # outputs leave the prompt out, and have its log-probabilities once
    sequences: list[Sequence] = field(default_factory=list)
    error: str | None = None
    arrival_time: float = field(default_factory=time.time)
    arrived_at: float = field(default_factory=time.monotonic)
    queued_s: float | None = None  # seconds; None until it is in a step
    first_token_at: float | None = None  # time.monotonic

    def __post_init__(self) -> None:
        params = self.params
        self._progress = [Progress() for _ in range(params.num_samples)]
        self._decode = self.tokenizer is not None and params.detokenize
        self._prompt_logprobs: LogprobReader | None = None
        self._is_prompt_told = False
        self._is_chosen = params.beam_width is not None or params.num_samples > params.n
        self._is_delta = self.stream and params.output_kind is RequestOutputKind.DELTA
        self._shows_progress = (
            self.stream and not self._is_chosen and params.output_kind is not RequestOutputKind.FINAL_ONLY
        )
        self._sums_logprobs = params.tracks_logprobs or self._is_chosen
        self._wants_logprobs = params.wants_logprobs
        # Stop strings are found here; those of beams are where the beams are chosen.
        self.watches_text = self._decode and bool(params.stops) and params.beam_width is None

    def fail(self, error: str) -> None:
        """Its text can't be decoded: from now on it has none."""
        self.error = error
        self._decode = self.watches_text = False

    def scheduled(self) -> None:
        """It is in a step."""
        if self.queued_s is None:
            self.queued_s = time.monotonic() - self.arrived_at

    def sampled(self, now: float) -> None:
        """Its prompt was computed, and a token drawn."""
        if self.first_token_at is None:
            self.first_token_at = now

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason for sequence in self.sequences)

    @property
    def shown(self) -> abc.Sequence[Output]:
        """What is returned, best first if it was chosen."""
        if not self._is_chosen:
            return self.sequences
        group = self.sequences[0].group
        if isinstance(group, BeamSearchGroup):
            return group.results or []
        return sorted(self.sequences, key=_mean_logprob, reverse=True)[: self.params.n]

    def update(self) -> RequestOutput | None:
        """The output that is due, if one is: the last, or one that the stream wants now."""
        if self._shows_progress:
            if len(self.sequences) == 1:
                return self.output() if self._is_due(self.sequences[0]) else None
            if any(self._is_due(sequence) for sequence in self.sequences):
                return self.output()
        return self.output() if self.finished else None

    def _is_due(self, sequence: Output) -> bool:
        progress = self._progress[sequence.sample_index]
        num_new = len(sequence.output_token_ids) - progress.num_sent
        if sequence.finish_reason is not None:
            return not progress.is_end_sent
        return num_new >= (progress.num_sent and self.params.stream_interval or 1)

    def decode(self, sequence: Output) -> str | None:
        """Decodes the sequence's tokens that were not yet; returns the stop string that they complete, if any."""
        progress = self._progress[sequence.sample_index]
        is_stop = sequence.finish_reason == "stop" and not isinstance(sequence.stop_reason, str)
        # A grammar may end with a token that is text.
        by_token = is_stop and sequence.stop_ids.issuperset(sequence.output_token_ids[-1:])
        shows_it = not by_token or self.params.include_stop_str_in_output
        ids = sequence.output_token_ids[progress.num_decoded : None if shows_it else -1]
        progress.num_decoded += len(ids)
        return self._detokenizer(progress).push(ids)

    def find_stop(self, sequence: Sequence) -> str | None:
        """Decodes as `decode` does. A sequence that has come to a stop string loses the tokens after it."""
        stop = self.decode(sequence)
        if stop is not None:
            num_tokens = self._detokenizer(self._progress[sequence.sample_index]).num_tokens
            del sequence.output_token_ids[num_tokens:], sequence.logprobs[num_tokens:]
        return stop

    def _detokenizer(self, progress: Progress) -> Detokenizer:
        if progress.detokenizer is None:
            progress.detokenizer = Detokenizer(self.tokenizer, self.params, self.prompt_token_ids)
        return progress.detokenizer

    def output(self) -> RequestOutput:
        """A snapshot: it does not change when the request goes on."""
        shown = self.shown
        if len(shown) == 1:
            outputs = [self._completion(0, shown[0])]
            finished, error = shown[0].finish_reason is not None, self.error or shown[0].error
        else:
            due = [(i, sequence) for i, sequence in enumerate(shown) if not self._is_delta or self._is_due(sequence)]
            outputs = [self._completion(i, sequence) for i, sequence in due]
            finished = self.finished
            error = self.error or next((sequence.error for _, sequence in due if sequence.error), None)
        lean = self.lean
        fields = {
            "request_id": self.request_id,
            "prompt": None if lean else self.prompt,
            "prompt_token_ids": [] if lean else self.prompt_token_ids,
            "outputs": outputs,
            "prompt_logprobs": None if self.params.prompt_logprobs is None else self._take_prompt_logprobs(),
            "finished": finished,
            "num_cached_tokens": max(0, self.sequences[0].num_cached),
            "error": error,
            "queued_s": self.queued_s or 0.0,
            "metrics": None if lean else self._metrics(),
        }
        return assemble(RequestOutput, fields)

    def _completion(self, index: int, sequence: Output) -> CompletionOutput:
        progress, token_ids, text = self._progress[sequence.sample_index], sequence.output_token_ids, ""
        start = start_char = 0
        if self._decode:
            text = self._text(sequence, progress)
        if self._is_delta:
            start, start_char = progress.num_sent, progress.num_sent_chars
        progress.num_sent, progress.num_sent_chars = len(token_ids), len(text)
        progress.is_end_sent = sequence.finish_reason is not None
        logprobs = None
        if self._wants_logprobs:
            logprobs = partial(self._logprobs(sequence, progress).read, start, len(token_ids))
        fields = {
            "index": index,
            "text": text[start_char:],
            "token_ids": token_ids[start:],
            "cumulative_logprob": self._sum_logprobs(sequence, progress) if self._sums_logprobs else None,
            "logprobs": logprobs,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "versions": [span for span in sequence.versions if span[0] < len(token_ids)],
        }
        return assemble(CompletionOutput, fields)

    def _text(self, sequence: Output, progress: Progress) -> str:
        detokenizer = progress.detokenizer or self._detokenizer(progress)
        if sequence.finish_reason is not None:
            self.decode(sequence)
            detokenizer.finish()
        elif progress.num_decoded < len(sequence.output_token_ids):
            detokenizer.push(sequence.output_token_ids[progress.num_decoded :])
            progress.num_decoded = len(sequence.output_token_ids)
        return detokenizer.text

    def _sum_logprobs(self, sequence: Output, progress: Progress) -> float:
        new = sequence.logprobs[progress.num_summed : len(sequence.output_token_ids)]
        progress.num_summed += len(new)
        progress.cumulative_logprob += _sum_logprobs(new)
        return progress.cumulative_logprob

    def _logprobs(self, sequence: Output, progress: Progress) -> LogprobReader:
        if progress.logprobs is None:
            tokens, packed, num_top = sequence.output_token_ids, sequence.logprobs, self.params.num_top_logprobs
            progress.logprobs = LogprobReader(tokens, packed, num_top, self._text_after())
        return progress.logprobs

    def _take_prompt_logprobs(self) -> abc.Callable[[], Logprobs] | None:
        """None until they are complete, and if they were told already where that is wanted."""
        packed = self.sequences[0].prompt_logprobs
        if self._is_prompt_told or len(packed) < len(self.prompt_token_ids) - 1:
            return None
        if self._prompt_logprobs is None:
            tokens, num_top = self.prompt_token_ids, self.params.prompt_logprobs
            assert num_top is not None  # the caller looks first
            self._prompt_logprobs = LogprobReader(tokens, packed, num_top, self._text_after(), first=1)
        self._is_prompt_told = self.lean
        return self._prompt_logprobs.after_first

    def _text_after(self) -> abc.Callable[..., str | None]:
        return self.tokenizer.token_text_after if self._decode else _no_text

    def _metrics(self) -> abc.Callable[[], RequestStateStats]:
        """When what happened to it until now."""
        now, queued_s = time.monotonic(), self.queued_s
        num_tokens = sum(len(sequence.output_token_ids) for sequence in self.shown)
        if num_tokens and self.first_token_at is None:
            self.first_token_at = now
        first = self.first_token_at
        return partial(
            RequestStateStats,
            num_generation_tokens=num_tokens,
            arrival_time=self.arrival_time,
            queued_ts=self.arrived_at,
            scheduled_ts=0.0 if queued_s is None else self.arrived_at + queued_s,
            first_token_ts=first or 0.0,
            last_token_ts=0.0 if first is None else now,
            first_token_latency=0.0 if first is None else first - self.arrived_at,
        )


def _no_text(token: int, before: abc.Sequence[int]) -> None:
    return None


def _sum_logprobs(kept: abc.Sequence[PackedLogprobs]) -> float:
    return sum((entry.own for entry in kept), 0.0)


def _mean_logprob(sequence: Sequence) -> float:
    """The measure by which the best of several sequences are chosen."""
    return _sum_logprobs(sequence.logprobs) / len(sequence.logprobs) if sequence.logprobs else -math.inf
