"""What becomes of a step's results: tokens, log-probabilities, pooled hidden states, ends."""

import time
from typing import Any

import numpy as np

from jaxllm.engine.beam.candidates import BeamRow
from jaxllm.engine.beam.group import read_rows
from jaxllm.engine.device.encoder import PromptLogprobSpan
from jaxllm.engine.device.runner import Result
from jaxllm.engine.logprobs import PackedLogprobs, own_logprobs, pack_logprobs, pack_own_logprobs
from jaxllm.engine.schedule.plan import NO_TOKEN_ERRORS, NOT_FINITE, NOT_FINITE_POOLED, PooledSpan, StepPlan
from jaxllm.engine.schedule.scheduler import Scheduler
from jaxllm.engine.schedule.sequence import BARE_LOGPROBS, End, Sequence
from jaxllm.engine.schedule.shards import Shards
from jaxllm.grammar.matcher import NO_TOKEN_ALLOWED


def commit(scheduler: Scheduler | Shards, plan: StepPlan, result: Result) -> list[Sequence]:
    """Gives the sequences of `plan` what came of it. Returns those that have news."""
    now = time.monotonic()
    for shard in plan.shards:
        sampling = [chunk.sequence for chunk in shard.chunks if chunk.num_samples]
        for sequence in (*shard.decodes[shard.num_steady :], *sampling):  # all that get their first token
            sequence.request.sampled(now)
    ended = [each[0].sequence for each in result.pooled if _end_pooled(scheduler, *each)]
    ended += [each[0].sequence for each in result.prompt_logprobs if _end_scored(scheduler, *each)]
    return ended + scheduler.commit(plan, result.tokens, *_read(plan, result))


def end_blocked(scheduler: Scheduler | Shards, sequence: Sequence) -> Sequence:
    """Ends a request whose grammar allows no token; returns it, or who stands for it."""
    matcher, sequence = sequence.matcher, sequence.group.head(sequence)
    assert matcher is not None  # it follows a grammar
    end = End("stop")
    if matcher.error is not None or not matcher.may_end:
        end = End("error", error=matcher.error or NO_TOKEN_ALLOWED)
    scheduler.finish(sequence, end)
    return sequence


def _end_pooled(scheduler: Scheduler | Shards, span: PooledSpan, pooled: np.ndarray) -> bool:
    """Ends a sequence that is pooled; False if it is not this one any more."""
    sequence = span.sequence
    if sequence.epoch != span.epoch:
        return False
    is_finite = bool(np.isfinite(pooled).all())
    sequence.pooled = pooled if is_finite else None
    scheduler.of(sequence).committer.num_not_finite += not is_finite
    scheduler.finish(sequence, End("stop") if is_finite else End("error", error=NOT_FINITE_POOLED))
    return True


def _end_scored(scheduler: Scheduler | Shards, span: PromptLogprobSpan, rows: np.ndarray) -> bool:
    """Gives a sequence what there is of its targets; True if it ends with that."""
    sequence = span.sequence
    targets = sequence.targets
    if targets is None or sequence.epoch != span.epoch:
        return False
    logprobs, best = rows[:, 0].view(np.float32), rows[:, 2]
    targets.take(logprobs.tolist(), is_greedy=best.tolist() == span.token_ids)
    is_finite = bool(np.isfinite(logprobs).all())
    if is_finite and not targets.is_complete:
        return False
    scheduler.of(sequence).committer.num_not_finite += not is_finite
    scheduler.finish(sequence, End("stop") if is_finite else End("error", error=NO_TOKEN_ERRORS[NOT_FINITE]))
    return True


def _read(plan: StepPlan, result: Result) -> tuple[list[Any] | np.ndarray | None, list[BeamRow | None] | None]:
    """Gives requests the log-probabilities of their prompts; returns what is to be kept of each sample's token, and how
    each beam may go on."""
    for span, rows in result.prompt_logprobs:
        sequence = span.sequence
        if sequence.targets is None and sequence.epoch == span.epoch:
            kept = [pack_logprobs(row, sequence.params.prompt_logprobs or 0) for row in rows]
            sequence.prompt_logprobs[span.start - 1 :] = kept
    if result.logprobs is None:
        return None, None
    logprobs = _read_logprobs(plan, result.logprobs)
    if result.candidates is None:
        return logprobs, None
    return logprobs, read_rows(plan.samples, result.candidates, logprobs)


def _read_logprobs(plan: StepPlan, rows: np.ndarray) -> list[Any] | np.ndarray:
    """What is kept of each sample's token: see `Sequence.logprobs`."""
    rows, forms = rows[: plan.num_samples], plan.kept_logprobs
    if forms == {1}:
        return pack_own_logprobs(rows)
    own = own_logprobs(rows)
    return own if forms == {BARE_LOGPROBS} else [_keep(*each) for each in zip(plan.samples, rows, own, strict=True)]


def _keep(sequence: Sequence, row: np.ndarray, own: np.float32) -> PackedLogprobs | float | None:
    """Likewise, of one sample."""
    params, form = sequence.params, sequence.num_logprobs
    if form == BARE_LOGPROBS:
        return float(own)
    return pack_logprobs(row, params.num_top_logprobs, params.logprob_token_ids or ()) if form else None
