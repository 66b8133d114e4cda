"""Admits waiting sequences to the device, with cached prefixes, with forks that share their blocks, or back from host
memory, and divides the step among prompts."""

from collections.abc import Iterable

from jaxllm.engine.schedule.plan import Plan
from jaxllm.engine.schedule.preemption import Preemption
from jaxllm.engine.schedule.running import RunningSet
from jaxllm.engine.schedule.sequence import Sequence, Status, join
from jaxllm.engine.schedule.waiting import WaitingQueue


class Admission:
    """Takes sequences from `queue` while there are slots and blocks."""

    def __init__(self, queue: WaitingQueue, running_set: RunningSet, preemption: Preemption):
        self.queue, self.running_set, self.preemption = queue, running_set, preemption
        self.pool, self.prefix_cache = running_set.pool, running_set.prefix_cache
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.reset()

    def reset(self) -> None:
        self._forking: list[Sequence] = []  # parents that have computed what their forks share
        self._prefills: list[Sequence] = []  # running ones that the plan has no row for yet, the first at the end
        self._cut: list[int] = []  # the plan's chunks that leave tokens to others

    def plan_prefills(self, plan: Plan, running: Iterable[Sequence], max_tokens: int) -> None:
        """Gives prompts what the decodes have left of the step, by priority and arrival: to those of `running`, which
        have more than one token to compute, and to waiting ones, which are admitted for it.

        A long prompt leaves a part to those behind it (`_share`); what they don't take is the long one's again.
        """
        deferred: list[Sequence] = []  # which could not be admitted
        admits = not plan.swap_outs  # otherwise blocks are short, and the victim would come straight back
        self._prefills = sorted(running, key=lambda sequence: sequence.order, reverse=True)
        self._cut = []
        while _has_room(plan, max_tokens):
            head = self.queue.peek() if admits else None
            if self._prefills and (head is None or self._prefills[-1].order < head.order):
                self._add_chunk(plan, self._prefills.pop(), max_tokens)
            elif head is not None:
                admits = self._admit(plan, deferred, max_tokens)
            else:
                break
        for parent in deferred:
            self.queue.push(parent)
        for index in self._cut:
            if _has_room(plan, max_tokens):
                sequence = plan.chunks[index].sequence
                plan.extend_chunk(index, self._limit(sequence, max_tokens - plan.num_tokens))
                self._look_for_forks(plan, sequence, max_tokens)

    def _admit(self, plan: Plan, deferred: list[Sequence], max_tokens: int) -> bool:
        """Admits the first waiting sequence, with all the blocks that its known tokens need. False if nobody behind it
        may be admitted in this step.

        One that waits only for a running prefill to write its next block lets others pass, but keeps a slot.
        """
        num_slots = len(self.running_set.free_slots) - len(deferred)
        if num_slots < 1 or self.running_set.num_retrying:
            return False  # a retried sequence runs with no newcomer beside it, so that a failure names the culprit
        parent = self.queue.pop()
        assert parent is not None  # `plan_prefills` saw it
        hits: list[int] | None = []
        if parent.host_copy is None:
            hits = self.prefix_cache.find(parent)
        if hits is not None and self._enter(plan, parent, hits, num_slots, max_tokens):
            return True
        deferred.append(parent)
        return hits is None

    def _enter(self, plan: Plan, parent: Sequence, hits: list[int], num_slots: int, max_tokens: int) -> bool:
        if parent.host_copy is not None:
            return self._resume(plan, parent, num_slots, max_tokens)
        return self._start(plan, parent, hits, num_slots, max_tokens)

    def _start(self, plan: Plan, parent: Sequence, hits: list[int], num_slots: int, max_tokens: int) -> bool:
        """Gives a waiting sequence a slot and blocks, of which it shares `hits`, and each of its forks a slot; False if
        it must wait."""
        pool, block_size = self.pool, self.pool.block_size
        must_join = parent.group.enters_whole
        if parent.group.num_slots(1) > num_slots:
            return False
        forks = parent.forks[: num_slots - 1]
        if not must_join and any(sequence.num_failures for sequence in (parent, *parent.forks)):
            forks = []  # a retried sequence runs alone
        num_new = -(-parent.num_tokens // block_size) - len(hits)
        tails = [self._num_tail_blocks(parent, fork) for fork in forks]
        while not self.running_set.has_room(num_new + pool.count_free(hits) + sum(tails)):
            if must_join or not tails:
                return False
            tails.pop()
        parent.forks, others = forks[: len(tails)], parent.forks[len(tails) :]
        if others:
            self.queue.push(join(others))
        parent.table.share(hits)
        parent.table.allocate(num_new)
        parent.num_computed = len(hits) * block_size
        for fork, num_blocks in zip(parent.forks, tails, strict=True):
            fork.table.allocate(num_blocks)
        self._enter_all(parent, parent.forks)
        self._count_cached(parent)
        self.prefix_cache.begin(parent)
        plan.install(parent)
        if parent.num_tokens - parent.num_computed > 1:
            self._add_chunk(plan, parent, max_tokens)
        elif self._limit(parent, 1):  # one token is left, the slot's last: a decode row like any other
            plan.add_decode(parent)
            self._reach_fork(plan, parent, max_tokens)
        return True

    def _enter_all(self, parent: Sequence, forks: list[Sequence]) -> None:
        """Adds the parent as running, its forks and idle beams as held."""
        self.running_set.add(parent, Status.RUNNING)
        for sequence in forks + parent.group.idle:
            self.running_set.add(sequence, Status.HELD)

    def _num_tail_blocks(self, parent: Sequence, fork: Sequence) -> int:
        """Blocks that a fork needs for known tokens of its own: none if it has none."""
        if fork.num_tokens == parent.fork_len == parent.num_tokens:
            return 0
        return -(-fork.num_tokens // self.pool.block_size) - parent.fork_len // self.pool.block_size

    def _count_cached(self, sequence: Sequence) -> None:
        if sequence.num_cached < 0:
            sequence.num_cached = sequence.num_computed
            self.num_prompt_tokens += len(sequence.prompt_token_ids)
            self.num_cached_tokens += sequence.num_cached

    def _resume(self, plan: Plan, parent: Sequence, num_slots: int, max_tokens: int) -> bool:
        """Brings back sequences that were swapped out together; False if they must wait."""
        sequences, host_copy = [parent, *parent.forks], parent.host_copy
        assert host_copy is not None
        is_crowded = parent.group.num_slots(len(sequences)) > num_slots
        if is_crowded or not self.running_set.has_room(host_copy.num_blocks):
            return False
        parent.forks = []
        self.preemption.swap_in(plan, sequences)
        self._enter_all(parent, sequences[1:])
        for sequence in sequences:
            sequence.status = Status.RUNNING
            plan.install(sequence)
            is_full = sequence.num_computed == sequence.table.capacity
            if not is_full and self._limit(sequence, 1) and _has_room(plan, max_tokens):  # otherwise in the next step
                plan.add_decode(sequence)
        return True

    def _add_chunk(self, plan: Plan, sequence: Sequence, max_tokens: int) -> None:
        """Adds a row for the next of the sequence's known tokens, as many as it may have of the step."""
        room = max_tokens - plan.num_tokens
        share = self._share(sequence, room, max_tokens)
        if not (num_tokens := self._limit(sequence, share)):
            return
        plan.add_chunk(sequence, num_tokens)
        if share < room:
            self._cut.append(len(plan.chunks) - 1)
        self._look_for_forks(plan, sequence, max_tokens)

    def _share(self, sequence: Sequence, room: int, max_tokens: int) -> int:
        """How many of the step's `room` tokens a prompt may take. One that the step can't finish leaves half of them to
        the next of its priority, so that a short prompt does not wait for a long one. An eighth of the step is worth a
        row: few long prompts at a time hold blocks."""
        behind = (*self._prefills[-1:], self.queue.peek())
        is_alone = not any(other is not None and other.priority == sequence.priority for other in behind)
        if is_alone or sequence.num_tokens - sequence.num_computed <= room:
            return room
        return min(room, max(1, room // 2, max_tokens // 8))

    def _limit(self, sequence: Sequence, num_tokens: int) -> int:
        """As many of the sequence's next tokens, less the last if it may not sample in this step."""
        num_left = sequence.num_tokens - sequence.num_computed
        return min(num_tokens, num_left - (sequence.host_dependent and self.running_set.awaits_host))

    def _look_for_forks(self, plan: Plan, sequence: Sequence, max_tokens: int) -> None:
        if sequence.num_computed >= sequence.fork_len:
            self._reach_fork(plan, sequence, max_tokens)

    def _reach_fork(self, plan: Plan, parent: Sequence, max_tokens: int) -> None:
        """The parent's row computes the last token that its forks share. Forks without tokens of their own sample from
        its logits and share all its blocks; forks with some go on in the next plan."""
        if not parent.forks:
            return
        if parent.fork_len < parent.num_tokens:
            if parent not in self._forking:
                self._forking.append(parent)
            return
        forks, parent.forks = [fork for fork in parent.forks if fork.status is Status.HELD], []
        num_now = max_tokens - plan.num_samples  # few only while the engine compiles
        for fork in forks[:num_now]:
            fork.table, fork.num_computed = parent.table.fork(parent.num_computed), parent.num_computed
            fork.status, fork.num_cached = Status.RUNNING, parent.num_cached
            plan.install(fork)
            plan.add_fork(parent, fork)
        self.put_back(forks[num_now:])

    def put_back(self, forks: list[Sequence]) -> None:
        """Queues held forks that can't go on with their parent."""
        for fork in forks:
            self.running_set.remove(fork)
        if forks:
            self.queue.push(join(forks))

    def fork(self, plan: Plan) -> list[Sequence]:
        """Starts the forks of parents that computed the shared tokens in an earlier step. Each has tokens of its own
        left to compute, and blocks for them. Returns them."""
        parents, self._forking = self._forking, []
        started = []
        for parent in parents:
            if parent.status is not Status.RUNNING:
                continue  # it was preempted together with its forks, or has ended
            forks, parent.forks = [fork for fork in parent.forks if fork.status is Status.HELD], []
            for fork in forks:
                self._fork_behind(plan, parent, fork)
            started += forks
        return started

    def _fork_behind(self, plan: Plan, parent: Sequence, fork: Sequence) -> None:
        num_blocks = len(fork.table)
        fork.table.release()
        fork.table, fork.num_computed = parent.table.fork(parent.fork_len), parent.fork_len
        if (copy := fork.table.own_tail()) is not None:
            plan.copies.append(copy)
            num_blocks -= 1
        fork.table.allocate(num_blocks)
        fork.status = Status.RUNNING
        plan.install(fork)


def _has_room(plan: Plan, max_tokens: int) -> bool:
    return max(plan.num_tokens, plan.num_samples) < max_tokens
