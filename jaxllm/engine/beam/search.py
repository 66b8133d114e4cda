"""Beam search for one prompt: which continuations live on, which are finished, when it is over. Host numbers only."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

LENGTH = "length"  # why a continuation ended that could be no longer


class Candidates(NamedTuple):
    """Tokens that may follow a beam, best first. Arrays of one length."""

    token_ids: np.ndarray  # int32
    scores: np.ndarray  # float32: log-probabilities (nats) after masks, bias and penalties; finite
    logprobs: np.ndarray  # float32: of the tokens under the model
    ranks: np.ndarray  # int32: 1 is the model's most likely token


class Continuation(NamedTuple):
    """A beam that lives on, extended by one token."""

    beam: int  # its index among the live beams before
    token: int
    score: float  # cumulative: the sum of its tokens' scores
    logprob: float  # of the token alone, under the model
    rank: int


class Finished(NamedTuple):
    """A continuation that ended its beam."""

    score: float  # cumulative / num_tokens ** length_penalty
    continuation: Continuation
    reason: Any  # why it ended
    payload: Any  # what the caller keeps of it


class BeamSearch:
    """The `width` best continuations of one prompt, as transformers' beam search (without sampling) finds them.

    It knows indices and scores; the caller owns the tokens, and extends the beams as `advance` says. With
    `early_stopping` True the search is over when `width` beams are finished. Otherwise also the best live beam must
    have no better normalized score than the worst of them; "never", with a `length_penalty` above 0, takes the live
    beam's score as if it already had all its tokens, the best that it can come to. `scores` and `finished` are
    replaced, never changed: a shallow copy of the search stays as it was.
    """

    def __init__(
        self,
        *,
        width: int,
        length_penalty: float,
        early_stopping: bool | Literal["never"],
        max_new_tokens: int,
        num_stop_ids: int,
    ):
        self.width, self.length_penalty, self.early_stopping = width, length_penalty, early_stopping
        self.max_new_tokens = max_new_tokens
        self.num_candidates = max(2, 1 + num_stop_ids) * width  # a step considers: enough with all stop ids among them
        self.num_tokens = 0  # generated so far by each live beam
        self.scores = [0.0]  # cumulative, of the live beams, best first
        self.finished: list[Finished] = []  # best first, at most `width`
        self.done = False

    def advance(
        self,
        candidates: Sequence[Candidates],
        ends: Callable[[int, int], Any],
        keep: Callable[[Continuation, Any], Any],
    ) -> list[Continuation]:
        """Takes the live beams one token further, of the `candidates` of each; returns those that live on, best first
        (fewer than `width` if the candidates are few, none once `done`).

        `ends(beam, token)` gives the reason why a token ends a beam, or None; it is asked once for each continuation
        that matters. Whatever reaches `max_new_tokens` ends, by `LENGTH` if for no other reason. What ends is finished
        if it is among the `width` best, live and ended, of this step, and among the `width` best of all that finished;
        `keep(continuation, reason)` then makes its payload. If the candidates run out before anything was finished,
        the search is `done` with nothing in `finished`.
        """
        assert not self.done and len(candidates) == len(self.scores)
        self.num_tokens += 1
        is_last = self.num_tokens >= self.max_new_tokens
        live: list[Continuation] = []
        ended: list[tuple[Continuation, Any]] = []
        for i, continuation in enumerate(self._merge(candidates)):
            if i >= self.width and (is_last or len(live) == self.width):
                break  # it can neither be finished nor live
            reason = ends(continuation.beam, continuation.token)
            if reason is None and is_last:
                reason = LENGTH
            if reason is None:
                live.append(continuation)
            elif i < self.width:
                ended.append((continuation, reason))
        if ended:
            self._finish(ended, keep)
        self.scores = [continuation.score for continuation in live]
        self.done = not live or self._cannot_improve()
        if self.done:
            live, self.scores = [], []
        return live

    def best(self, n: int) -> list[Finished | int]:
        """The `n` best by normalized score, finished ones and live ones (as indices) alike: the result of a search
        that is done, and what there is of one that is given up."""
        live = [(self.normalized(score), i) for i, score in enumerate(self.scores)]
        ranked = sorted([(finished.score, finished) for finished in self.finished] + live, key=_first, reverse=True)
        return [entry for _, entry in ranked[:n]]

    def normalized(self, score: float, num_tokens: int | None = None) -> float:
        """A cumulative score made comparable with those of other lengths; without `num_tokens`, of a live beam."""
        return score / max(1, self.num_tokens if num_tokens is None else num_tokens) ** self.length_penalty

    def _merge(self, candidates: Sequence[Candidates]) -> Iterator[Continuation]:
        """The best continuations, best first; among equals the earlier beam's, then its earlier candidate's."""
        # In float64, so that a long sum doesn't blur small differences.
        sums = [np.add(c.scores, score, dtype=np.float64) for c, score in zip(candidates, self.scores, strict=True)]
        tokens, _, logprobs, ranks = (np.concatenate(column) for column in zip(*candidates, strict=True))
        beams = np.repeat(np.arange(len(sums)), [len(of_beam) for of_beam in sums])
        scores = np.concatenate(sums)
        order = np.argsort(-scores, kind="stable")[: self.num_candidates]
        columns = (column[order].tolist() for column in (beams, tokens, scores, logprobs, ranks))
        return map(Continuation, *columns)

    def _finish(self, ended: Sequence[tuple[Continuation, Any]], keep: Callable[[Continuation, Any], Any]) -> None:
        """Merges what ended in this step into `finished`; among equals, who finished first stays."""
        before = len(self.finished)
        both = self.finished + [Finished(self.normalized(c.score), c, reason, None) for c, reason in ended]
        order = sorted(range(len(both)), key=lambda i: both[i].score, reverse=True)[: self.width]
        for i in order:
            if i >= before:
                both[i] = both[i]._replace(payload=keep(both[i].continuation, both[i].reason))
        self.finished = [both[i] for i in order]

    def _cannot_improve(self) -> bool:
        """Whether enough is finished, and nothing live is expected to be better."""
        if len(self.finished) < self.width:
            return False
        if self.early_stopping is True:
            return True
        is_patient = self.early_stopping == "never" and self.length_penalty > 0
        num_tokens = self.max_new_tokens if is_patient else self.num_tokens
        return self.normalized(self.scores[0], num_tokens) <= self.finished[-1].score


def _first(entry: tuple[float, Any]) -> float:
    return entry[0]
