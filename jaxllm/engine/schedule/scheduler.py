"""Who runs how many tokens next, on which blocks. Host integers only: no array, no device, no text.

The three verbs of a step are `schedule` (here), `run` (the runner) and `commit` (here). A step is planned before the
tokens of the one before are known; design section 4 says what that means for every event.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxllm.engine.beam import group as beam_round
from jaxllm.engine.schedule.admission import Admission
from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.plan import NO_TOKEN, NOT_FINITE, Copy, NewBlock, Plan
from jaxllm.engine.schedule.preemption import Preemption
from jaxllm.engine.schedule.prefix_cache import PrefixCache
from jaxllm.engine.schedule.running import Residents
from jaxllm.engine.schedule.sequence import Request, SequenceGroup, Status, join
from jaxllm.engine.schedule.waiting import WaitingQueue
from jaxllm.outputs import FinishReason

MAX_STRIKES = 2  # failed steps with a request in them after which it is quarantined
NO_TOKEN_ERRORS = {
    NOT_FINITE: "the model's logits are not finite (NaN or infinity)",
    NO_TOKEN: "allowed_token_ids, bad_words, logit_bias, min_tokens and structured_outputs together leave no token to "
    "generate; loosen one",
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
        self.waiting = WaitingQueue()
        self.preemption = Preemption(self.waiting, self.residents, prefers_swap, max_host_blocks)
        self.admission = Admission(self.waiting, self.residents, self.preemption)
        self.num_copied = 0  # blocks, because several shared them
        self.num_unfinished_full = self.num_unfinished_masked = 0
        self.num_not_finite = 0  # requests that ended for their logits
        self._moved: list[Request] = []  # beams whose slots' rows are out of date

    @property
    def running(self) -> list[Request]:
        return self.residents.running

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # ---- events of the layer above

    def add(self, group: SequenceGroup) -> None:
        """Queues a user's request. It must fit the pool alone: the engine has refused it otherwise."""
        self.num_unfinished_full += sum(request.needs_full_sampler for request in group.members)
        self.num_unfinished_masked += sum(request.needs_mask for request in group.members)
        self.waiting.push(join(group.beams if group.is_search else group.members))

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request at once, also one in flight: what is still computed of it is dropped by its epoch. Beams end
        together."""
        if request.status is Status.FINISHED:
            return
        group = request.group
        if group.is_search:
            group.results = group.results or beam_round.results(group, reason, request.error)
            for member in group.members:
                self._end(member, reason, None)
        else:
            orphans = [fork for fork in request.forks if fork.status is Status.HELD]
            self._end(request, reason, stop_reason)
            self.admission.put_back(orphans)

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        if request.slot >= 0:
            self.residents.leave(request)
        elif not request.group.is_search or request in request.group.beams:  # another member does not wait for itself
            self.waiting.forget(request)
            self.preemption.forget(request)
        self.num_unfinished_full -= request.needs_full_sampler
        self.num_unfinished_masked -= request.needs_mask
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
        prefills += self.admission.fork(plan)
        for request in prefills:
            if max(plan.num_tokens, plan.num_samples) < max_tokens:
                self.admission.add_chunk(plan, request, max_tokens)
        if not plan.swap_outs:  # otherwise blocks are short, and the victim would come straight back
            self.admission.admit(plan, max_tokens)
        self.num_copied += len(plan.copies)
        if plan.is_empty:
            return None
        self.preemption.pass_forgotten(plan)
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
            num_left = request.num_tokens + request.num_in_flight - request.num_computed
            if num_left > 1 or request.forks and request.num_computed < request.fork_len:  # whose forks wait for it
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
        request.shares_tail = False
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
                self.num_not_finite += token == NOT_FINITE
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
        for other in group.beams:  # before some of them end: others may wait for what they have written
            if (other.num_keyed + 1) * self.pool.block_size <= other.num_computed:
                self.prefix_cache.offer(other, other.num_computed)
            self.prefix_cache.end(other)  # also for what it may not offer, of older parameters
        try:
            self._moved += beam_round.advance(group, self.pool)
        except beam_round.TextError as error:
            first.error = str(error)
            self.finish(first, "error")
            return [first]
        if group.round.search.done:
            if not group.round.search.finished:
                first.error = NO_TOKEN_ERRORS[NO_TOKEN]
            self.finish(first, "error" if first.error else "stop")
            return [first]
        if first.strikes and group.beams[0].num_tokens > first.suspect_len:
            self._clear(first)
        return []

    def _clear(self, suspect: Request) -> None:
        suspect.strikes = 0
        self.residents.num_suspects -= 1

    def _finish_if_over(self, request: Request, token: int) -> None:
        if token in request.stop_ids and len(request.output_token_ids) >= request.params.min_tokens:
            self.finish(request, "stop", None if token in request.eos_ids else token)
        elif request.matcher is not None and request.matcher.ends_after(request.output_token_ids):
            request.error = request.matcher.error
            self.finish(request, "error" if request.error else "stop")
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
        self.admission.reset()
        self.waiting.clear()
        self._moved = []
        self.num_unfinished_full = self.num_unfinished_masked = 0
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
            group.results = None
            beam_round.restore(group)
        else:
            group.members = requests
        for request in group.members:
            request.leave_device()
            request.forget_computed()
            if request.matcher is not None and not group.is_search:
                request.matcher.restart()  # the interrupt may have come while it took a token
        if group.is_search and group.round.search.done:  # it was interrupted before it was told
            self.num_unfinished_full += sum(request.needs_full_sampler for request in group.members)
            self.num_unfinished_masked += sum(request.needs_mask for request in group.members)
            self.finish(group.members[0], "stop")
            return
        self.add(group)
        if group.is_search:
            return
        for request in requests:
            if request.output_token_ids:  # its last token may have been its end, and not been looked at
                self._finish_if_over(request, request.output_token_ids[-1])

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. O(blocks + running + waiting)."""
        self.residents.check()
        self.waiting.check()
        copies = {request.host_copy for request in self.waiting.requests()} - {None}
        assert self.preemption.num_host_blocks == sum(copy.num_blocks for copy in copies)
        assert self.preemption.num_host_blocks <= self.preemption.max_host_blocks
