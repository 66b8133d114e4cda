"""Who runs how many tokens next, on which blocks. Host integers only: no array, no device, no text.

The three verbs of a step are `schedule` (here), `run` (the runner) and `commit` (here). A step is planned before the
tokens of the one before are known; design section 4 says what that means for every event.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

from jaxllm.engine.block_pool import BlockPool
from jaxllm.engine.plan import NO_TOKEN, NOT_FINITE, NewBlock, Plan
from jaxllm.engine.prefix_cache import PrefixCache
from jaxllm.engine.request import Request, Status
from jaxllm.outputs import FinishReason

MAX_STRIKES = 2  # failed steps with a request in them after which it is quarantined
NO_TOKEN_ERRORS = {
    NOT_FINITE: "the model's logits are not finite (NaN or infinity)",
    NO_TOKEN: "allowed_token_ids, bad_words, logit_bias and min_tokens together leave no token to generate; loosen one",
}


class Scheduler:
    """Continuous batching over `max_num_seqs` slots and a block pool, by priority and then arrival."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, prefix_caching: bool = True):
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.prefix_cache = PrefixCache(pool, enabled=prefix_caching)
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self._waiting: list[tuple[tuple[int, int], Request]] = []  # heap; the finished are skipped when popped
        self._num_waiting = 0
        self._free_slots = list(range(max_num_seqs))
        self._draining: list[Request] = []
        self._num_full = self._num_suspects = 0  # running requests for the full sampler, and under suspicion
        self.num_unfinished_full = 0

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def has_work(self) -> bool:
        return bool(self.running or self._num_waiting)

    # ---- events of the layer above

    def add(self, request: Request) -> None:
        """Queues a request. It must fit the pool alone: the engine has refused it otherwise."""
        self.num_unfinished_full += request.needs_full_sampler
        self._queue(request)

    def _queue(self, request: Request) -> None:
        heapq.heappush(self._waiting, (request.order, request))
        self._num_waiting += 1

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request at once, also one in flight: what is still computed of it is dropped by its epoch."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.WAITING:
            self._num_waiting -= 1  # its heap entry goes when it surfaces
        else:
            self._leave(request)
        self.num_unfinished_full -= request.needs_full_sampler
        request.status, request.finish_reason, request.stop_reason = Status.FINISHED, reason, stop_reason

    # ---- schedule

    def schedule(self, max_tokens: int) -> Plan | None:
        """Plans a step of at most `max_tokens` tokens, running requests first. None if nothing can run now.

        Takes slots and blocks, and counts what the plan will have computed: the caller must dispatch it.
        """
        self._evict_drained()
        plan = Plan()
        prefills = self._plan_decodes(plan, max_tokens)
        for request in prefills:  # those not evicted meanwhile for the sake of a decode
            if plan.num_tokens < max_tokens and request.status is Status.RUNNING:
                plan.add_chunk(request, max_tokens - plan.num_tokens)
        self._admit(plan, max_tokens)
        if not plan.num_tokens:
            return None
        plan.full_sampler = self._num_full > 0
        plan.seal()
        for chunk in plan.chunks:  # the next plan may hit them: this one is dispatched before it
            self.prefix_cache.offer(chunk.request, chunk.stop)
        return plan

    def _plan_decodes(self, plan: Plan, max_tokens: int) -> list[Request]:
        """Adds the running requests with one token to compute; returns those with more."""
        prefills, decodes = [], plan.decodes
        block_size = self.pool.block_size
        for request in list(self.running):
            if request.status is not Status.RUNNING:  # draining, or evicted for one before it
                continue
            planned_len = request.num_tokens + request.num_in_flight
            if request.num_in_flight and (request.host_dependent or planned_len >= request.max_total_len):
                continue
            if planned_len - request.num_computed > 1:
                prefills.append(request)
                continue
            if len(decodes) == max_tokens:
                break
            if request.num_computed == len(request.block_ids) * block_size:
                if not self._grow(plan, request):
                    continue
            plan.add_decode(request)
        if len(decodes) == max_tokens < len(self.running):  # who was left out comes first in the next step
            served = set(decodes)
            self.running.sort(key=served.__contains__)
        plan.num_tokens = len(decodes)  # now, as a victim may have left the plan again
        return prefills

    def _grow(self, plan: Plan, request: Request) -> bool:
        """Gives `request` one more block, if need be by preempting the last in order. False: not this step."""
        while self.pool.num_free == 0:
            if self._draining:
                return False  # one victim at a time; its blocks come back when it is drained
            victim = max((r for r in self.running if r.status is Status.RUNNING), key=lambda r: r.order)
            self._preempt(plan, victim)
            if victim is request:
                return False
        (block,) = self.pool.allocate(1)
        plan.new_blocks.append(NewBlock(request.slot, len(request.block_ids), block))
        request.block_ids.append(block)
        return True

    def _preempt(self, plan: Plan, victim: Request) -> None:
        """Takes the victim out of the plan; evicts it now, or once the step in flight has been committed."""
        plan.remove_decode(victim)
        if victim.num_in_flight:
            victim.status = Status.DRAINING
            self._draining.append(victim)
        else:
            self._evict(victim)

    def _evict_drained(self) -> None:
        waiting_for = [r for r in self._draining if r.status is Status.DRAINING]
        self._draining = [r for r in waiting_for if r.num_in_flight]
        for request in waiting_for:
            if not request.num_in_flight:
                self._evict(request)

    def _evict(self, request: Request) -> None:
        """Back to the queue, in its old place; its tokens are recomputed when it is admitted again."""
        self._leave(request)
        self._queue(request)
        self.num_preemptions += 1

    def _leave(self, request: Request) -> None:
        """Takes a running request's slot and blocks away, and ends its epoch."""
        self.running.remove(request)
        self._num_full -= request.needs_full_sampler
        self._num_suspects -= request.strikes > 0
        self.prefix_cache.end(request)
        self.pool.release(request.block_ids)
        self._free_slots.append(request.slot)
        request.start_over()

    # ---- admission

    def _admit(self, plan: Plan, max_tokens: int) -> None:
        """Admits waiting requests in order, each with all the blocks its known tokens need, until one must wait.

        One that waits only for a running prefill to write its next block lets others pass, but keeps a slot.
        """
        deferred: list[tuple[tuple[int, int], Request]] = []
        while self._waiting and len(self._free_slots) > len(deferred) and plan.num_tokens < max_tokens:
            _, request = self._waiting[0]
            if request.status is Status.WAITING:
                hits = self.prefix_cache.find(request)
                if hits is None:
                    deferred.append(heapq.heappop(self._waiting))
                    continue
                if not self._start(request, hits):
                    break
                self._num_waiting -= 1
                plan.admitted.append((request, request.num_computed))
                if request.num_tokens - request.num_computed > 1:
                    plan.add_chunk(request, max_tokens - plan.num_tokens)
                else:  # one token is left, which is the slot's last: a decode row like any other
                    plan.add_decode(request)
                    plan.num_tokens += 1
            heapq.heappop(self._waiting)
        for entry in deferred:
            heapq.heappush(self._waiting, entry)

    def _start(self, request: Request, hits: list[int]) -> bool:
        """Gives a waiting request its slot and blocks, of which it shares `hits`; False if it must wait."""
        if self._num_suspects:
            return False  # one suspect at a time and nobody new beside it, so that a failure names the culprit
        num_new = -(-request.num_tokens // self.pool.block_size) - len(hits)
        # Room for those who run to grow; without it the newcomer would be evicted again at once.
        reserve = len(self.running) + 1 if self.running else 0
        if num_new + min(reserve, self.pool.num_blocks // 8) > self.pool.num_free - self.pool.count_free(hits):
            return False
        self.pool.acquire(hits)
        request.block_ids = hits + self.pool.allocate(num_new)
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        request.num_computed = len(hits) * self.pool.block_size
        request.num_keyed = len(hits)
        self.prefix_cache.begin(request)
        self.running.append(request)
        self._num_full += request.needs_full_sampler
        self._num_suspects += request.strikes > 0
        if request.num_cached < 0:
            request.num_cached = request.num_computed
            self.num_prompt_tokens += len(request.prompt_token_ids)
            self.num_cached_tokens += request.num_cached
        return True

    # ---- commit

    def commit(self, plan: Plan, sampled: Sequence[int], logprobs: Sequence[Any] | None = None) -> list[Request]:
        """Appends each row's token, in the plan's order (ignored for rows that don't sample), and ends what is
        over. Returns the requests that got a token. A negative one is a key of `NO_TOKEN_ERRORS`. `logprobs` has what
        else there is to keep of each row.
        """
        updated = []
        num_decodes, block_size = len(plan.decodes), self.pool.block_size
        for i, request in enumerate(plan.rows):
            if request.epoch != plan.epochs[i] or (i >= num_decodes and not plan.chunks[i - num_decodes].samples):
                continue
            token = sampled[i]
            updated.append(request)
            request.num_in_flight -= 1
            if token < 0:
                request.error = NO_TOKEN_ERRORS[token]
                self.finish(request, "error")
                continue
            if logprobs is not None and request.params.wants_logprobs:
                request.logprobs[len(request.output_token_ids) :] = [logprobs[i]]  # once, whatever is interrupted
            request.output_token_ids.append(token)
            request.num_tokens += 1
            if (request.num_keyed + 1) * block_size <= request.num_computed:
                self.prefix_cache.offer(request, min(request.num_computed, request.num_tokens))
            if request.strikes and request.num_tokens > request.suspect_len:
                request.strikes = 0
                self._num_suspects -= 1
            self._finish_if_over(request, token)
        return updated

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
        self.pool.reset()
        self.prefix_cache.reset()
        self.running, self._draining, self._waiting = [], [], []
        self._free_slots = list(range(self.max_num_seqs))
        self._num_waiting = self._num_full = self._num_suspects = self.num_unfinished_full = 0
        for request in unfinished:
            request.start_over()
            self.add(request)
            if request.output_token_ids:  # its last token may have been its end, and not been looked at
                self._finish_if_over(request, request.output_token_ids[-1])
        quarantined = []
        for request in blamed:
            if request.status is Status.FINISHED:
                continue
            request.strikes += 1
            request.suspect_len = request.num_tokens + 1
            if request.strikes >= MAX_STRIKES:
                request.error = f"the step failed {request.strikes} times with this request in it"
                self.finish(request, "error")
                quarantined.append(request)
        return quarantined

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. O(blocks + running)."""
        self.pool.check()
        held = [0] * self.pool.num_blocks
        for request in self.running:
            assert request.status in (Status.RUNNING, Status.DRAINING)
            assert 0 <= request.num_in_flight <= 2
            assert request.num_computed <= request.num_tokens + request.num_in_flight
            assert request.num_computed <= len(request.block_ids) * self.pool.block_size
            assert len(set(request.block_ids)) == len(request.block_ids)
            for block in request.block_ids:
                held[block] += 1
        assert held == self.pool.refs
        slots = [request.slot for request in self.running] + self._free_slots
        assert sorted(slots) == list(range(self.max_num_seqs))
        assert self._num_waiting == sum(r.status is Status.WAITING for _, r in self._waiting)
        self.prefix_cache.check(self.running)
        assert self._num_full == sum(r.needs_full_sampler for r in self.running)
        assert self._num_suspects == sum(r.strikes > 0 for r in self.running) <= 1
