"""The sequences of a beam search: which beam goes on in which slot, on which blocks.

A group has as many sequences as the search is wide, each with a slot while the group is on the device. A beam that
goes on stays where it is; each further one that comes from the same beam takes the place of one that died, and shares
all blocks with it (PagedAttention, arXiv 2309.06180, section 4.4).
"""

import copy
from collections import abc
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxllm.engine.beam.candidates import BeamRow, read_candidates
from jaxllm.engine.beam.search import LENGTH, BeamSearch, Continuation, Finished
from jaxllm.engine.logprobs import PackedLogprobs
from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.block_table import BlockTable
from jaxllm.engine.schedule.plan import NO_TOKEN, NO_TOKEN_ERRORS
from jaxllm.engine.schedule.running import RunningSet
from jaxllm.engine.schedule.sequence import End, HasEnd, Sequence, Status
from jaxllm.engine.schedule.sequence_group import GroupRow, GroupStep, SequenceGroup
from jaxllm.grammar.matcher import Matcher
from jaxllm.text.detokenizer import Detokenizer


class TextError(Exception):
    """A beam's text can't be decoded, in which stop strings are to be found."""


class Hypothesis(NamedTuple):
    """What a beam has generated. The lists are never changed, so that beams may share them."""

    token_ids: list[int]
    logprobs: list[PackedLogprobs]
    text: Detokenizer | None = None  # if stop strings are watched; not changed either
    matcher: Matcher | None = None  # as a sequence's; not changed either
    versions: tuple[tuple[int, int], ...] = ()  # as a sequence's


class BeamState(NamedTuple):
    """How far a beam search is: replaced as a whole, so that no failure leaves half of it."""

    search: BeamSearch
    hypotheses: list[Hypothesis]  # of the living beams, in the order of the search's scores


@dataclass(eq=False, slots=True, kw_only=True)
class BeamResult(HasEnd):
    """A hypothesis that a search returns. It reads like a finished `Sequence`."""

    sample_index: int
    output_token_ids: list[int]
    logprobs: list[PackedLogprobs]
    stop_ids: frozenset[int]
    end: End | None
    versions: tuple[tuple[int, int], ...]


class BeamSearchGroup(SequenceGroup):
    """The beams of one search. `text` is a detokenizer if stop strings are to be found."""

    chooses_tokens = True

    def __init__(self, sequences: list[Sequence], text: Detokenizer | None = None):
        super().__init__(sequences)
        first = sequences[0]
        params = first.params
        assert params.beam_width is not None
        search = BeamSearch(
            width=params.beam_width,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            max_new_tokens=first.max_total_len - len(first.prompt_token_ids),
            num_stop_ids=len(first.stop_ids),
        )
        self.state = BeamState(search, [Hypothesis([], [], text, first.matcher)])
        self.beams = sequences[:1]  # the living ones, in the order of the state's hypotheses
        self.rows: dict[Sequence, BeamRow] = {}  # of living beams, until all have theirs
        self.results: list[BeamResult] | None = None  # once the search is over, best first

    def disband(self) -> None:
        pass  # the first of them stands for the others

    @property
    def live(self) -> list[Sequence]:
        return self.beams

    def companions(self, parent: Sequence) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence is not parent]

    def forks(self, parent: Sequence) -> list[Sequence]:
        return [beam for beam in self.beams if beam is not parent]

    def head(self, sequence: Sequence) -> Sequence:
        return self.sequences[0]

    def num_slots(self, num_entering: int) -> int:
        return len(self.sequences)

    def returning(self, victims: list[Sequence]) -> list[Sequence]:
        return self.beams

    def split_off(self, sequence: Sequence) -> None:
        raise AssertionError("beams that were accepted fit the pool alone")

    def finish(self, sequence: Sequence, end: End) -> list[Sequence]:
        self.results = self.results or self._collect(end)
        return self.sequences

    def _collect(self, end: End) -> list[BeamResult]:
        """The best of the search: what is finished and, if it is given up, what lives, which comes to this `end`."""
        search, hypotheses = self.state
        ended: list[tuple[Hypothesis, End]] = []
        for entry in search.best(self.sequences[0].params.n):
            if isinstance(entry, Finished):
                hypothesis, why = entry.payload
                why = End("length") if why == LENGTH else why
                ended.append((hypothesis, why._replace(error=end.error)))
            else:
                ended.append((hypotheses[entry], end))
        if not ended:
            ended.append((Hypothesis([], []), end))
        return [
            BeamResult(
                sample_index=index,
                output_token_ids=hypothesis.token_ids,
                logprobs=hypothesis.logprobs,
                stop_ids=self.sequences[0].stop_ids,
                end=why,
                versions=hypothesis.versions,
            )
            for index, (hypothesis, why) in enumerate(ended)
        ]

    def commit(self, sequence: Sequence, row: GroupRow, running_set: RunningSet) -> GroupStep:
        """Takes one beam's candidates. The last beam's let the search go on by a token."""
        if sequence.status is not Status.RUNNING:  # it is to be preempted, and its row will come again
            sequence.num_computed -= 1
            return GroupStep([], None)
        assert isinstance(row, BeamRow), "the engine reads them so"
        self.rows[sequence], sequence.status = row, Status.HELD
        if len(self.rows) < len(self.beams):
            return GroupStep([], None)
        prefix_cache, block_size = running_set.prefix_cache, running_set.pool.block_size
        for beam in self.beams:  # before some of them end: others may wait for what they have written
            if (beam.table.num_keyed + 1) * block_size <= beam.num_computed:
                prefix_cache.offer(beam, beam.num_computed)
            prefix_cache.end(beam)  # also for what it may not offer, of older parameters
        try:
            moved = self._advance(running_set.pool)
        except TextError as error:
            return GroupStep([], End("error", error=str(error)))
        if not self.state.search.done:
            return GroupStep(moved, None)
        if not self.state.search.finished:
            return GroupStep([], End("error", error=NO_TOKEN_ERRORS[NO_TOKEN]))
        return GroupStep([], End("stop"))

    def _advance(self, pool: BlockPool) -> list[Sequence]:
        """Takes the candidates of all living beams; returns those whose slots' rows are out of date. Nobody lives on
        if the search is done. Raises TextError before anything has changed."""
        search, step = copy.copy(self.state.search), _Extension(self)
        continuations = search.advance([self.rows[beam].candidates for beam in self.beams], step.end, step.keep)
        self.state = BeamState(search, [step.extend(continuation) for continuation in continuations])
        return [] if search.done else self._place(continuations, pool)

    def _place(self, continuations: list[Continuation], pool: BlockPool) -> list[Sequence]:
        """Gives each continuation a sequence: its parent's, or one that has died."""
        parents = [self.beams[continuation.beam] for continuation in continuations]
        staying = set(parents)
        free = [sequence for sequence in self.sequences if sequence not in staying]
        num_computed = parents[0].num_computed
        forks: list[BlockTable] = []
        beams, has_child = [], set()
        for parent in parents:
            if parent in has_child:
                beams.append(free[len(forks)])
                forks.append(parent.table.fork(num_computed, num_computed))
            else:
                has_child.add(parent)
                beams.append(parent)
        for sequence in free:
            sequence.table.release()
            sequence.vacate()
            sequence.table = BlockTable(
                pool, keeps_first=sequence.params.reads_history
            )  # without the keys of what died
        for sequence, table in zip(free, forks, strict=False):
            sequence.table, sequence.num_computed = table, num_computed
        self.beams = beams
        self._give_tokens()
        self.rows = {}
        for beam in beams:
            beam.status = Status.RUNNING
        return [beam for beam in beams if beam not in has_child]

    def take_back(self, sequence: Sequence) -> None:
        if self.rows.pop(sequence, None) is not None:
            sequence.num_computed -= 1

    def _give_tokens(self) -> None:
        for beam, hypothesis in zip(self.beams, self.state.hypotheses, strict=True):
            beam.own_token_ids, beam.own_logprobs = hypothesis.token_ids, hypothesis.logprobs
            beam.matcher = hypothesis.matcher

    def restart(self) -> None:
        self.beams = self.sequences[: len(self.state.hypotheses)]
        for sequence in self.sequences:
            sequence.vacate()
        self._give_tokens()
        self.rows, self.waiting, self.host_copy = {}, [], None
        for sequence in self.sequences:
            sequence.leave_device()


