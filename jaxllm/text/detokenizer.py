"""The text of one completion while its tokens come in, and the stop string that ends it."""

import copy
from collections.abc import Sequence

from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one completion and watches for stop strings.

    `text` is safe to show: it only ever grows, and ends before a stop string or anything that may become one.
    Of several stop strings, the one that is complete first wins; of two that end together, the longer.
    As at the end of sequence, no stop string counts within the first `min_tokens` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()):
        """With `prompt_token_ids`, the text continues the prompt's: a first token keeps its leading space."""
        self.text = ""
        self.stop: str | None = None
        self._params = params
        self._stream = tokenizer.stream(
            params.skip_special_tokens,
            prompt_token_ids,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._hidden = ""  # settled, but perhaps the beginning of a stop string
        self._num_searched = 0  # characters of the hidden and held text in which no stop string ends
        self._num_tokens = 0
        self._finished = not params.detokenize

    def push(self, new_token_ids: Sequence[int]) -> str | None:
        """Takes the next tokens; returns the stop string that one of them completes, or None.

        `text` is then cut before the stop string (with `include_stop_str_in_output`, behind it), and the completion
        is finished. What follows is ignored.
        """
        if self._finished:
            return self.stop
        if not self._params.stops:
            self.text += "".join(map(self._stream.push, new_token_ids))
            return None
        shown: list[str] = []
        for token in new_token_ids:
            self._num_tokens += 1
            self._hidden += self._stream.push(token)
            if self._find_stop():
                break
            shown.append(self._reveal())
        self.text += "".join(shown)
        if self.stop is not None:
            self._end(self._hidden)
        return self.stop

    def finish(self) -> None:
        """No token follows: the text withheld so far is shown. Does nothing after a stop string, or twice."""
        if not self._finished:
            self._end(self._hidden + self._stream.flush())

    def clone(self) -> "Detokenizer":
        """Another that goes on from here, for a completion that begins alike."""
        other = copy.copy(self)
        other._stream = self._stream.clone()
        return other

    def _end(self, rest: str) -> None:
        self.text += rest
        self._hidden = ""
        self._finished = True

    def _find_stop(self) -> bool:
        """Looks for a stop string that ends in text not searched before; cuts the hidden text there."""
        # Held text counts: if it holds a stop string, then no token will come that could change it.
        text = self._hidden + self._stream.held
        searched, self._num_searched = self._num_searched, max(self._num_searched, len(text))
        if self._num_tokens <= self._params.min_tokens:
            return False
        matches = []
        for stop in self._params.stops:
            start = text.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return False
        end, start, self.stop = min(matches)
        self._hidden = text[: end if self._params.include_stop_str_in_output else start]
        return True

    def _reveal(self) -> str:
        """The hidden text up to its longest end that a stop string begins with."""
        hidden = self._hidden
        num_shown = min((_overlap_start(hidden, stop) for stop in self._params.stops), default=len(hidden))
        self._hidden = hidden[num_shown:]
        self._num_searched -= num_shown
        return hidden[:num_shown]


def _overlap_start(text: str, stop: str) -> int:
    """Where the longest end of `text` starts that is a beginning of `stop`, but not all of it."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return start
        start = text.find(stop[0], start + 1)
    return len(text)
