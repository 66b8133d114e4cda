"""A beam_state of beam search, as it happens to sequences: which beam goes on in which slot, on which blocks.

A group of beams has as many sequences as the search is wide, each with a slot while the group is on the device. A beam
that goes on stays where it is; each further one that comes from the same beam takes the place of one that died, and
shares all blocks with it (PagedAttention, arXiv 2309.06180, section 4.4).
"""

import copy
from typing import Any

from jaxllm.engine.beam.search import LENGTH, BeamSearch, Continuation, Finished
from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.sequence import BeamState, Hypothesis, Sequence, SequenceGroup, Status
from jaxllm.outputs import FinishReason


class TextError(Exception):
    """A beam's text can't be decoded, in which stop strings are to be found."""


def start(sequences: list[Sequence], text: Any = None) -> SequenceGroup:
    """The group of a search that has not begun. `text` is a detokenizer if stop strings are to be found."""
    first = sequences[0]
    params = first.params
    search = BeamSearch(
        width=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=first.max_total_len - len(first.prompt_token_ids),
        num_stop_ids=len(first.stop_ids),
    )
    group = SequenceGroup(sequences, BeamState(search, [Hypothesis([], [], text, first.matcher)]), sequences[:1])
    for sequence in sequences:
        sequence.group = group
    return group


def advance(group: SequenceGroup, pool: BlockPool) -> list[Sequence]:
    """Takes the candidates of all living beams; returns those whose slots' rows are out of date. Nobody lives on if
    the search is done. Raises TextError before anything has changed."""
    search, hypotheses = copy.copy(group.beam_state.search), group.beam_state.hypotheses
    texts: dict[tuple[int, int], Any] = {}  # of continuations, while stop strings are watched
    matchers: dict[tuple[int, int], Any] = {}  # likewise, while they follow a grammar

    def ends(beam: int, token: int) -> tuple[FinishReason, int | str | None] | None:
        sequence = group.beams[beam]
        is_past_min = len(hypotheses[beam].token_ids) + 1 >= sequence.params.min_tokens
        if token in sequence.stop_ids and is_past_min:
            return "stop", None if token in sequence.eos_ids else token
        if hypotheses[beam].text is not None:
            texts[beam, token] = text = _extended(hypotheses[beam].text, token)
            if text.stop is not None:
                return "stop", text.stop
        if hypotheses[beam].matcher is not None:
            matchers[beam, token] = matcher = hypotheses[beam].matcher.after(token)
            if matcher.is_over and matcher.error is None:
                return "stop", None
        return None

    def extend(continuation: Continuation) -> Hypothesis:
        hypothesis, row = hypotheses[continuation.beam], group.beams[continuation.beam].candidates
        logprob = row.packed_logprobs(continuation.logprob, continuation.rank)
        key = continuation.beam, continuation.token
        token_ids, logprobs = hypothesis.token_ids + [continuation.token], hypothesis.logprobs + [logprob]
        return Hypothesis(token_ids, logprobs, texts.get(key), matchers.get(key))

    def keep(continuation: Continuation, reason: Any) -> tuple[Hypothesis, Any]:
        return extend(continuation), reason

    continuations = search.advance([beam.candidates.candidates for beam in group.beams], ends, keep)
    # The beam_state is over with this, whatever interrupts what follows.
    group.beam_state = BeamState(search, [extend(continuation) for continuation in continuations])
    return [] if search.done else _reseat(group, continuations, pool)


def _extended(text: Any, token: int) -> Any:
    text = text.clone()
    try:
        text.push([token])
    except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
        raise TextError(f"decoding its text failed: {error}") from error
    return text


def _reseat(group: SequenceGroup, continuations: list[Continuation], pool: BlockPool) -> list[Sequence]:
    parents = [group.beams[continuation.beam] for continuation in continuations]
    staying = set(parents)
    free = [sequence for sequence in group.sequences if sequence not in staying]
    forks: list[tuple[Sequence, list[int]]] = []
    beams, has_child = [], set()
    for parent in parents:
        if parent in has_child:
            pool.acquire(parent.block_ids)
            forks.append((parent, list(parent.block_ids)))
            beams.append(free[len(forks) - 1])
        else:
            has_child.add(parent)
            beams.append(parent)
    for sequence in free:  # after those who share their blocks have them
        pool.release(sequence.block_ids)
        sequence.vacate()
    shares_tail = parents[0].num_computed % pool.block_size > 0
    for sequence, (parent, block_ids) in zip(free, forks, strict=False):
        sequence.share(parent, block_ids, parent.num_computed, parent.num_keyed)
        sequence.shares_tail = parent.shares_tail = shares_tail
    for beam, hypothesis in zip(beams, group.beam_state.hypotheses, strict=True):
        beam.output_token_ids, beam.logprobs, beam.matcher = (
            hypothesis.token_ids,
            hypothesis.logprobs,
            hypothesis.matcher,
        )
        beam.num_tokens = len(beam.prompt_token_ids) + len(hypothesis.token_ids)
        beam.candidates, beam.status = None, Status.RUNNING
    group.beams = beams
    if beams[0].params.has_history:  # what the sampler remembers of a beam is what it would have taken itself
        return beams
    return [beam for beam in beams if beam not in has_child]


def restore(group: SequenceGroup) -> None:
    """Gives the living beams' tokens to sequences again, after an interrupt."""
    group.beams = group.sequences[: len(group.beam_state.hypotheses)]
    for sequence in group.sequences:
        sequence.vacate()
    for beam, hypothesis in zip(group.beams, group.beam_state.hypotheses, strict=True):
        beam.output_token_ids, beam.logprobs, beam.matcher = (
            hypothesis.token_ids,
            hypothesis.logprobs,
            hypothesis.matcher,
        )


def results(group: SequenceGroup, reason: FinishReason, error: str | None) -> list[Sequence]:
    """The best of a search: what is finished and, if it is given up, what lives, which ends by `reason`."""
    first, (search, hypotheses) = group.sequences[0], group.beam_state
    ended = []
    for index, entry in enumerate(search.best(first.params.n)):
        if isinstance(entry, Finished):
            hypothesis, why = entry.payload
            why = ("length", None) if why == LENGTH else why
        else:
            hypothesis, why = hypotheses[entry], (reason, None)
        ended.append(_result(first, index, hypothesis, why, error))
    return ended or [_result(first, 0, Hypothesis([], []), (reason, None), error)]


def _result(first: Sequence, index: int, hypothesis: Hypothesis, why: tuple[Any, Any], error: str | None) -> Sequence:
    return Sequence(
        prompt_token_ids=first.prompt_token_ids,
        params=first.params,
        arrival=first.arrival,
        seed=first.seed,
        max_total_len=first.max_total_len,
        sample_index=index,
        request=first.request,
        output_token_ids=hypothesis.token_ids,
        logprobs=hypothesis.logprobs,
        prompt_logprobs=first.prompt_logprobs,
        num_cached=first.num_cached,
        stop_ids=first.stop_ids,
        status=Status.FINISHED,
        finish_reason=why[0],
        stop_reason=why[1],
        error=error,
    )
