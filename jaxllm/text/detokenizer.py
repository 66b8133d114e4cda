"""Decodes one completion incrementally and finds the stop string that ends it."""

import copy
from collections.abc import Sequence

from jaxllm.sampling_params import SamplingParams
from jaxllm.text.overlap import overlap_start
from jaxllm.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one completion and watches for stop strings.

    `text` is safe to show: it only grows, and ends before a stop string and before anything that may become one.
    Of several stop strings the one that completes first wins; of two that complete together, the longer one.
    Like the end of sequence, a stop string within the first `min_tokens` tokens is ignored.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()):
        """`prompt_token_ids`: the text continues this prompt, so that the first token keeps its leading space."""
        self.text = ""
        self.stop: str | None = None
        self._params, self._stops = params, params.stops
        self._stream = tokenizer.stream(
            params.skip_special_tokens,
            prompt_token_ids,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._hidden = ""  # settled text that may be the beginning of a stop string
        self._num_searched = 0  # leading characters of hidden and held text already searched
        self.num_tokens = 0  # taken, while stop strings are watched
        self._finished = not params.detokenize

    def push(self, new_token_ids: Sequence[int]) -> str | None:
        """Takes the next tokens; returns the stop string that one of them completes, or None.

        `text` is then cut before the stop string (after it with `include_stop_str_in_output`), and the completion
        is finished: later tokens are ignored.
        """
        if self._finished:
            return self.stop
        if not self._stops:
            for token in new_token_ids:
                self.text += self._stream.push(token)
            return None
        shown: list[str] = []
        for token in new_token_ids:
            self.num_tokens += 1
            self._hidden += self._stream.push(token)
            if self._find_stop():
                break
            shown.append(self._reveal())
        self.text += "".join(shown)
        if self.stop is not None:
            self._end(self._hidden)
        return self.stop

    def finish(self) -> None:
        """Ends the completion: the withheld text is shown, but for a character of which bytes are missing. Does nothing
        after a stop string or a second time."""
        if not self._finished:
            self._end(self._hidden + self._stream.end())

    def clone(self) -> "Detokenizer":
        """An independent copy, for a completion with the same beginning."""
        other = copy.copy(self)
        other._stream = self._stream.clone()
        return other

    def _end(self, rest: str) -> None:
        self.text += rest
        self._hidden = ""
        self._finished = True

    def _find_stop(self) -> bool:
        """Searches the new text for a stop string and cuts the hidden text there."""
        # Held text counts: once it completes a stop string, the completion ends and no token can change it.
        text = self._hidden + self._stream.held
        searched, self._num_searched = self._num_searched, max(self._num_searched, len(text))
        if self.num_tokens <= self._params.min_tokens:
            return False
        matches = []
        for stop in self._stops:
            start = text.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return False
        end, start, self.stop = min(matches)
        self._hidden = text[: end if self._params.include_stop_str_in_output else start]
        return True

    def _reveal(self) -> str:
        """Returns the hidden text except its longest end that may be the beginning of a stop string."""
        hidden = self._hidden
        num_shown = min((overlap_start(hidden, stop) for stop in self._stops), default=len(hidden))
        self._hidden = hidden[num_shown:]
        self._num_searched -= num_shown
        return hidden[:num_shown]
