"""From committed tokens to `RequestOutput`s: groups of samples, incremental text, stop strings."""

from dataclasses import dataclass, field
from typing import Any

from jaxllm.engine.request import Request
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.detokenizer import Detokenizer


@dataclass(eq=False, kw_only=True)
class Group:
    """One user request: its `n` sequences, and the text of each.

    Text is decoded while tokens come in only if someone looks at it: a stream, or a stop string.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    tokenizer: Any  # None: token ids only
    stream: bool
    samples: list[Request] = field(default_factory=list)
    error: str | None = None

    def __post_init__(self) -> None:
        self._detokenizers: list[Detokenizer | None] = [None] * self.params.n
        self._num_decoded = [0] * self.params.n  # tokens of each sample
        self._decode = self.tokenizer is not None and self.params.detokenize

    @property
    def watches_text(self) -> bool:
        return self._decode and (self.stream or bool(self.params.stops))

    def fail(self, error: str) -> None:
        """Its text can't be decoded: from now on it has none."""
        self.error = error
        self._decode = False

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason for sample in self.samples)

    def decode(self, sample: Request) -> str | None:
        """Decodes the sample's tokens that were not yet; returns the stop string that they complete, if any."""
        by_token = sample.finish_reason == "stop" and not isinstance(sample.stop_reason, str)
        start = self._num_decoded[sample.sample_index]
        ids = sample.output_token_ids[start : -1 if by_token else None]  # a stop token is no text
        self._num_decoded[sample.sample_index] += len(ids)
        return self._detokenizer(sample).push(ids)

    def _detokenizer(self, sample: Request) -> Detokenizer:
        detokenizer = self._detokenizers[sample.sample_index]
        if detokenizer is None:
            detokenizer = Detokenizer(self.tokenizer, self.params, self.prompt_token_ids)
            self._detokenizers[sample.sample_index] = detokenizer
        return detokenizer

    def output(self) -> RequestOutput:
        """A snapshot: it does not change when the request goes on."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[self._completion(sample) for sample in self.samples],
            finished=self.finished,
            num_cached_tokens=max(0, self.samples[0].num_cached),
            error=self.error or next((s.error for s in self.samples if s.error), None),
        )

    def _completion(self, sample: Request) -> CompletionOutput:
        return CompletionOutput(
            index=sample.sample_index,
            text=self._text(sample),
            token_ids=list(sample.output_token_ids),
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )

    def _text(self, sample: Request) -> str:
        if not self._decode:
            return ""
        self.decode(sample)
        detokenizer = self._detokenizer(sample)
        if sample.finish_reason:
            detokenizer.finish()
        return detokenizer.text