def read_rows(
    samples: abc.Sequence[Sequence], rows: np.ndarray, logprobs: abc.Sequence[Any] | np.ndarray
) -> list[BeamRow | None]:
    """What a step says of each of the `samples` that is a beam, from the device's `candidate_rows`, int32
    `[>= len(samples), CANDIDATES_WIDTH]`, and what is kept of each sample's token."""
    return [
        BeamRow(read_candidates(row, sequence.group.state.search.num_candidates), others)
        if isinstance(sequence.group, BeamSearchGroup)
        else None
        for sequence, row, others in zip(samples, rows, logprobs, strict=False)
    ]


class _Extension:
    """One more token for each hypothesis: whether it ends there, and what becomes of it."""

    def __init__(self, group: BeamSearchGroup):
        self._beams, self._rows, self._hypotheses = group.beams, group.rows, group.state.hypotheses
        self._texts: dict[tuple[int, int], Detokenizer] = {}  # of continuations, while stop strings are watched
        self._matchers: dict[tuple[int, int], Matcher] = {}  # likewise, while they follow a grammar

    def end(self, beam: int, token: int) -> End | None:
        sequence, hypothesis = self._beams[beam], self._hypotheses[beam]
        is_past_min = len(hypothesis.token_ids) + 1 >= sequence.params.min_tokens
        if token in sequence.stop_ids and is_past_min:
            return End("stop", None if token in sequence.eos_ids else token)
        if hypothesis.text is not None:
            self._texts[beam, token] = text = _extended(hypothesis.text, token)
            if text.stop is not None:
                return End("stop", text.stop)
        if hypothesis.matcher is not None:
            self._matchers[beam, token] = matcher = hypothesis.matcher.after(token)
            if matcher.is_over and matcher.error is None:
                return End("stop")
        return None

    def extend(self, continuation: Continuation) -> Hypothesis:
        hypothesis, beam = self._hypotheses[continuation.beam], self._beams[continuation.beam]
        logprob = self._rows[beam].packed_logprobs(continuation.logprob, continuation.rank)
        key = continuation.beam, continuation.token
        token_ids, logprobs = hypothesis.token_ids + [continuation.token], hypothesis.logprobs + [logprob]
        versions = hypothesis.versions
        if not versions or versions[-1][1] != beam.version:
            versions = (*versions, (len(hypothesis.token_ids), beam.version))
        return Hypothesis(token_ids, logprobs, self._texts.get(key), self._matchers.get(key), versions)

    def keep(self, continuation: Continuation, reason: End | str) -> tuple[Hypothesis, End | str]:
        return self.extend(continuation), reason


def _extended(text: Detokenizer, token: int) -> Detokenizer:
    text = text.clone()
    try:
        text.push([token])
    except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
        raise TextError(f"decoding its text failed: {error}") from error
    return text
