"""How waiting requests get on the device: with a prefix that is cached, with forks that share what they compute, or
back from host memory."""

from jaxllm.engine.schedule.plan import Copy, Plan
from jaxllm.engine.schedule.preemption import Preemption
from jaxllm.engine.schedule.running import Residents
from jaxllm.engine.schedule.sequence import Request, Status, join
from jaxllm.engine.schedule.waiting import WaitingQueue


class Admission:
    """Takes requests from `queue` while there are slots and blocks."""

    def __init__(self, queue: WaitingQueue, residents: Residents, preemption: Preemption):
        self.queue, self.residents, self.preemption = queue, residents, preemption
        self.pool, self.prefix_cache = residents.pool, residents.prefix_cache
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.reset()

    def reset(self) -> None:
        self._forking: list[Request] = []  # leaders whose forks go on by themselves

    def admit(self, plan: Plan, max_tokens: int) -> None:
        """Admits waiting requests in order, each with all the blocks its known tokens need, until one must wait.

        One that waits only for a running prefill to write its next block lets others pass, but keeps a slot.
        """
        deferred: list[Request] = []
        while max(plan.num_tokens, plan.num_samples) < max_tokens:
            num_slots = len(self.residents.free_slots) - len(deferred)
            if num_slots < 1 or self.residents.num_suspects:
                break  # one suspect at a time and nobody new beside it, so that a failure names the culprit
            leader = self.queue.pop()
            if leader is None:
                break
            hits: list[int] | None = []
            if leader.host_copy is None:
                hits = self.prefix_cache.find(leader)
            if hits is None:
                deferred.append(leader)
            elif not self._enter(plan, leader, hits, num_slots, max_tokens):
                deferred.append(leader)
                break
        for leader in deferred:
            self.queue.push(leader)

    def _enter(self, plan: Plan, leader: Request, hits: list[int], num_slots: int, max_tokens: int) -> bool:
        if leader.host_copy is not None:
            return self._resume(plan, leader, num_slots, max_tokens)
        return self._start(plan, leader, hits, num_slots, max_tokens)

    def _start(self, plan: Plan, leader: Request, hits: list[int], num_slots: int, max_tokens: int) -> bool:
        """Gives a waiting request its slot and blocks, of which it shares `hits`, and a slot to those who will fork
        from it; False if it must wait."""
        pool, block_size = self.pool, self.pool.block_size
        must_join = leader.group.is_search  # all its beams have a place or none
        if must_join and len(leader.group.members) > num_slots:
            return False
        forks = leader.forks[: num_slots - 1]
        if not must_join and any(request.strikes for request in (leader, *leader.forks)):
            forks = []  # a suspect runs alone
        num_new = -(-leader.num_tokens // block_size) - len(hits)
        tails = [self._num_tail_blocks(leader, fork) for fork in forks]
        while not self.residents.has_room(num_new + pool.count_free(hits) + sum(tails)):
            if must_join or not tails:
                return False
            tails.pop()
        leader.forks, others = forks[: len(tails)], leader.forks[len(tails) :]
        if others:
            self.queue.push(join(others))
        pool.acquire(hits)
        leader.block_ids = hits + pool.allocate(num_new)
        leader.num_computed, leader.num_keyed = len(hits) * block_size, len(hits)
        for fork, num_blocks in zip(leader.forks, tails, strict=True):
            fork.block_ids = pool.allocate(num_blocks)
        self._enter_all(leader, leader.forks)
        self._count_cached(leader)
        self.prefix_cache.begin(leader)
        plan.install(leader)
        if leader.num_tokens - leader.num_computed > 1:
            self.add_chunk(plan, leader, max_tokens)
        else:  # one token is left, which is the slot's last: a decode row like any other
            plan.add_decode(leader)
            self._reach_fork(plan, leader, max_tokens)
        return True

    def _enter_all(self, leader: Request, forks: list[Request]) -> None:
        """The leader runs; its forks, and places for beams to come, are held."""
        self.residents.enter(leader, Status.RUNNING)
        group = leader.group
        places = [member for member in group.members if member not in group.beams] if group.is_search else []
        for request in forks + places:
            self.residents.enter(request, Status.HELD)

    def _num_tail_blocks(self, leader: Request, fork: Request) -> int:
        """Blocks of its own that a fork needs for the tokens it has: none if it ends where it forks."""
        if fork.num_tokens == leader.fork_len == leader.num_tokens:
            return 0
        return -(-fork.num_tokens // self.pool.block_size) - leader.fork_len // self.pool.block_size

    def _count_cached(self, request: Request) -> None:
        if request.num_cached < 0:
            request.num_cached = request.num_computed
            self.num_prompt_tokens += len(request.prompt_token_ids)
            self.num_cached_tokens += request.num_cached

    def _resume(self, plan: Plan, leader: Request, num_slots: int, max_tokens: int) -> bool:
        """Brings back what was swapped out together; False if it must wait."""
        sequences = [leader, *leader.forks]
        num_places = len(leader.group.members) if leader.group.is_search else len(sequences)
        if num_places > num_slots or not self.residents.has_room(leader.host_copy.num_blocks):
            return False
        leader.forks = []
        self.preemption.swap_in(plan, sequences)
        self._enter_all(leader, sequences[1:])
        for request in sequences:
            request.status = Status.RUNNING
            plan.install(request)
            is_full = request.num_computed == len(request.block_ids) * self.pool.block_size  # it grows in the next
            if not is_full and max(plan.num_tokens, plan.num_samples) < max_tokens:
                plan.add_decode(request)
        return True

    # ---- forks

    def add_chunk(self, plan: Plan, request: Request, max_tokens: int) -> None:
        """Adds a row for the next of the request's known tokens, as many as the step has room for."""
        plan.add_chunk(request, max_tokens - plan.num_tokens)
        if request.num_computed >= request.fork_len:
            self._reach_fork(plan, request, max_tokens)

    def _reach_fork(self, plan: Plan, leader: Request, max_tokens: int) -> None:
        """The leader's row computes the last token that its forks share. Those that end there sample from its logits,
        and share all its blocks; the others go on when this step is dispatched."""
        if not leader.forks:
            return
        if leader.fork_len < leader.num_tokens:
            if leader not in self._forking:
                self._forking.append(leader)
            return
        leader.shares_tail = leader.num_computed % self.pool.block_size > 0
        forks, leader.forks = [fork for fork in leader.forks if fork.status is Status.HELD], []
        num_now = max_tokens - plan.num_samples  # few only while the engine compiles
        for fork in forks[:num_now]:
            self.pool.acquire(leader.block_ids)
            fork.share(leader, list(leader.block_ids), leader.num_computed, leader.num_keyed)
            fork.status, fork.shares_tail, fork.num_cached = Status.RUNNING, leader.shares_tail, leader.num_cached
            plan.install(fork)
            plan.add_fork(leader, fork)
        self.put_back(forks[num_now:])

    def put_back(self, forks: list[Request]) -> None:
        """Held forks that can't go on from where they are queue for themselves."""
        for fork in forks:
            self.residents.leave(fork)
        if forks:
            self.queue.push(join(forks))

    def fork(self, plan: Plan) -> list[Request]:
        """Lets forks go on behind what their leaders have computed in steps before; each has tokens left to compute,
        and blocks of its own for them. Returns them."""
        leaders, self._forking = self._forking, []
        started = []
        for leader in leaders:
            if leader.status is not Status.RUNNING:
                continue  # it was preempted together with them, or has ended
            forks, leader.forks = [fork for fork in leader.forks if fork.status is Status.HELD], []
            for fork in forks:
                self._fork_behind(plan, leader, fork)
            started += forks
        return started

    def _fork_behind(self, plan: Plan, leader: Request, fork: Request) -> None:
        num_shared, is_inside = divmod(leader.fork_len, self.pool.block_size)
        shared = leader.block_ids[:num_shared]
        if is_inside:
            plan.copies.append(Copy(leader.block_ids[num_shared], fork.block_ids[0]))
        self.pool.acquire(shared)
        fork.share(leader, shared + fork.block_ids, leader.fork_len, min(leader.num_keyed, num_shared))
        fork.status = Status.RUNNING
        plan.install(fork)
