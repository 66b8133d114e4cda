"""Decides which sequences run how many tokens in the next step, and on which blocks. Host integers only: no device, no
text.

The three verbs of a step are `schedule` (here), `run` (the runner) and `commit` (here). A step is planned before the
tokens of the one before are known; docs/step_contract.md says what that means for every event.
"""

from collections import abc
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.engine.schedule.admission import Admission
from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.block_table import BlockTable
from jaxllm.engine.schedule.commit import Committer
from jaxllm.engine.schedule.plan import Plan, StepPlan
from jaxllm.engine.schedule.preemption import Preemption
from jaxllm.engine.schedule.prefix_cache import PrefixCache
from jaxllm.engine.schedule.retries import quarantine
from jaxllm.engine.schedule.running import RunningSet
from jaxllm.engine.schedule.sequence import End, Sequence, Status
from jaxllm.engine.schedule.sequence_group import GroupRow, SequenceGroup
from jaxllm.engine.schedule.waiting import WaitingQueue

if TYPE_CHECKING:
    from jaxllm.engine.logprobs import PackedLogprobs


class Scheduler:
    """Continuous batching over `max_num_seqs` slots and a block pool, by priority and then arrival.

    `prefers_swap` and `max_host_pages` are for `Preemption`, `whole_prompts` is as in `EngineConfig`.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        prefix_caching: bool = True,
        prefers_swap: Callable[[int, int], bool] = lambda num_pages, num_tokens: False,
        max_host_pages: int = 0,
        whole_prompts: bool = False,
    ):
        self.pool = pool
        self.prefix_cache = PrefixCache(pool, enabled=prefix_caching)
        self.running_set = RunningSet(pool, self.prefix_cache, max_num_seqs)
        self.waiting = WaitingQueue()
        self.preemption = Preemption(self.waiting, self.running_set, prefers_swap, max_host_pages)
        self.admission = Admission(self.waiting, self.running_set, self.preemption, whole_prompts=whole_prompts)
        self.committer = Committer(self.running_set)
        self.num_copied = 0  # pages, because several shared them
        self.num_unfinished_full = 0
        self._drafting: list[Sequence] = []  # of the plan's decodes, those that may go on with drafts

    @property
    def shards(self) -> tuple["Scheduler", ...]:
        """Those of each shard: there is one."""
        return (self,)

    def of(self, sequence: Sequence) -> "Scheduler":
        """Which has the sequence."""
        return self

    @property
    def num_used(self) -> int:
        """Pages that sequences hold."""
        return self.pool.num_used

    @property
    def running(self) -> list[Sequence]:
        """The sequences on the device, in the order in which they are served."""
        return list(self.running_set)

    def has_work(self) -> bool:
        return bool(len(self.running_set) or self.waiting)

    def least_tokens(self) -> int:
        """How many tokens the next step must have room for, so that those who wait get on."""
        head = self.waiting.peek() if self.admission.whole_prompts else None
        return 1 if head is None else head.waiting[0].num_tokens

    def num_left_tokens(self) -> int:
        """Tokens that could be computed beside those that are planned; of who waits as `WaitingQueue` counts them.
        O(running)."""
        left = sum(max(0, each.num_tokens - each.num_computed) for each in self.running_set.individuals)
        return left + self.waiting.num_tokens

    @property
    def num_sequences(self) -> int:
        """How many run or wait."""
        return len(self.running_set) + len(self.waiting)

    def add(self, group: SequenceGroup) -> None:
        """Queues a request's sequences. They must fit the pool alone: the engine has refused them otherwise."""
        for sequence in group.sequences:
            sequence.table = BlockTable(self.pool, keeps_first=sequence.traits.reads_history)
        self.num_unfinished_full += group.num_full
        self.waiting.add(group, group.live)

    def remove(self, group: SequenceGroup) -> None:
        """Forgets a group of which nothing is on the device or in host memory."""
        self.waiting.remove(group)
        self.num_unfinished_full -= group.num_full

    def may_leave(self, group: SequenceGroup) -> bool:
        """Whether another shard could compute a waiting group as well."""
        return not group.on_device and group.host_copy is None and group not in self.running_set.stems

    def forget_keys(self) -> None:
        """Drops the prefix cache: see `BlockPool.forget_keys`."""
        self.pool.forget_keys()

    def finish(self, sequence: Sequence, end: End) -> None:
        """Ends a sequence at once, even in flight: its epoch ends, so that tokens still computed for it are dropped.
        The beams of a search end together."""
        if sequence.status is Status.FINISHED:
            return
        is_parent = sequence.fork_len > 0
        for other in sequence.group.finish(sequence, end):
            self._end(other, end)
        if is_parent:  # another one computes what they wait for
            self.waiting.push(sequence.group)

    def _end(self, sequence: Sequence, end: End) -> None:
        if sequence.slot >= 0:
            self.running_set.remove(sequence)
        elif sequence in sequence.group.waiting:
            self.waiting.take(sequence)
            self.preemption.forget(sequence)
            if not sequence.group.waiting:
                self.running_set.drop_stem(sequence.group)
        self.num_unfinished_full -= sequence.traits.needs_full_sampler
        self.running_set.retries.forget(sequence)
        sequence.status, sequence.end = Status.FINISHED, end

    def schedule(self, max_tokens: int, *, awaits_host: bool = False) -> Plan | None:
        """Plans a step of at most `max_tokens` tokens, decodes first. None if nothing can run now.

        Host-dependent sequences sample in the same steps, however they came: none while one is in flight, here or, if
        it `awaits_host`, elsewhere. Those of one step after the other would stay in two phases for ever, each with half
        of the rows.

        Allocates slots and blocks, and counts the plan's tokens as computed: the caller must dispatch it.
        """
        return self.seal(self.draft(max_tokens, awaits_host=awaits_host))

    def draft(self, max_tokens: int, *, awaits_host: bool = False) -> Plan:
        """The plan, to which chunks may still be added."""
        plan = Plan(max_tokens=max_tokens)
        self.running_set.awaits_host = awaits_host or self.running_set.has_host_dependent
        self.preemption.evict_drained(plan)
        if self.pool.num_free < len(self.running_set) * self.pool.pages_per_block:
            self.preemption.make_room(plan, max_tokens)
        self.admission.fork(plan)
        if self.committer.moved:
            self._install_moved(plan)
        self._plan_batch(plan, max_tokens)
        prefills = self._plan_individuals(plan, max_tokens)
        self.admission.plan_prefills(plan, prefills, max_tokens)
        if self._drafting:
            self._plan_drafts(plan, max_tokens)
        self.num_copied += len(plan.copies)
        return plan

    def seal(self, plan: Plan) -> Plan | None:
        """What to dispatch of it: None if that is nothing."""
        if plan.is_empty:
            return None
        self.preemption.report_released(plan)
        plan.full_sampler, plan.alters_logits = self.running_set.num_full > 0, self.running_set.num_altered > 0
        plan.has_chosen = self.running_set.num_chosen > 0
        plan.seal()
        if len(self.running_set) <= plan.max_tokens:
            self.running_set.enter_batch(plan.decodes[plan.num_steady :])
        for chunk in plan.chunks:  # the next plan may hit these blocks: this one is dispatched before it
            if not chunk.drafts:
                self.prefix_cache.offer(chunk.sequence, chunk.stop)
        return plan

    def _install_moved(self, plan: Plan) -> None:
        for beam in self.committer.moved:
            if beam.status is Status.RUNNING:
                plan.install(beam)
        self.committer.moved = []

    def _plan_batch(self, plan: Plan, max_tokens: int) -> None:
        """Adds a row for each sequence of the decode batch, and a block for each whose last one is full."""
        batch = self.running_set.batch
        if len(self.running_set) > max_tokens:  # while the engine compiles: sequences take turns
            for sequence in batch.sequences.copy():
                self.running_set.leave_batch(sequence)
        for sequence in batch.due():
            if sequence.num_computed < sequence.max_total_len - 2 and self._grow(plan, sequence):
                batch.set_due(sequence)
            else:  # its next row is its last, or no block is free
                self.running_set.leave_batch(sequence)
        plan.add_batch(batch)

    def _plan_individuals(self, plan: Plan, max_tokens: int) -> list[Sequence]:
        """Adds the other running sequences with one token to compute; returns those with more."""
        prefills = []
        awaits_host, lent = self.running_set.awaits_host, self.admission.lent
        for sequence in self.running_set.individuals:
            if sequence.status is not Status.RUNNING or sequence.group is lent or not sequence.can_sample:
                continue
            num_computed, table = sequence.num_computed, sequence.table
            has_more = sequence.num_tokens > num_computed + 1
            if has_more or num_computed < sequence.fork_len or not sequence.generates:  # others wait for this row
                prefills.append(sequence)
                continue
            if awaits_host and sequence.host_dependent:
                continue
            if len(plan.decodes) == max_tokens:
                break
            may_draft = sequence.propose is not None and not table.shares_tail  # one new block a row beside its tokens'
            if num_computed == table.capacity:
                if not self._grow(plan, sequence):
                    continue
            elif table.shares_tail and not self._own_tail(plan, sequence):
                continue
            plan.add_decode(sequence)
            if may_draft:
                self._drafting.append(sequence)
        if len(plan.decodes) == max_tokens < len(self.running_set):  # the others come first in the next step
            self.running_set.move_to_end(plan.decodes)
        return prefills

    def _plan_drafts(self, plan: Plan, max_tokens: int) -> None:
        """Gives drafts what decodes and prompts have left of the step and of the blocks, but one block for each running
        sequence: nobody is preempted for a guess."""
        drafts: dict[Sequence, abc.Sequence[int]] = {}
        num_left = max_tokens - max(plan.num_tokens, plan.num_samples)
        if self.pool.has_states:
            num_left = 0  # a state can't take back what is not accepted
        for sequence in self._drafting:
            table, num_computed = sequence.table, sequence.num_computed
            num_spare = max(0, self.pool.num_free // self.pool.pages_per_block - len(self.running_set))
            room = table.capacity + num_spare * self.pool.block_size - num_computed
            room = min(room, num_left, sequence.max_total_len - 1 - num_computed)
            guesses = sequence.propose(sequence, room)[:room] if room > 0 and sequence.propose is not None else ()
            if guesses:
                while table.capacity < num_computed + len(guesses):  # what the row before them reads stays
                    table.append()
                    plan.add_block(sequence, len(table) - 1)
                drafts[sequence] = guesses
                num_left -= len(guesses)
        plan.add_drafts(drafts)
        self._drafting = []

    def _grow(self, plan: Plan, sequence: Sequence) -> bool:
        """Allocates one more block for the sequence; False if none is free, while a victim drains."""
        self.running_set.release_behind(sequence)
        table = sequence.table
        has_grown = table.append()
        if has_grown:
            plan.add_block(sequence, len(table) - 1)
        return has_grown

    def _own_tail(self, plan: Plan, sequence: Sequence) -> bool:
        """Copy-on-write: replaces a shared block that the sequence writes next by a copy. False as in `_grow`."""
        table = sequence.table
        if table.num_copied > self.pool.num_free:
            return False
        copies = table.own_tail()
        if copies:
            plan.copies += copies
            plan.add_block(sequence, len(table) - 1)
        return True

    def commit(
        self,
        plan: StepPlan,
        sampled: abc.Sequence[int] | np.ndarray,
        logprobs: "abc.Sequence[PackedLogprobs | float | None] | np.ndarray | None" = None,
        candidates: abc.Sequence[GroupRow | None] | None = None,
    ) -> list[Sequence]:
        """See `Committer.commit`."""
        (own,) = plan.shards
        return self.committer.commit(own, sampled, logprobs, candidates, finish=self.finish)

    def restart(
        self, unfinished: Iterable[Sequence], failed: Iterable[Sequence] = (), cause: str = ""
    ) -> list[Sequence]:
        """The device's state is gone: all `unfinished` sequences start over as recomputes, and the prefix cache is
        empty.

        Each of `failed`, the sequences of the step that failed, counts it; one with `MAX_FAILURES` is ended with an
        error, which tells the `cause`, and returned.
        """
        self.reset()
        for group in dict.fromkeys(sequence.group for sequence in unfinished):
            group.restart()
            self.add(group)
        return quarantine(failed, cause, self.running_set.retries, self.finish)

    def reset(self) -> None:
        """Drops all sequences, and the prefix cache. Failures are remembered."""
        self.running_set.reset()
        self.preemption.reset()
        self.admission.reset()
        self.waiting.clear()
        self.committer.moved = []
        self.num_unfinished_full = 0

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. O(blocks + running + waiting)."""
        self.running_set.check()
        self.waiting.check()
        waiting = self.waiting.sequences()
        groups = {sequence.group for sequence in waiting}
        copies = [group.host_copy for group in groups if group.host_copy is not None]
        assert all(copy.places and set(copy.places) <= set(waiting) for copy in copies)
        assert self.running_set.stems.keys() <= groups
        assert self.preemption.num_host_pages == sum(copy.num_pages for copy in copies)
        assert self.preemption.num_host_pages <= self.preemption.max_host_pages
