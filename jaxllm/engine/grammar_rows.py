"""The samples of a step that follow a grammar: their masks, and those that a grammar leaves no token
(docs/step_contract.md, clause 5)."""

import numpy as np

from jaxllm.engine.schedule.plan import Plan, StepPlan
from jaxllm.engine.schedule.sequence import Sequence
from jaxllm.grammar.compiler import GrammarCompiler
from jaxllm.grammar.matcher import Matcher


class GrammarRows:
    """Those of a plan, of all its shards."""

    def __init__(self, plan: StepPlan):
        self._shards = [_ShardRows(of_shard) for of_shard in plan.shards]

    def __bool__(self) -> bool:
        return any(self._shards)

    @property
    def await_commit(self) -> bool:
        """Whether the masks can't be filled before the step that is in flight is committed."""
        return any(rows.await_commit for rows in self._shards)

    def fill(self, compiler: GrammarCompiler, masks: np.ndarray) -> list[Sequence]:
        """Writes the masks of the rows into `masks`, int32 `[samples, words]` with the samples of one shard after the
        other; returns the sequences that can't go on. Rows of sequences that ended or left the device meanwhile stay as
        they are: their tokens are dropped."""
        parts = zip(self._shards, np.split(masks, len(self._shards)), strict=True)
        return [sequence for rows, part in parts for sequence in rows.fill(compiler, part)]


class _ShardRows:
    """Those of a shard. A row's mask depends on all tokens before it, of which the step before may compute the last."""

    def __init__(self, plan: Plan):
        first = plan.num_steady  # those before follow none
        samples = zip(plan.samples[first:], plan.epochs[first:], strict=True)
        self._rows = [(row, *sample) for row, sample in enumerate(samples, first) if sample[0].matcher is not None]
        self._drafts = plan.drafts

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def await_commit(self) -> bool:
        return any(sequence.num_in_flight > 1 and sequence.propose is None for _, sequence, _ in self._rows)

    def fill(self, compiler: GrammarCompiler, masks: np.ndarray) -> list[Sequence]:
        rows = [(row, sequence) for row, sequence, epoch in self._rows if sequence.epoch == epoch]
        if not rows:
            return []
        matchers: dict[int, Matcher] = {}
        for row, sequence in rows:
            if row in self._drafts:  # it is drawn after a token more than the row before
                matchers[row] = matchers[row - 1].after(self._drafts[row])
                continue
            assert sequence.matcher is not None  # it follows a grammar
            sequence.matcher.follow(sequence.output_token_ids)
            matchers[row] = sequence.matcher
        compiler.fill([(matcher, row) for row, matcher in matchers.items()], masks)
        allowed = np.asarray(masks.any(axis=1))  # without a token a beam just ends, if others go on
        own = [(row, sequence) for row, sequence in rows if row not in self._drafts]
        return [one for row, one in own if matchers[row].error or not (allowed[row] or one.group.chooses_tokens)]
