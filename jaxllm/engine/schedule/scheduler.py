"""Decides which sequences run how many tokens in the next step, and on which blocks. Host integers only: no array, no
device, no text.

The three verbs of a step are `schedule` (here), `run` (the runner) and `commit` (here). A step is planned before the
tokens of the one before are known; docs/step_contract.md says what that means for every event.
"""

from collections import abc
from collections.abc import Callable, Iterable
from typing import Any

from jaxllm.engine.schedule.admission import Admission
from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.block_table import BlockTable
from jaxllm.engine.schedule.plan import NO_TOKEN_ERRORS, NOT_FINITE, NewBlock, Plan
from jaxllm.engine.schedule.preemption import Preemption
from jaxllm.engine.schedule.prefix_cache import PrefixCache
from jaxllm.engine.schedule.running import RunningSet
from jaxllm.engine.schedule.sequence import Sequence, SequenceGroup, Status
from jaxllm.engine.schedule.waiting import WaitingQueue
from jaxllm.outputs import FinishReason

MAX_FAILURES = 2  # failed steps with a sequence in them after which it is quarantined


class Scheduler:
    """Continuous batching over `max_num_seqs` slots and a block pool, by priority and then arrival.

    `prefers_swap` and `max_host_blocks` are for `Preemption`.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        prefix_caching: bool = True,
        prefers_swap: Callable[[int, int], bool] = lambda num_blocks, num_tokens: False,
        max_host_blocks: int = 0,
    ):
        self.pool = pool
        self.prefix_cache = PrefixCache(pool, enabled=prefix_caching)
        self.running_set = RunningSet(pool, self.prefix_cache, max_num_seqs)
        self.waiting = WaitingQueue()
        self.preemption = Preemption(self.waiting, self.running_set, prefers_swap, max_host_blocks)
        self.admission = Admission(self.waiting, self.running_set, self.preemption)
        self.num_copied = 0  # blocks, because several shared them
        self.num_unfinished_full = 0
        self.num_not_finite = 0  # sequences that ended for their logits
        self._moved: list[Sequence] = []  # beams whose slot rows are out of date

    @property
    def running(self) -> list[Sequence]:
        """The sequences on the device, in the order in which they are served."""
        return list(self.running_set)

    def has_work(self) -> bool:
        return bool(len(self.running_set) or self.waiting)

    def add(self, group: SequenceGroup) -> None:
        """Queues a request's sequences. They must fit the pool alone: the engine has refused them otherwise."""
        for sequence in group.sequences:
            sequence.table = BlockTable(self.pool)
        self.num_unfinished_full += sum(sequence.needs_full_sampler for sequence in group.sequences)
        self.waiting.add(group, group.live)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a sequence at once, even in flight: its epoch ends, so that tokens still computed for it are dropped.
        The beams of a search end together."""
        if sequence.status is Status.FINISHED:
            return
        is_parent = sequence.fork_len > 0
        for other in sequence.group.end(sequence, reason):
            self._end(other, reason, stop_reason)
        if is_parent:  # another one computes what they wait for
            self.waiting.push(sequence.group)

    def _end(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        if sequence.slot >= 0:
            self.running_set.remove(sequence)
        elif sequence in sequence.group.waiting:
            self.waiting.take(sequence)
            self.preemption.forget(sequence)
            if not sequence.group.waiting:
                self.running_set.drop_stem(sequence.group)
        self.num_unfinished_full -= sequence.needs_full_sampler
        sequence.status, sequence.finish_reason, sequence.stop_reason = Status.FINISHED, reason, stop_reason

    def schedule(self, max_tokens: int) -> Plan | None:
        """Plans a step of at most `max_tokens` tokens, decodes first. None if nothing can run now.

        Allocates slots and blocks, and counts the plan's tokens as computed: the caller must dispatch it.
        """
        plan = Plan()
        self.running_set.look_for_host_dependent()
        self.preemption.evict_drained(plan)
        if self.pool.num_free < len(self.running_set):
            self.preemption.make_room(plan)
        self.admission.fork(plan)
        if self._moved:
            self._install_moved(plan)
        self._plan_batch(plan, max_tokens)
        prefills = self._plan_individuals(plan, max_tokens)
        self.admission.plan_prefills(plan, prefills, max_tokens)
        self.num_copied += len(plan.copies)
        if plan.is_empty:
            return None
        self.preemption.report_released(plan)
        plan.full_sampler, plan.has_beams = self.running_set.num_full > 0, self.running_set.num_beams > 0
        plan.alters_logits = self.running_set.num_altered > 0
        plan.seal()
        if len(self.running_set) <= max_tokens:
            self.running_set.enter_batch(plan.decodes[plan.num_steady :])
        for chunk in plan.chunks:  # the next plan may hit these blocks: this one is dispatched before it
            self.prefix_cache.offer(chunk.sequence, chunk.stop)
        return plan

    def _install_moved(self, plan: Plan) -> None:
        for beam in self._moved:
            if beam.status is Status.RUNNING:
                plan.install(beam)
        self._moved = []

    def _plan_batch(self, plan: Plan, max_tokens: int) -> None:
        """Adds a row for each sequence of the decode batch, and a block for each whose last one is full."""
        batch = self.running_set.batch
        if len(self.running_set) > max_tokens:  # while the engine compiles: sequences take turns
            for sequence in batch.sequences.copy():
                self.running_set.leave_batch(sequence)
        for sequence in batch.due():
            if sequence.num_computed < sequence.max_total_len - 2 and self._grow(plan, sequence):
                self.prefix_cache.offer(sequence, min(sequence.num_computed, sequence.num_tokens))
                batch.set_due(sequence)
            else:  # its next row is its last, or no block is free
                self.running_set.leave_batch(sequence)
        plan.add_batch(batch)

    def _plan_individuals(self, plan: Plan, max_tokens: int) -> list[Sequence]:
        """Adds the other running sequences with one token to compute; returns those with more."""
        prefills, decodes = [], plan.decodes
        awaits_host = self.running_set.awaits_host
        for sequence in self.running_set.individuals:
            if sequence.status is not Status.RUNNING or not sequence.can_sample:
                continue
            num_computed = sequence.num_computed
            num_left = max(sequence.num_tokens, num_computed + 1) - num_computed
            if num_left > 1 or num_computed < sequence.fork_len:  # others wait for this row
                prefills.append(sequence)
                continue
            if sequence.host_dependent and awaits_host:
                continue
            if len(decodes) == max_tokens:
                break
            table = sequence.table
            if num_computed == table.capacity:
                if not self._grow(plan, sequence):
                    continue
            elif table.shares_tail and not self._own_tail(plan, sequence):
                continue
            plan.add_decode(sequence)
        if len(decodes) == max_tokens < len(self.running_set):  # the others come first in the next step
            self.running_set.move_to_end(decodes)
        return prefills

    def _grow(self, plan: Plan, sequence: Sequence) -> bool:
        """Allocates one more block for the sequence; False if none is free, while a victim drains."""
        table = sequence.table
        block = table.append()
        if block is not None:
            plan.new_blocks.append(NewBlock(sequence.slot, len(table) - 1, block))
        return block is not None

    def _own_tail(self, plan: Plan, sequence: Sequence) -> bool:
        """Copy-on-write: replaces a shared block that the sequence writes next by a copy. False as in `_grow`."""
        table = sequence.table
        if table.must_copy and not self.pool.num_free:
            return False
        copy = table.own_tail()
        if copy is not None:
            plan.copies.append(copy)
            plan.new_blocks.append(NewBlock(sequence.slot, len(table) - 1, copy.target))
        return True

    def commit(
        self,
        plan: Plan,
        sampled: abc.Sequence[int],
        logprobs: abc.Sequence[Any] | None = None,
        candidates: abc.Sequence[Any] | None = None,
    ) -> list[Sequence]:
        """Appends each sample's token, in the plan's order, and ends what is over. Returns the sequences that ended,
        and those that report each token. A negative token is a key of `NO_TOKEN_ERRORS`. `logprobs` has what else there
        is to keep of each sample, `candidates` for each beam what it may go on with, and None for others.
        """
        updated: list[Sequence] = []
        for i, (sequence, epoch, token) in enumerate(zip(plan.samples, plan.epochs, sampled, strict=False)):
            if sequence.epoch != epoch:
                continue
            if logprobs is None and sequence.batch is not None and token >= 0 and token not in sequence.stop_ids:
                sequence.output_token_ids.append(token)  # a steady decode: no other state changes
                if sequence.reports_tokens:
                    updated.append(sequence)
                continue
            if candidates is not None and candidates[i] is not None and token != NOT_FINITE:
                updated += self._commit_to_group(sequence, candidates[i])
                continue
            self._commit_token(sequence, token, None if logprobs is None else logprobs[i])
            if sequence.reports_tokens or sequence.finish_reason is not None:
                updated.append(sequence)
        return updated

    def _commit_token(self, sequence: Sequence, token: int, logprobs: Any) -> None:
        if token < 0:
            sequence.error = NO_TOKEN_ERRORS[token]
            self.num_not_finite += token == NOT_FINITE
            self.finish(sequence, "error")
            return
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
        sequence.output_token_ids.append(token)
        num_computed = sequence.num_computed
        if (sequence.table.num_keyed + 1) * self.pool.block_size <= num_computed:
            self.prefix_cache.offer(sequence, min(num_computed, sequence.num_tokens))
        if sequence.num_failures and sequence.num_tokens > sequence.retry_len:
            self._clear(sequence)
        self._finish_if_over(sequence, token)

    def _commit_to_group(self, sequence: Sequence, row: Any) -> list[Sequence]:
        """Lets the sequence's group choose its next token. Returns the group's head if its sequences end."""
        group, head = sequence.group, sequence.group.head(sequence)
        moved, reason = group.commit(sequence, row, self.running_set)
        self._moved += moved
        if reason is not None:
            self.finish(head, reason)
            return [head]
        if head.num_failures and group.live[0].num_tokens > head.retry_len:
            self._clear(head)
        return []

    def _clear(self, retried: Sequence) -> None:
        retried.num_failures = 0
        self.running_set.num_retrying -= 1

    def _finish_if_over(self, sequence: Sequence, token: int) -> None:
        if token in sequence.stop_ids and len(sequence.output_token_ids) >= sequence.params.min_tokens:
            self.finish(sequence, "stop", None if token in sequence.eos_ids else token)
        elif sequence.matcher is not None and sequence.matcher.ends_after(sequence.output_token_ids):
            sequence.error = sequence.matcher.error
            self.finish(sequence, "error" if sequence.error else "stop")
        elif sequence.num_tokens >= sequence.max_total_len:
            self.finish(sequence, "length")

    def restart(
        self, unfinished: Iterable[Sequence], failed: Iterable[Sequence] = (), cause: str = ""
    ) -> list[Sequence]:
        """The device's state is gone: all `unfinished` sequences start over as recomputes, and the prefix cache is
        empty.

        Each of `failed`, the sequences of the step that failed, counts it; one with `MAX_FAILURES` is ended with an
        error, which tells the `cause`, and returned.
        """
        self.running_set.reset()
        self.preemption.reset()
        self.admission.reset()
        self.waiting.clear()
        self._moved = []
        self.num_unfinished_full = 0
        for group in dict.fromkeys(sequence.group for sequence in unfinished):
            group.restart()
            self.add(group)
        quarantined = []
        for sequence in dict.fromkeys(row.group.head(row) for row in failed):
            if sequence.status is Status.FINISHED:
                continue
            sequence.num_failures += 1
            sequence.retry_len = 1 + sequence.num_tokens
            if sequence.num_failures >= MAX_FAILURES:
                sequence.error = f"the step failed {sequence.num_failures} times with this sequence in it: {cause}"
                self.finish(sequence, "error")
                quarantined.append(sequence)
        return quarantined

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. O(blocks + running + waiting)."""
        self.running_set.check()
        self.waiting.check()
        waiting = self.waiting.sequences()
        groups = {sequence.group for sequence in waiting}
        copies = [group.host_copy for group in groups if group.host_copy is not None]
        assert all(copy.places and set(copy.places) <= set(waiting) for copy in copies)
        assert self.running_set.stems.keys() <= groups
        assert self.preemption.num_host_blocks == sum(copy.num_blocks for copy in copies)
        assert self.preemption.num_host_blocks <= self.preemption.max_host_blocks
