"""Admits waiting sequences to the device, with cached prefixes, with what their siblings have computed, or back from
host memory, and divides the step among prompts.

Siblings that wait together begin alike: the first of them, the parent, computes that alone in one slot while the others
stay parked, without slots. When it has reached the fork point, as many as there are slots for go on from there. For
those that still wait their group keeps references to the blocks (`RunningSet.stems`), so that they compute only what is
their own, whenever they get a slot.
"""

from collections.abc import Iterable

from jaxllm.engine.schedule.block_table import Hit
from jaxllm.engine.schedule.plan import Plan
from jaxllm.engine.schedule.preemption import Preemption
from jaxllm.engine.schedule.prompt_room import PromptRoom
from jaxllm.engine.schedule.running import RunningSet, Stem
from jaxllm.engine.schedule.sequence import Sequence, Status
from jaxllm.engine.schedule.sequence_group import SequenceGroup, fork_len
from jaxllm.engine.schedule.waiting import WaitingQueue


class Admission:
    """Takes sequences from `queue` while there are slots and blocks."""

    def __init__(
        self, queue: WaitingQueue, running_set: RunningSet, preemption: Preemption, *, whole_prompts: bool = False
    ):
        self.queue, self.running_set, self.preemption = queue, running_set, preemption
        self.whole_prompts = whole_prompts  # as in `EngineConfig`
        self.pool, self.prefix_cache = running_set.pool, running_set.prefix_cache
        self.room = PromptRoom(running_set)
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.reset()

    def reset(self) -> None:
        self.lent: SequenceGroup | None = None  # whose prompt all shards compute: it has its chunks from them
        self.num_passed = 0  # groups that let others pass in the last plan: what they begin with is being computed
        self._forking: list[Sequence] = []  # parents that have computed what others wait for
        self._deferred: list[SequenceGroup] = []  # groups that could not be admitted in this plan
        self._prefills: list[Sequence] = []  # running ones that the plan has no row for yet, the first at the end
        self._entered: set[Sequence] = set()  # in this plan
        self._cut: list[int] = []  # the plan's chunks that leave tokens to others

    def plan_prefills(self, plan: Plan, running: Iterable[Sequence], max_tokens: int) -> None:
        """Gives prompts what the decodes have left of the step, by priority and arrival: to those of `running`, which
        have more than one token to compute, and to waiting ones, which are admitted for it.

        A long prompt leaves a part to those behind it (`_share`); what they don't take is the long one's again.
        """
        admits = not plan.swap_outs  # otherwise blocks are short, and the victim would come straight back
        self._prefills = sorted(running, key=lambda sequence: sequence.order, reverse=True)
        self._cut = []
        self.num_passed = 0
        self.room.begin(self._prefills, max_tokens)
        while _has_room(plan, max_tokens):
            head = self.queue.peek() if admits else None
            if self._prefills and (head is None or self._prefills[-1].order < head.waiting[0].order):
                self._add_chunk(plan, self._prefills.pop(), max_tokens)
            elif head is not None:
                admits = self._admit(plan, max_tokens)
            else:
                break
        for group in self._deferred:
            self.queue.push(group)
        for index in self._cut:
            if _has_room(plan, max_tokens):
                self._extend_chunk(plan, index, max_tokens)
        self._deferred.clear()
        self._entered.clear()

    @property
    def _num_slots(self) -> int:
        """Free ones. Who waits only for a running prefill to write its next block lets others pass, but keeps one."""
        return len(self.running_set.free_slots) - len(self._deferred)

    def _admit(self, plan: Plan, max_tokens: int) -> bool:
        """Admits sequences of the first waiting group. False if nobody behind it may be admitted in this step."""
        if self._num_slots < 1 or self.running_set.retries.is_one_running:
            return False  # a retried sequence runs with no newcomer beside it, so that a failure names the culprit
        group = self.queue.pop()
        assert group is not None  # `plan_prefills` saw it
        waits_for_others, has_entered = self._enter(plan, group, max_tokens)
        if not has_entered and not waits_for_others and not len(self.running_set) and self.running_set.stems:
            self.running_set.drop_stems()  # nobody else would ever give blocks back
            waits_for_others, has_entered = self._enter(plan, group, max_tokens)
        if not has_entered:
            self._deferred.append(group)
            self.num_passed += waits_for_others
        return has_entered or waits_for_others

    def _enter(self, plan: Plan, group: SequenceGroup, max_tokens: int) -> tuple[bool, bool]:
        """Whether the group waits only for others' prefills, and whether all that could enter has entered."""
        if group.host_copy is not None:
            return False, self._resume(plan, group, max_tokens)
        if group in self.running_set.stems:
            return False, self._continue(plan, group, max_tokens)
        hit = self.prefix_cache.find(group.waiting[0], group.waiting[1:])
        if hit is None:
            return True, False
        return False, self._start(plan, group, hit, max_tokens)

    def _start(self, plan: Plan, group: SequenceGroup, hit: Hit, max_tokens: int) -> bool:
        """Gives the first waiting sequence a slot and the blocks of `hit`; False if it must wait. The others are parked
        until it has computed what they begin with."""
        parent, siblings = group.waiting[0], group.waiting[1:]
        if group.num_slots(1) > self._num_slots:
            return False
        if not self._has_room_for(parent, hit, max_tokens - plan.num_tokens):
            return False
        if siblings:
            parent.fork_len = fork_len([parent, *siblings])
        parent.table.share(hit)
        parent.num_computed = hit.num_blocks * self.pool.block_size
        self._give_slot(parent)
        for companion in group.companions(parent):
            self._give_slot(companion, Status.HELD)
        self._count_cached(parent)
        self.prefix_cache.begin(parent)
        self._install(plan, parent)
        self._add_first_row(plan, parent, max_tokens)
        return True

    def _has_room_for(self, parent: Sequence, hit: Hit, num_tokens: int) -> bool:
        if not self.whole_prompts:
            return self.room.has_for_prompt(parent, hit, num_tokens)
        return parent.num_tokens <= num_tokens and self.room.has_all(parent)

    def _give_slot(self, sequence: Sequence, status: Status = Status.RUNNING) -> None:
        if sequence in sequence.group.waiting:
            self.queue.take(sequence)
        self.running_set.add(sequence, status)

    def _install(self, plan: Plan, sequence: Sequence) -> None:
        self._entered.add(sequence)
        plan.install(sequence)

    def _add_first_row(self, plan: Plan, sequence: Sequence, max_tokens: int) -> None:
        """For a sequence that has just got its slot. The last token to compute is the slot's last, so a row for it
        alone is a decode like any other."""
        self.room.enter(sequence)
        if sequence.group is self.lent:
            return
        if sequence.num_tokens - sequence.num_computed > 1 or not sequence.generates:
            self._add_chunk(plan, sequence, max_tokens)
        elif self._limit(sequence, 1):
            self.room.allocate(plan, sequence, 1, is_new=True, had_turn=False)
            plan.add_decode(sequence)
            self._look_for_forks(plan, sequence, max_tokens)

    def _count_cached(self, sequence: Sequence) -> None:
        if sequence.num_cached < 0:
            sequence.num_cached = sequence.num_computed
            self.num_prompt_tokens += len(sequence.prompt_token_ids)
            self.num_cached_tokens += sequence.num_cached

    def _continue(self, plan: Plan, group: SequenceGroup, max_tokens: int) -> bool:
        """Lets waiting sequences go on from what a sibling has computed; False if some of them must wait."""
        stem = self.running_set.stems[group]
        stem_blocks = stem.full_blocks()
        while group.waiting:
            sequence = group.waiting[0]
            if not (_has_room(plan, max_tokens) and self._num_slots) or self.running_set.retries.is_one_running:
                return False
            if not self.room.has_for_prompt(sequence, stem_blocks, max_tokens - plan.num_tokens):
                return False
            self._branch(plan, sequence, stem)
            if not group.waiting:
                self.running_set.drop_stem(group)  # before the last one would copy its tail
            self._add_first_row(plan, sequence, max_tokens)
        return True

    def _branch(self, plan: Plan, fork: Sequence, stem: Stem) -> None:
        """Lets a sequence go on behind the stem's tokens."""
        fork.table, fork.num_computed = stem.table.fork(stem.num_tokens, stem.num_computed), stem.num_tokens
        if fork.num_cached < 0:
            fork.num_cached = stem.num_cached
        if fork.slot < 0:
            self._give_slot(fork)
        fork.status = Status.RUNNING
        self._install(plan, fork)

    def _resume(self, plan: Plan, group: SequenceGroup, max_tokens: int) -> bool:
        """Brings back sequences that were swapped out together; False if they must wait."""
        host_copy = group.host_copy
        assert host_copy is not None
        sequences = [sequence for sequence in group.waiting if sequence in host_copy.places]
        is_crowded = group.num_slots(len(sequences)) > self._num_slots
        if is_crowded or not self.room.has(host_copy.num_pages):
            return False
        self.preemption.swap_in(plan, group)
        for sequence in sequences:
            self._give_slot(sequence)
        for companion in group.companions(sequences[0]):
            if companion.slot < 0:
                self._give_slot(companion, Status.HELD)
        if group.waiting:  # the others go on from what the first one has
            sequences[0].fork_len = fork_len([sequences[0], *group.waiting])
            self._forking.append(sequences[0])
        for sequence in sequences:
            plan.install(sequence)
            is_full = sequence.num_computed == sequence.table.capacity
            if not is_full and self._limit(sequence, 1) and _has_room(plan, max_tokens):  # otherwise in the next step
                plan.add_decode(sequence)
        return True

    def _add_chunk(self, plan: Plan, sequence: Sequence, max_tokens: int) -> None:
        """Adds a row for the next of the sequence's known tokens, as many as it may have of the step."""
        room = max_tokens - plan.num_tokens
        share = self._share(sequence, room, max_tokens)
        self.running_set.release_behind(sequence)
        num_tokens = min(self._limit(sequence, share), self.room.num_tokens(sequence))
        self.room.allocate(plan, sequence, num_tokens, is_new=sequence in self._entered, had_turn=False)
        if not num_tokens:
            return
        plan.add_chunk(sequence, num_tokens)
        if share < room:
            self._cut.append(len(plan.chunks) - 1)
        self._look_for_forks(plan, sequence, max_tokens)

    def _extend_chunk(self, plan: Plan, index: int, max_tokens: int) -> None:
        """Gives a chunk that left tokens to others what they have left."""
        sequence = plan.chunks[index].sequence
        num_tokens = self._limit(sequence, max_tokens - plan.num_tokens)
        num_tokens = min(num_tokens, self.room.num_tokens(sequence, had_turn=True))
        self.room.allocate(plan, sequence, num_tokens, is_new=sequence in self._entered, had_turn=True)
        plan.extend_chunk(index, num_tokens)
        self._look_for_forks(plan, sequence, max_tokens)

    def _share(self, sequence: Sequence, room: int, max_tokens: int) -> int:
        """How many of the step's `room` tokens a prompt may take. One that the step can't finish leaves half of them to
        the next of its priority, so that a short prompt does not wait for a long one. An eighth of the step is worth a
        row: few long prompts at a time hold blocks."""
        head = self.queue.peek()
        behind = (*self._prefills[-1:], *(head.waiting[:1] if head is not None else ()))
        is_alone = not any(other.priority == sequence.priority for other in behind)
        if is_alone or sequence.num_tokens - sequence.num_computed <= room:
            return room
        return min(room, max(1, room // 2, max_tokens // 8))

    def _limit(self, sequence: Sequence, num_tokens: int) -> int:
        """As many of the sequence's next tokens, less the last if it may not sample in this step."""
        num_left = sequence.num_tokens - sequence.num_computed
        return min(num_tokens, num_left - (sequence.host_dependent and self.running_set.awaits_host))

    def _look_for_forks(self, plan: Plan, parent: Sequence, max_tokens: int) -> None:
        """Notes that the parent's row computes the last token that others wait for. Those without tokens of their own
        sample from its logits now and share all its blocks, as many as there are slots and blocks for."""
        if not parent.fork_len or parent.num_computed < parent.fork_len or parent in self._forking:
            return
        group = parent.group
        if parent.generates and {parent.fork_len} == {sequence.num_tokens for sequence in (parent, *group.waiting)}:
            stem = Stem(parent.table, parent.num_computed, parent.num_computed, parent.num_cached)
            for fork in group.waiting[: self._count_forks(plan, parent, max_tokens)]:
                self._branch(plan, fork, stem)
                plan.add_fork(parent, fork)
        if group.forks(parent):
            self._forking.append(parent)
        else:
            parent.fork_len = 0

    def _count_forks(self, plan: Plan, parent: Sequence, max_tokens: int) -> int:
        """How many of the parent's forks may start now. Each writes to a block of its own in the next step."""
        group = parent.group
        retries = self.running_set.retries
        if retries and any(sequence in retries for sequence in (parent, *group.waiting)):
            return 0  # a retried sequence runs alone
        num = min(len(group.waiting), self._num_slots, max_tokens - plan.num_samples)
        while num > 0 and not self.room.has(num * self.pool.pages_per_block):
            num -= 1
        return max(0, num)

    def fork(self, plan: Plan) -> None:
        """Parents have computed, in an earlier step, what others wait for. Those that have their slots go on from
        there; for those without the group keeps it, and is queued again."""
        parents, self._forking = self._forking, []
        for parent in parents:
            if parent.status is not Status.RUNNING:
                continue  # it was preempted together with its forks, or has ended
            group, forks = parent.group, parent.group.forks(parent)
            parent.fork_len = 0
            if not forks:
                continue
            # Each has a token left, which its logits come from.
            length = min(fork_len([parent, *forks]), min(fork.num_skippable for fork in forks))
            length = parent.table.fork_point(length, parent.num_computed)
            stem = Stem(parent.table, length, parent.num_computed, parent.num_cached)
            if group.waiting:
                self.running_set.stems[group] = stem._replace(table=parent.table.fork(length, parent.num_computed))
                self.queue.push(group)
            else:
                for fork in forks:
                    self._branch(plan, fork, stem)


def _has_room(plan: Plan, max_tokens: int) -> bool:
    return max(plan.num_tokens, plan.num_samples) < max_tokens
