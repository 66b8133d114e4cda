"""A round of beam search, as it happens to sequences: which beam goes on in which slot, on which blocks.

A group of beams has as many members as the search is wide, each with a slot while the group is on the device. A beam
that goes on stays where it is; each further one that comes from the same beam takes the place of one that died, and
shares all blocks with it (PagedAttention, arXiv 2309.06180, section 4.4).
"""

import copy
from typing import Any

from jaxllm.engine.beam.search import LENGTH, BeamSearch, Continuation, Finished
from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.sequence import Line, Request, Round, SequenceGroup, Status
from jaxllm.outputs import FinishReason


class TextError(Exception):
    """A beam's text can't be decoded, in which stop strings are to be found."""


def start(members: list[Request], text: Any = None) -> SequenceGroup:
    """The group of a search that has not begun. `text` is a detokenizer if stop strings are to be found."""
    first = members[0]
    params = first.params
    search = BeamSearch(
        width=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=first.max_total_len - len(first.prompt_token_ids),
        num_stop_ids=len(first.stop_ids),
    )
    group = SequenceGroup(members, Round(search, [Line([], [], text, first.matcher)]), members[:1])
    for member in members:
        member.group = group
    return group


def advance(group: SequenceGroup, pool: BlockPool) -> list[Request]:
    """Takes the candidates of all living beams; returns those whose slots' rows are out of date. Nobody lives on if
    the search is done. Raises TextError before anything has changed."""
    search, lines = copy.copy(group.round.search), group.round.lines
    texts: dict[tuple[int, int], Any] = {}  # of continuations, while stop strings are watched
    matchers: dict[tuple[int, int], Any] = {}  # likewise, while they follow a grammar

    def ends(beam: int, token: int) -> tuple[FinishReason, int | str | None] | None:
        member = group.beams[beam]
        is_past_min = len(lines[beam].token_ids) + 1 >= member.params.min_tokens
        if token in member.stop_ids and is_past_min:
            return "stop", None if token in member.eos_ids else token
        if lines[beam].text is not None:
            texts[beam, token] = text = _extended(lines[beam].text, token)
            if text.stop is not None:
                return "stop", text.stop
        if lines[beam].matcher is not None:
            matchers[beam, token] = matcher = lines[beam].matcher.after(token)
            if matcher.is_over and matcher.error is None:
                return "stop", None
        return None

    def extend(continuation: Continuation) -> Line:
        line, row = lines[continuation.beam], group.beams[continuation.beam].candidates
        logprob = row.kept(continuation.logprob, continuation.rank)
        key = continuation.beam, continuation.token
        token_ids, logprobs = line.token_ids + [continuation.token], line.logprobs + [logprob]
        return Line(token_ids, logprobs, texts.get(key), matchers.get(key))

    def keep(continuation: Continuation, reason: Any) -> tuple[Line, Any]:
        return extend(continuation), reason

    continuations = search.advance([beam.candidates.candidates for beam in group.beams], ends, keep)
    # The round is over with this, whatever interrupts what follows.
    group.round = Round(search, [extend(continuation) for continuation in continuations])
    return [] if search.done else _reseat(group, continuations, pool)


def _extended(text: Any, token: int) -> Any:
    text = text.clone()
    try:
        text.push([token])
    except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
        raise TextError(f"decoding its text failed: {error}") from error
    return text


def _reseat(group: SequenceGroup, continuations: list[Continuation], pool: BlockPool) -> list[Request]:
    parents = [group.beams[continuation.beam] for continuation in continuations]
    staying = set(parents)
    free = [member for member in group.members if member not in staying]
    forks: list[tuple[Request, list[int]]] = []
    beams, has_child = [], set()
    for parent in parents:
        if parent in has_child:
            pool.acquire(parent.block_ids)
            forks.append((parent, list(parent.block_ids)))
            beams.append(free[len(forks) - 1])
        else:
            has_child.add(parent)
            beams.append(parent)
    for member in free:  # after those who share their blocks have them
        pool.release(member.block_ids)
        member.vacate()
    shares_tail = parents[0].num_computed % pool.block_size > 0
    for member, (parent, block_ids) in zip(free, forks, strict=False):
        member.share(parent, block_ids, parent.num_computed, parent.num_keyed)
        member.shares_tail = parent.shares_tail = shares_tail
    for beam, line in zip(beams, group.round.lines, strict=True):
        beam.output_token_ids, beam.logprobs, beam.matcher = line.token_ids, line.logprobs, line.matcher
        beam.num_tokens = len(beam.prompt_token_ids) + len(line.token_ids)
        beam.candidates, beam.status = None, Status.RUNNING
    group.beams = beams
    if beams[0].params.has_history:  # what the sampler remembers of a beam is what it would have taken itself
        return beams
    return [beam for beam in beams if beam not in has_child]


def restore(group: SequenceGroup) -> None:
    """Gives the living beams' tokens to members again, after an interrupt."""
    group.beams = group.members[: len(group.round.lines)]
    for member in group.members:
        member.vacate()
    for beam, line in zip(group.beams, group.round.lines, strict=True):
        beam.output_token_ids, beam.logprobs, beam.matcher = line.token_ids, line.logprobs, line.matcher


def results(group: SequenceGroup, reason: FinishReason, error: str | None) -> list[Request]:
    """The best of a search: what is finished and, if it is given up, what lives, which ends by `reason`."""
    first, (search, lines) = group.members[0], group.round
    ended = []
    for index, entry in enumerate(search.best(first.params.n)):
        if isinstance(entry, Finished):
            line, why = entry.payload
            why = ("length", None) if why == LENGTH else why
        else:
            line, why = lines[entry], (reason, None)
        ended.append(_result(first, index, line, why, error))
    return ended or [_result(first, 0, Line([], []), (reason, None), error)]


def _result(first: Request, index: int, line: Line, why: tuple[Any, Any], error: str | None) -> Request:
    return Request(
        prompt_token_ids=first.prompt_token_ids,
        params=first.params,
        arrival=first.arrival,
        seed=first.seed,
        max_total_len=first.max_total_len,
        sample_index=index,
        owner=first.owner,
        output_token_ids=line.token_ids,
        logprobs=line.logprobs,
        prompt_logprobs=first.prompt_logprobs,
        num_cached=first.num_cached,
        stop_ids=first.stop_ids,
        status=Status.FINISHED,
        finish_reason=why[0],
        stop_reason=why[1],
        error=error,
    )
