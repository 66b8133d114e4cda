"""Takes what a step has drawn into its sequences: tokens are appended, ends found."""

from collections import abc, deque
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.engine.schedule.plan import NO_TOKEN_ERRORS, NOT_ACCEPTED, NOT_FINITE, Plan
from jaxllm.engine.schedule.running import RunningSet
from jaxllm.engine.schedule.sequence import End, Sequence
from jaxllm.engine.schedule.sequence_group import GroupRow

if TYPE_CHECKING:
    from jaxllm.engine.logprobs import PackedLogprobs


_tokens_of, _logprobs_of = attrgetter("own_token_ids"), attrgetter("own_logprobs")

Finish = Callable[[Sequence, End], None]
Drawn = abc.Mapping[int, tuple[int, Any]]  # by sample: a token, and what else there is to keep


class Committer:
    """Commits steps to sequences of `running_set`."""

    def __init__(self, running_set: RunningSet):
        self.running_set = running_set
        self._block_size = running_set.pool.block_size
        self.moved: list[Sequence] = []  # beams whose slot rows are out of date
        self.num_not_finite = 0  # sequences that ended for their logits
        self._version = -1  # of the step that was committed last

    def commit(
        self,
        plan: Plan,
        sampled: abc.Sequence[int] | np.ndarray,
        logprobs: "abc.Sequence[PackedLogprobs | float | None] | np.ndarray | None" = None,
        candidates: abc.Sequence[GroupRow | None] | None = None,
        *,
        finish: Finish,
    ) -> list[Sequence]:
        """Appends the samples' tokens, in the plan's order, and ends what is over. Returns the sequences that ended,
        and those that report each token.

        A sequence whose drafts were verified has several samples. It takes the list of those before the first that is
        `NOT_ACCEPTED`, which may be empty, up to its end. Other negative tokens are keys of `NO_TOKEN_ERRORS`.
        `logprobs` has what else there is to keep of each sample, as an array where that is a number of each,
        `candidates` for each beam what it may go on with, and None for others. `finish` ends a sequence at once.
        """
        updated: list[Sequence] = []
        sampled, version = np.asarray(sampled, np.int32), plan.params_version
        rows = [*self._commit_steady(plan, sampled, logprobs, updated), *range(plan.num_steady, len(plan.samples))]
        self._version = version
        drawn = _drawn(rows, sampled, logprobs)
        after = 0  # samples that were taken as a list
        for i, (token, kept) in drawn.items():
            sequence = plan.samples[i]
            if sequence.epoch != plan.epochs[i]:
                continue
            if sequence.version != version:
                sequence.note_version(version)
            if sequence.batch is not None and token >= 0 and token not in sequence.stop_ids:
                sequence.output_token_ids.append(token)  # a steady decode: no other state changes
                if kept is not None:
                    sequence.logprobs.append(kept)
                if sequence.reports_tokens:
                    updated.append(sequence)
                continue
            if candidates is not None and (row := candidates[i]) is not None and token != NOT_FINITE:
                updated += self._commit_to_group(sequence, row, finish)
                continue
            if i < after:
                continue
            if i + 1 in plan.drafts:
                after = self._commit_list(plan, i, drawn, finish)
            else:
                self._commit_token(sequence, token, kept, finish)
            if sequence.reports_tokens or sequence.end is not None:
                updated.append(sequence)
        return updated

    def _commit_steady(
        self,
        plan: Plan,
        sampled: np.ndarray,
        logprobs: "abc.Sequence[PackedLogprobs | float | None] | np.ndarray | None",
        updated: list[Sequence],
    ) -> abc.Sequence[int]:
        """Appends the tokens of the decode batch's rows to which nothing else happens: without a look at any of them,
        unless someone looks at each token. Returns the others."""
        num, batch = plan.num_steady, plan.batch
        if not num or batch is None or batch is not self.running_set.batch:
            return range(num)
        if plan.params_version != self._version:
            batch.deliver_all()
            return range(num)
        samples, slots, tokens = plan.samples, np.frombuffer(plan.decode_slots, np.int32)[:num], sampled[:num]
        rows = batch.rows_apart(plan.batch_step, slots, tokens)
        if not batch.num_reporting and (logprobs is None or isinstance(logprobs, np.ndarray)):
            numbers = None if logprobs is None else logprobs[:num]
            batch.note(plan.batch_step, slots, tokens, numbers, [samples[row] for row in rows])
            return rows
        batch.deliver_all()
        at, tokens = 0, tokens.tolist()
        for row in (*rows, num):  # between those that are left to the caller
            _append_each(map(_tokens_of, samples[at:row]), tokens[at:row])
            if logprobs is not None:
                kept = logprobs[at:row]
                kept = kept.tolist() if isinstance(kept, np.ndarray) else kept
                keeping = [sequence for sequence, one in zip(samples[at:row], kept, strict=True) if one is not None]
                _append_each(map(_logprobs_of, keeping), (one for one in kept if one is not None))
            if batch.num_reporting:
                updated += [sequence for sequence in samples[at:row] if sequence.reports_tokens]
            at = row + 1
        return rows

    def _commit_list(self, plan: Plan, start: int, drawn: Drawn, finish: Finish) -> int:
        """Takes the samples of a sequence with drafts, which begin at `start`, as far as they were accepted and up to
        its end. Returns where they end."""
        sequence, stop = plan.samples[start], start + 1
        while stop in plan.drafts:
            stop += 1
        num_accepted = next((i for i in range(stop - start) if drawn[start + i][0] == NOT_ACCEPTED), stop - start)
        sequence.num_computed -= stop - start - num_accepted
        sequence.table.shrink(sequence.num_computed)
        for i in range(start, start + num_accepted):
            self._commit_token(sequence, *drawn[i], finish)
            if sequence.end is not None:
                break
        return stop

    def _commit_token(
        self, sequence: Sequence, token: int, kept: "PackedLogprobs | float | None", finish: Finish
    ) -> None:
        if token < 0:
            self.num_not_finite += token == NOT_FINITE
            finish(sequence, End("error", error=NO_TOKEN_ERRORS[token]))
            return
        if kept is not None:
            sequence.logprobs.append(kept)
        sequence.output_token_ids.append(token)
        num_computed = sequence.num_computed
        if (sequence.table.num_keyed + 1) * self._block_size <= num_computed:
            self.running_set.prefix_cache.offer(sequence, min(num_computed, sequence.num_tokens))
        if self.running_set.retries:
            self.running_set.retries.forget_if_past(sequence, sequence.num_tokens)
        end = _end_after(sequence, token)
        if end is not None:
            finish(sequence, end)

    def _commit_to_group(self, sequence: Sequence, row: GroupRow, finish: Finish) -> list[Sequence]:
        """Lets the sequence's group choose its next token. Returns the group's head if its sequences end."""
        group, head = sequence.group, sequence.group.head(sequence)
        moved, end = group.commit(sequence, row, self.running_set)
        self.moved += moved
        if end is not None:
            finish(head, end)
            return [head]
        self.running_set.retries.forget_if_past(head, group.live[0].num_tokens)
        return []


def _drawn(rows: list[int], sampled: np.ndarray, logprobs: Any) -> dict[int, tuple[int, Any]]:
    """Of these samples."""
    if isinstance(logprobs, np.ndarray):
        kept = logprobs[rows].tolist()
    else:
        kept = [None] * len(rows) if logprobs is None else [logprobs[row] for row in rows]
    return dict(zip(rows, zip(sampled[rows].tolist(), kept, strict=True), strict=True))


def _append_each(lists: abc.Iterable[list[Any]], values: abc.Iterable[Any]) -> None:
    """Appends each value to a list of its own, without a turn of Python's for each."""
    deque(map(list.append, lists, values), maxlen=0)


def _end_after(sequence: Sequence, token: int) -> End | None:
    """Why the sequence ends with `token`, the last of its output; None if it goes on."""
    if token in sequence.stop_ids and len(sequence.output_token_ids) >= sequence.params.min_tokens:
        return End("stop", None if token in sequence.eos_ids else token)
    if sequence.matcher is not None and sequence.matcher.ends_after(sequence.output_token_ids):
        error = sequence.matcher.error
        return End("error" if error else "stop", error=error)
    if sequence.num_tokens >= sequence.max_total_len:
        return End("length")
    return None
