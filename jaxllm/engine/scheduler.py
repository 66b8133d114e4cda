"""Who runs how many tokens next, on which blocks. Host integers only: no array, no device, no text.

The three verbs of a step are `schedule` (here), `run` (the runner) and `commit` (here). A step is planned before the
tokens of the one before are known; design section 4 says what that means for every event.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxllm.engine import beam_round
from jaxllm.engine.block_pool import BlockPool
from jaxllm.engine.plan import NO_TOKEN, NOT_FINITE, Copy, NewBlock, Plan
from jaxllm.engine.preemption import Preemption
from jaxllm.engine.prefix_cache import PrefixCache
from jaxllm.engine.request import Request, SequenceGroup, Status, join
from jaxllm.engine.residents import Residents
from jaxllm.outputs import FinishReason

MAX_STRIKES = 2  # failed steps with a request in them after which it is quarantined
NO_TOKEN_ERRORS = {
    NOT_FINITE: "the model's logits are not finite (NaN or infinity)",
    NO_TOKEN: "allowed_token_ids, bad_words, logit_bias and min_tokens together leave no token to generate; loosen one",
}


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
        self.residents = Residents(pool, self.prefix_cache, max_num_seqs)
        self.preemption = Preemption(self.residents, self._queue, prefers_swap, max_host_blocks)
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.num_copied = 0  # blocks, on their first write while shared
        self.num_unfinished_full = 0
        self._waiting: list[tuple[tuple[int, int], Request]] = []  # heap of those that others may join
        self._num_waiting = 0
        self._forking: list[Request] = []  # leaders whose forks go on by themselves
        self._moved: list[Request] = []  # beams whose slots' rows are out of date

    @property
    def running(self) -> list[Request]:
        return self.residents.running

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def has_work(self) -> bool:
        return bool(self.running or self._num_waiting)

    # ---- events of the layer above

    def add(self, group: SequenceGroup) -> None:
        """Queues a user's request. It must fit the pool alone: the engine has refused it otherwise."""
        self.num_unfinished_full += sum(request.needs_full_sampler for request in group.members)
        self._queue(join(group.beams if group.is_search else group.members))

    def _queue(self, leader: Request) -> None:
        """`leader` waits, and with it those that will fork from it."""
        heapq.heappush(self._waiting, (leader.order, leader))
        self._num_waiting += 1 + len(leader.forks)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request at once, also one in flight: what is still computed of it is dropped by its epoch. Beams end
        together."""
        if request.status is Status.FINISHED:
            return
        group = request.group
        if group.is_search:
            group.results = group.results or beam_round.results(group, reason, request.error)
            beams = group.beams
            self._num_waiting -= sum(beam.status is Status.WAITING for beam in beams)
            for member in group.members:
                self._end(member, reason, None)
            return
        if request.status is Status.WAITING:
            self._num_waiting -= 1
        self._end(request, reason, stop_reason)

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        if request.slot >= 0:
            self.residents.leave(request)
        else:
            self.preemption.forget(request)
        self.num_unfinished_full -= request.needs_full_sampler
        request.status, request.finish_reason, request.stop_reason = Status.FINISHED, reason, stop_reason

    # ---- schedule

    def schedule(self, max_tokens: int) -> Plan | None:
        """Plans a step of at most `max_tokens` tokens, running requests first. None if nothing can run now.

        Takes slots and blocks, and counts what the plan will have computed: the caller must dispatch it.
        """
        plan = Plan()
        self.preemption.evict_drained(plan)
        if self.pool.num_free < len(self.running):
            self.preemption.make_room(plan)
        if self._moved:
            self._install_moved(plan)
        prefills = self._plan_decodes(plan, max_tokens)
        if self._forking:
            prefills += self._fork(plan)
        for request in prefills:
            if plan.num_tokens < max_tokens and plan.num_samples < max_tokens:
                self._add_chunk(plan, request, max_tokens)
        if not plan.swap_outs:  # otherwise blocks are short, and the victim would come straight back
            self._admit(plan, max_tokens)
        if plan.is_empty:
            return None
        plan.full_sampler, plan.has_beams = self.residents.num_full > 0, self.residents.num_beams > 0
        plan.seal()
        for chunk in plan.chunks:  # the next plan may hit them: this one is dispatched before it
            self.prefix_cache.offer(chunk.request, chunk.stop)
        return plan

    def _install_moved(self, plan: Plan) -> None:
        for beam in self._moved:
            if beam.status is Status.RUNNING:
                plan.install(beam)
        self._moved = []

    def _plan_decodes(self, plan: Plan, max_tokens: int) -> list[Request]:
        """Adds the running requests with one token to compute; returns those with more."""
        prefills, decodes = [], plan.decodes
        block_size = self.pool.block_size
        for request in self.running:
            if request.status is not Status.RUNNING or not request.can_sample:
                continue
            if request.num_tokens + request.num_in_flight - request.num_computed > 1:
                prefills.append(request)
                continue
            if len(decodes) == max_tokens:
                break
            if request.num_computed == len(request.block_ids) * block_size:
                if not self._grow(plan, request):
                    continue
            elif request.shares_tail and not self._own_tail(plan, request):
                continue
            plan.add_decode(request)
        if len(decodes) == max_tokens < len(self.running):  # who was left out comes first in the next step
            served = set(decodes)
            self.running.sort(key=served.__contains__)
        return prefills

    def _grow(self, plan: Plan, request: Request) -> bool:
        """Gives `request` one more block; False while a victim is drained for it."""
        if not self.pool.num_free:
            return False
        (block,) = self.pool.allocate(1)
        plan.new_blocks.append(NewBlock(request.slot, len(request.block_ids), block))
        request.block_ids.append(block)
        return True

    def _own_tail(self, plan: Plan, request: Request) -> bool:
        """Copy-on-write: the block that `request` writes next becomes its own. False as in `_grow`."""
        shared = request.block_ids[-1]
        if self.pool.refs[shared] > 1:
            if not self.pool.num_free:
                return False
            (block,) = self.pool.allocate(1)
            plan.copies.append(Copy(shared, block))
            plan.new_blocks.append(NewBlock(request.slot, len(request.block_ids) - 1, block))
            request.block_ids[-1] = block
            self.pool.release([shared])
            self.num_copied += 1
        request.shares_tail = False
        return True

    def _add_chunk(self, plan: Plan, request: Request, max_tokens: int) -> None:
        plan.add_chunk(request, max_tokens - plan.num_tokens)
        if request.forks and request.num_computed >= request.fork_len:
            self._reach_fork(plan, request, max_tokens)

    def _reach_fork(self, plan: Plan, leader: Request, max_tokens: int) -> None:
        """The leader's row computes the last token that its forks share."""
        if leader.fork_len < leader.num_tokens:
            self._forking.append(leader)  # its blocks are theirs when this step is dispatched
            return
        shares_tail = leader.num_computed % self.pool.block_size > 0
        forks, leader.forks = leader.forks, []
        leader.shares_tail = shares_tail
        for i, fork in enumerate(forks):
            if fork.status is not Status.HELD:
                continue  # it has ended
            if plan.num_samples == max_tokens:  # while the engine compiles
                self._put_back(forks[i:])
                break
            self.pool.acquire(leader.block_ids)
            fork.share(leader, list(leader.block_ids), leader.num_computed)
            fork.status, fork.shares_tail = Status.RUNNING, shares_tail
            plan.install(fork)
            plan.add_fork(leader, fork)

    def _fork(self, plan: Plan) -> list[Request]:
        """Lets forks go on behind what their leaders have computed in steps before; each has tokens left to compute."""
        leaders, self._forking = self._forking, []
        started = []
        for leader in leaders:
            if leader.status is not Status.RUNNING:
                continue  # it was preempted with them, or has ended
            num_shared, num_copied = divmod(leader.fork_len, self.pool.block_size)
            forks, leader.forks = leader.forks, []
            for fork in forks:
                if fork.status is not Status.HELD:
                    continue  # it has ended
                if num_copied:
                    plan.copies.append(Copy(leader.block_ids[num_shared], fork.block_ids[0]))
                    self.num_copied += 1
                self.pool.acquire(leader.block_ids[:num_shared])
                fork.share(leader, leader.block_ids[:num_shared] + fork.block_ids, leader.fork_len)
                fork.num_keyed = min(fork.num_keyed, num_shared)
                fork.status = Status.RUNNING
                plan.install(fork)
                started.append(fork)
        return started

    def _put_back(self, forks: list[Request]) -> None:
        """Forks without a place go to the queue, and find there what the prefix cache has."""
        for fork in forks:
            if fork.slot >= 0:
                self.residents.leave(fork)
        self._queue(join(forks))

    # ---- admission

    def _admit(self, plan: Plan, max_tokens: int) -> None:
        """Admits waiting requests in order, each with all the blocks its known tokens need, until one must wait.

        One that waits only for a running prefill to write its next block lets others pass, but keeps a slot.
        """
        deferred: list[tuple[tuple[int, int], Request]] = []
        while self._waiting and max(plan.num_tokens, plan.num_samples) < max_tokens:
            num_slots = len(self.residents.free_slots) - len(deferred)
            if num_slots < 1 or self.residents.num_suspects:
                break  # one suspect at a time and nobody new beside it, so that a failure names the culprit
            entry = heapq.heappop(self._waiting)
            request = entry[1]
            if not self._is_leader(request):
                continue
            if request.host_copy is not None:
                started = self._resume(plan, request, num_slots, max_tokens)
            else:
                hits = self.prefix_cache.find(request)
                if hits is None:
                    deferred.append(entry)
                    continue
                started = self._start(plan, request, hits, num_slots, max_tokens)
            if not started:
                deferred.append(entry)
                break
        for entry in deferred:
            heapq.heappush(self._waiting, entry)

    def _is_leader(self, request: Request) -> bool:
        """Whether a popped entry is to be admitted. The forks of one that has ended get a leader of their own."""
        request.forks = [fork for fork in request.forks if fork.status is not Status.FINISHED]
        if request.status is Status.FINISHED and request.forks:
            forks, request.forks = request.forks, []
            self._num_waiting -= len(forks)
            self._queue(join(forks))
        return request.status is Status.WAITING

    def _start(self, plan: Plan, leader: Request, hits: list[int], num_slots: int, max_tokens: int) -> bool:
        """Gives a waiting request its slot and blocks, of which it shares `hits`, and a slot to those who will fork
        from it; False if it must wait."""
        group, pool, block_size = leader.group, self.pool, self.pool.block_size
        forks, idle = leader.forks, []
        if group.is_search:  # all its members have a slot or none
            if len(group.members) > num_slots:
                return False
            idle = [member for member in group.members if member not in group.beams]
        elif leader.strikes or any(fork.strikes for fork in forks):
            forks = []  # a suspect runs alone
        else:
            forks = forks[: num_slots - 1]
        num_new = -(-leader.num_tokens // block_size) - len(hits)
        tails = [self._num_tail_blocks(leader, fork) for fork in forks]
        while not self.residents.has_room(num_new + pool.count_free(hits) + sum(tails)):
            if group.is_search or not tails:
                return False
            tails.pop()
        leader.forks, others = forks[: len(tails)], leader.forks[len(tails) :]
        self._num_waiting -= 1 + len(tails) + len(others)
        pool.acquire(hits)
        leader.block_ids = hits + pool.allocate(num_new)
        leader.num_computed, leader.num_keyed = len(hits) * block_size, len(hits)
        for fork, num_blocks in zip(leader.forks, tails, strict=True):
            fork.block_ids = pool.allocate(num_blocks)
        self.residents.enter(leader, Status.RUNNING)
        for request in leader.forks + idle:
            self.residents.enter(request, Status.HELD)
        self.prefix_cache.begin(leader)
        if others:
            self._queue(join(others))
        self._count_cached(leader)
        plan.install(leader)
        self._begin(plan, leader, max_tokens)
        return True

    def _num_tail_blocks(self, leader: Request, fork: Request) -> int:
        """Blocks of its own that a fork needs for the tokens it has: none if it ends where it forks."""
        if fork.num_tokens == leader.fork_len == leader.num_tokens:
            return 0
        return -(-fork.num_tokens // self.pool.block_size) - leader.fork_len // self.pool.block_size

    def _begin(self, plan: Plan, request: Request, max_tokens: int) -> None:
        """Adds the first row of a request that was just admitted."""
        if request.num_tokens - request.num_computed > 1:
            self._add_chunk(plan, request, max_tokens)
            return
        plan.add_decode(request)  # one token is left, which is the slot's last: a decode row like any other
        if request.forks:
            self._reach_fork(plan, request, max_tokens)

    def _count_cached(self, request: Request) -> None:
        if request.num_cached < 0:
            request.num_cached = request.num_computed
            self.num_prompt_tokens += len(request.prompt_token_ids)
            self.num_cached_tokens += request.num_cached

    def _resume(self, plan: Plan, leader: Request, num_slots: int, max_tokens: int) -> bool:
        """Brings back what was swapped out together; False if it must wait."""
        group, sequences = leader.group, [leader, *leader.forks]
        seats = group.members if group.is_search else sequences
        if len(seats) > num_slots or not self.residents.has_room(leader.host_copy.num_blocks):
            return False
        leader.forks = []
        self._num_waiting -= len(sequences)
        self.preemption.swap_in(plan, sequences)
        for request in seats:
            self.residents.enter(request, Status.RUNNING if request in sequences else Status.HELD)
        for request in sequences:
            plan.install(request)
            is_full = request.num_computed == len(request.block_ids) * self.pool.block_size  # it grows in the next
            if not is_full and max(plan.num_tokens, plan.num_samples) < max_tokens:
                plan.add_decode(request)
        return True

    # ---- commit

    def commit(
        self,
        plan: Plan,
        sampled: Sequence[int],
        logprobs: Sequence[Any] | None = None,
        candidates: Sequence[Any] | None = None,
    ) -> list[Request]:
        """Appends each sample's token, in the plan's order, and ends what is over. Returns the requests that have
        news. A negative token is a key of `NO_TOKEN_ERRORS`. `logprobs` has what else there is to keep of each
        sample, `candidates` what a beam may go on with.
        """
        updated = []
        block_size = self.pool.block_size
        for i, request in enumerate(plan.samples):
            if request.epoch != plan.epochs[i]:
                continue
            token = sampled[i]
            request.num_in_flight -= 1
            if request.group.round is not None and token != NOT_FINITE:
                updated += self._commit_beam(request, candidates[i])
                continue
            updated.append(request)
            if token < 0:
                request.error = NO_TOKEN_ERRORS[token]
                self.finish(request, "error")
                continue
            if logprobs is not None and request.params.tracks_logprobs:
                request.logprobs[len(request.output_token_ids) :] = [logprobs[i]]  # once, whatever is interrupted
            request.output_token_ids.append(token)
            request.num_tokens += 1
            if (request.num_keyed + 1) * block_size <= request.num_computed:
                self.prefix_cache.offer(request, min(request.num_computed, request.num_tokens))
            if request.strikes and request.num_tokens > request.suspect_len:
                self._clear(request)
            self._finish_if_over(request, token)
        return updated

    def _commit_beam(self, beam: Request, candidates: Any) -> list[Request]:
        """The round ends with its last beam. Returns the request if the search does too."""
        if beam.status is not Status.RUNNING:
            return []  # it is to be preempted, and will come again
        group, first = beam.group, beam.group.members[0]
        beam.candidates, beam.status = candidates, Status.HELD
        if any(other.candidates is None for other in group.beams):
            return []
        self._moved += beam_round.advance(group, self.pool)
        if group.round.search.done:
            if not group.round.search.finished:
                first.error = NO_TOKEN_ERRORS[NO_TOKEN]
            self.finish(first, "error" if first.error else "stop")
            return [first]
        for other in group.beams:
            if (other.num_keyed + 1) * self.pool.block_size <= other.num_computed:
                self.prefix_cache.offer(other, other.num_computed)
        if first.strikes and group.beams[0].num_tokens > first.suspect_len:
            self._clear(first)
        return []

    def _clear(self, suspect: Request) -> None:
        suspect.strikes = 0
        self.residents.num_suspects -= 1

    def _finish_if_over(self, request: Request, token: int) -> None:
        if token in request.stop_ids and len(request.output_token_ids) >= request.params.min_tokens:
            self.finish(request, "stop", None if token in request.eos_ids else token)
        elif request.num_tokens >= request.max_total_len:
            self.finish(request, "length")

    # ---- failure

    def restart(self, unfinished: Iterable[Request], blamed: Iterable[Request] = ()) -> list[Request]:
        """The device's state is gone, and perhaps a call of ours was interrupted halfway: all `unfinished` requests
        start over as recomputes; nothing is taken from what was running, held or cached.

        Each of `blamed`, the requests of the step that failed, gets a strike; one with `MAX_STRIKES` is ended with an
        error and returned.
        """
        self.residents.reset()
        self.preemption.reset()
        self._waiting, self._forking, self._moved = [], [], []
        self._num_waiting = self.num_unfinished_full = 0
        groups: dict[SequenceGroup, list[Request]] = {}
        for request in unfinished:
            groups.setdefault(request.group, []).append(request)
        for group, requests in groups.items():
            self._restart_group(group, requests)
        quarantined = []
        for request in dict.fromkeys(r.group.members[0] if r.group.is_search else r for r in blamed):
            if request.status is Status.FINISHED:
                continue
            request.strikes += 1
            request.suspect_len = 1 + (request.group.beams[0] if request.group.is_search else request).num_tokens
            if request.strikes >= MAX_STRIKES:
                request.error = f"the step failed {request.strikes} times with this request in it"
                self.finish(request, "error")
                quarantined.append(request)
        return quarantined

    def _restart_group(self, group: SequenceGroup, requests: list[Request]) -> None:
        if group.is_search:
            beam_round.restore(group)
        else:
            group.members = requests
        for request in group.members:
            request.start_over()
        self.add(group)
        if group.is_search:
            if group.round.search.done:  # it was interrupted before it was told
                self.finish(group.members[0], "stop")
            return
        for request in requests:
            if request.output_token_ids:  # its last token may have been its end, and not been looked at
                self._finish_if_over(request, request.output_token_ids[-1])

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. O(blocks + running + waiting)."""
        self.residents.check()
        waiting = [r for _, leader in self._waiting for r in (leader, *leader.forks) if r.status is Status.WAITING]
        assert self._num_waiting == len(waiting) == len(set(waiting))
        copies = {r.host_copy for r in waiting} - {None}
        assert self.preemption.num_host_blocks == sum(copy.num_blocks for copy in copies)
        assert self.preemption.num_host_blocks <= self.preemption.max_host_blocks
