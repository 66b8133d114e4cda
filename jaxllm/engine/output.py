"""From committed tokens to `RequestOutput`s: groups of sequences, incremental text, stop strings, log-probabilities."""

import math
import time
from collections import abc
from dataclasses import dataclass, field
from typing import Any

from jaxllm.engine.beam.group import BeamResult, BeamSearchGroup
from jaxllm.engine.logprobs import PackedLogprobs, to_logprobs
from jaxllm.engine.schedule.sequence import Sequence
from jaxllm.outputs import CompletionOutput, Logprobs, RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.detokenizer import Detokenizer

Output = Sequence | BeamResult


class Progress:
    """How far one sequence's output has got."""

    def __init__(self) -> None:
        self.detokenizer: Detokenizer | None = None
        self.num_decoded = 0  # tokens
        self.logprobs: Logprobs = []
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
    stream: bool
    sequences: list[Sequence] = field(default_factory=list)
    error: str | None = None
    arrived_at: float = field(default_factory=time.monotonic)
    queued_s: float | None = None  # seconds; None until it is in a step

    def __post_init__(self) -> None:
        self._progress = [Progress() for _ in range(self.params.num_samples)]
        self._decode = self.tokenizer is not None and self.params.detokenize
        self._prompt_logprobs: Logprobs | None = None

    @property
    def watches_text(self) -> bool:
        """Whether stop strings are found here; those of beams are where the beams are chosen."""
        return self._decode and bool(self.params.stops) and self.params.beam_width is None

    def fail(self, error: str) -> None:
        """Its text can't be decoded: from now on it has none."""
        self.error = error
        self._decode = False

    def scheduled(self) -> None:
        """It is in a step."""
        if self.queued_s is None:
            self.queued_s = time.monotonic() - self.arrived_at

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason for sequence in self.sequences)

    @property
    def shown(self) -> abc.Sequence[Output]:
        """What is returned, best first if it was chosen."""
        group = self.sequences[0].group
        if isinstance(group, BeamSearchGroup):
            return group.results or []
        if self.params.num_samples > self.params.n:
            return sorted(self.sequences, key=_mean_logprob, reverse=True)[: self.params.n]
        return self.sequences

    @property
    def _is_chosen(self) -> bool:
        return self.params.beam_width is not None or self.params.num_samples > self.params.n

    @property
    def has_update(self) -> bool:
        """Whether an output is due: the last, or one that the stream wants now."""
        if self.finished:
            return True
        if not self.stream or self._is_chosen or self.params.output_kind is RequestOutputKind.FINAL_ONLY:
            return False
        return any(self._is_due(sequence) for sequence in self.sequences)

    def _is_due(self, sequence: Output) -> bool:
        progress = self._progress[sequence.sample_index]
        num_new = len(sequence.output_token_ids) - progress.num_sent
        if sequence.finish_reason is not None:
            return not progress.is_end_sent
        return num_new >= (self.params.stream_interval if progress.num_sent else 1)

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

    def _detokenizer(self, progress: Progress) -> Detokenizer:
        if progress.detokenizer is None:
            progress.detokenizer = Detokenizer(self.tokenizer, self.params, self.prompt_token_ids)
        return progress.detokenizer

    def output(self) -> RequestOutput:
        """A snapshot: it does not change when the request goes on."""
        is_delta = self.stream and self.params.output_kind is RequestOutputKind.DELTA
        shown = [(i, sequence) for i, sequence in enumerate(self.shown) if not is_delta or self._is_due(sequence)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._get_prompt_logprobs(),
            outputs=[self._completion(i, sequence, is_delta=is_delta) for i, sequence in shown],
            finished=self.finished,
            num_cached_tokens=max(0, self.sequences[0].num_cached),
            error=self.error or next((sequence.error for _, sequence in shown if sequence.error), None),
            queued_s=self.queued_s or 0.0,
        )

    def _completion(self, index: int, sequence: Output, *, is_delta: bool) -> CompletionOutput:
        progress, text = self._progress[sequence.sample_index], self._text(sequence)
        self._read_logprobs(sequence, progress)
        logprobs = progress.logprobs if self.params.wants_logprobs else None
        has_sum = self.params.tracks_logprobs or self._is_chosen
        start, start_char = (progress.num_sent, progress.num_sent_chars) if is_delta else (0, 0)
        progress.num_sent, progress.num_sent_chars = len(sequence.output_token_ids), len(text)
        progress.is_end_sent = sequence.finish_reason is not None
        return CompletionOutput(
            index=index,
            text=text[start_char:],
            token_ids=sequence.output_token_ids[start:],
            cumulative_logprob=progress.cumulative_logprob if has_sum else None,
            logprobs=None if logprobs is None else logprobs[start:],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )

    def _text(self, sequence: Output) -> str:
        if not self._decode:
            return ""
        self.decode(sequence)
        detokenizer = self._detokenizer(self._progress[sequence.sample_index])
        if sequence.finish_reason:
            detokenizer.finish()
        return detokenizer.text

    # ---- log-probabilities

    def _read_logprobs(self, sequence: Output, progress: Progress) -> None:
        start = progress.num_summed
        new = sequence.logprobs[start : len(sequence.output_token_ids)]
        progress.num_summed += len(new)
        progress.cumulative_logprob += _sum_logprobs(new)
        if self.params.wants_logprobs:
            progress.logprobs += self._readable(sequence.output_token_ids[start:], new, self.params.num_top_logprobs)

    def _get_prompt_logprobs(self) -> Logprobs | None:
        """None until they are complete: the first token's is None, as nothing is before it."""
        kept = self.sequences[0].prompt_logprobs
        if self._prompt_logprobs is None and self.params.prompt_logprobs is not None:
            if len(kept) == len(self.prompt_token_ids) - 1:
                tokens = self.prompt_token_ids[1:]
                self._prompt_logprobs = [None, *self._readable(tokens, kept, self.params.prompt_logprobs)]
        return self._prompt_logprobs

    def _readable(self, tokens: abc.Sequence[int], kept: abc.Sequence[PackedLogprobs], num_top: int) -> Logprobs:
        pairs = zip(tokens, kept, strict=True)
        return [to_logprobs(token, row, num_top, self._token_text) for token, row in pairs]

    def _token_text(self, token: int) -> str | None:
        return self.tokenizer.token_text(token) if self._decode else None


def _sum_logprobs(kept: abc.Sequence[PackedLogprobs]) -> float:
    return sum((float(entry.logprobs[0]) for entry in kept), 0.0)


def _mean_logprob(sequence: Sequence) -> float:
    """The measure by which the best of several sequences are chosen."""
    return _sum_logprobs(sequence.logprobs) / len(sequence.logprobs) if sequence.logprobs else -math.inf
