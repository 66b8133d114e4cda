"""An engine around a device made of numpy arrays: driven as `Engine` drives the real one, it notices any wrong cell
or row."""

import zlib
from collections import Counter

from jaxllm.engine.beam.group import BeamSearchGroup
from jaxllm.engine.beam.search import LENGTH, BeamSearch
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.cache_groups import EVERYTHING
from jaxllm.engine.schedule.scheduler import Plan, Scheduler
from jaxllm.engine.schedule.sequence import End, Samples, Sequence, Status
from jaxllm.sampling_params import SamplingParams
from tests.fake_device import EOS, PROMPT_TOKENS, Device, candidates, sampled

__all__ = ["EOS", "PROMPT_TOKENS", "FakeEngine", "expected", "expected_beams", "rows", "truth"]


def truth(request: Sequence, num_tokens: int) -> list[int]:
    """The first `num_tokens` tokens of a request that nothing ends."""
    prompt = request.prompt_token_ids
    return prompt[:num_tokens] + [sampled(request, i) for i in range(len(prompt), num_tokens)]


class Ends:
    """A matcher of texts that end with the sum of their tokens at `least` or more."""

    error = None

    def __init__(self, least: int):
        self.least = least

    def ends_after(self, token_ids: list[int]) -> bool:
        return sum(token_ids) >= self.least


def expected(request: Sequence) -> tuple[list[int], str]:
    """A request's output and finish reason, generated in a straight line."""
    output = truth(request, request.max_total_len)[len(request.prompt_token_ids) :]
    for i, token in enumerate(output):
        is_stop = token in request.stop_ids and i + 1 >= request.params.min_tokens
        if is_stop or request.matcher is not None and request.matcher.ends_after(output[: i + 1]):
            return output[: i + 1], "stop"
    return output, "length"


def propose(request: Sequence, num_tokens: int) -> list[int]:
    """At most two guesses of the request's next tokens, some of them wrong."""
    known = request.num_tokens
    guesses = truth(request, known + 2)[known:]
    wrong = zlib.crc32(b"%d,%d" % (request.seed, known)) % 5
    return [3 if i == wrong else guess for i, guess in enumerate(guesses)][:num_tokens]


def expected_beams(group: BeamSearchGroup) -> list[tuple[list[int], str]]:
    """The best beams' outputs and finish reasons, searched in a straight line: all beams' tokens in lists."""
    first = group.sequences[0]
    params = first.params
    search = BeamSearch(
        width=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=first.max_total_len - len(first.prompt_token_ids),
        num_stop_ids=len(first.stop_ids),
    )
    beams: list[list[int]] = [[]]

    def ends(beam, token):
        return "stop" if token in first.stop_ids and len(beams[beam]) + 1 >= params.min_tokens else None

    def keep(continuation, reason):
        return [*beams[continuation.beam], continuation.token]

    while not search.done:
        rows = [candidates(first, first.prompt_token_ids + beam) for beam in beams]
        beams = [[*beams[c.beam], c.token] for c in search.advance(rows, ends, keep)]
    return [(f.payload, "length" if f.reason == LENGTH else "stop") for f in search.finished[: params.n]]


def rows(plan: Plan | None) -> list[Sequence]:
    return [] if plan is None else plan.rows


class FakeEngine:
    """`Engine.step` with a `Device`, and assertions about every plan."""

    def __init__(
        self,
        *,
        num_blocks=16,
        block_size=2,
        max_num_seqs=4,
        max_tokens=8,
        prefix_caching=True,
        swap_blocks=0,
        groups=EVERYTHING,
    ):
        self.pool = BlockPool(num_blocks, block_size, groups)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            prefix_caching=prefix_caching,
            max_host_pages=swap_blocks,
            prefers_swap=lambda num_pages, num_tokens: True,
        )
        self.device = Device(num_blocks, block_size, groups)
        self.num_blocks = num_blocks
        self.updated: list[Sequence] = []  # by the last commit
        self.max_tokens = max_tokens
        sizes = dict(block_size=block_size, num_blocks=num_blocks, groups=groups)
        config = EngineConfig(max_model_len=2, max_num_seqs=1, max_num_batched_tokens=1, **sizes)
        self.capacity = min(config.longest_len(), 60)
        self.in_flight: tuple | None = None  # plan, tokens, log-probabilities, candidates
        self.requests: list[Sequence] = []
        self.expected: dict[Sequence, tuple[list[int], str]] = {}
        self.expected_beams: dict[BeamSearchGroup, list[tuple[list[int], str]]] = {}
        self.poison: set[Sequence] = set()  # a step with one of them fails
        self.failures: Counter[Sequence] = Counter()

    def _request(self, prompt, max_new, *, seed=0, eos=False, stop_ids=(), params=None, **fields) -> Sequence:
        request = Sequence(
            prompt_token_ids=list(prompt),
            params=params or SamplingParams(max_tokens=None),
            seed=seed,
            arrival=len(self.requests),
            max_total_len=min(len(prompt) + max_new, self.capacity),
            stop_ids=frozenset([EOS] if eos else stop_ids),
            eos_ids=frozenset([EOS]),
            **fields,
        )
        self.requests.append(request)
        return request

    def add(
        self,
        prompt,
        max_new=4,
        *,
        n=1,
        drafts=False,
        host_dependent=False,
        min_tokens=0,
        cache_salt=None,
        logprobs=None,
        **fields,
    ) -> Sequence:
        """Adds `n` samples; returns the first."""
        params = SamplingParams(min_tokens=min_tokens, max_tokens=None, cache_salt=cache_salt, logprobs=logprobs)
        if drafts or host_dependent:
            fields["propose"] = propose if drafts else lambda request, num_tokens: []
        members = [self._request(prompt, max_new, params=params, sample_index=i, **fields) for i in range(n)]
        group = Samples(members)
        for request in members:
            self.expected[request] = expected(request)
        self.scheduler.add(group)
        self.scheduler.check()
        return members[0]

    def add_beams(self, prompt, max_new=4, *, width=2, min_tokens=0, search=(), **fields) -> BeamSearchGroup | None:
        """None if they could need more than there is: the real engine refuses them likewise."""
        most_len, block_size = min(len(prompt) + max_new, self.capacity), self.pool.block_size
        shared = len(prompt) // block_size
        num_blocks = shared + width * (-(-(most_len - 1) // block_size) - shared)
        if width > self.scheduler.running_set.max_num_seqs or num_blocks > self.num_blocks:
            return None
        params = SamplingParams(beam_width=width, n=width, min_tokens=min_tokens, max_tokens=None, **dict(search))
        members = [self._request(prompt, max_new, params=params, **fields) for _ in range(width)]
        group = BeamSearchGroup(members)
        self.expected_beams[group] = expected_beams(group)
        self.scheduler.add(group)
        self.scheduler.check()
        return group

    def abort(self, request: Sequence) -> None:
        self.scheduler.finish(request, End("abort"))
        self.scheduler.check()

    def unfinished(self) -> list[Sequence]:
        """Beams end with the first of their group."""
        heads = [(r.group.head(r), r) for r in self.requests]
        return [request for head, request in heads if head.finish_reason is None]

    def update_params(self) -> None:
        self.device.version += 1
        self.pool.forget_keys()

    def sampling_in_flight(self) -> list[Sequence]:
        """Requests whose next token the device has computed and the host does not know."""
        if self.in_flight is None:
            return []
        plan = self.in_flight[0]
        pairs = zip(plan.samples, plan.epochs, strict=True)
        return [request for request, epoch in pairs if request.epoch == epoch]

    def step(self, *, fail: str | None = None, max_tokens: int | None = None) -> Plan | None:
        """Dispatches a step, then commits the one before. `fail`, "dispatch" or "collect", says which raises."""
        scheduler, max_tokens = self.scheduler, max_tokens or self.max_tokens
        epochs = {request: request.epoch for request in self.sampling_in_flight()}
        queued = scheduler.waiting.queued()
        waiting = [group.waiting[0] for group in queued]
        stems = scheduler.running_set.stems
        fresh = [group.waiting[0] for group in queued if group.host_copy is None and group not in stems]
        plan = scheduler.schedule(max_tokens)
        assert all(request.epoch == epoch for request, epoch in epochs.items()), "evicted before it was drained"
        done, self.in_flight = self.in_flight, None
        assert plan or done or not scheduler.has_work(), "stuck: nothing planned, nothing to wait for"
        failed = None
        if plan is not None:
            self._check_plan(plan, max_tokens, epochs, waiting)
            if fail == "dispatch":
                failed = plan
            else:
                tokens, beams = self.device.run(plan, fresh)
                self.in_flight = plan, tokens, self._logprobs(plan), beams
        if done is not None:
            if fail == "collect" or not self.poison.isdisjoint(done[0].rows):
                failed = done[0]
            else:
                self.updated = scheduler.commit(*done)
        if failed is not None:
            self._recover(failed)
        self.check()
        return plan

    def _logprobs(self, plan: Plan) -> list[str | None] | None:
        """What is to be kept of each sample's token: of which request it is, and where."""
        if not plan.full_sampler:
            return None
        places = Counter({request: request.num_tokens + request.num_in_flight for request in plan.samples})
        places.subtract(plan.samples)
        kept = []
        for request in plan.samples:
            kept.append(f"{request.arrival}:{places[request]}" if request.params.tracks_logprobs else None)
            places[request] += 1
        return kept

    def run(self) -> None:
        """Steps until all is done. A request alone needs two steps a token at most; preemption costs some more."""
        left = sum(r.max_total_len for r in self.unfinished())
        for _ in range(10 * left + 10):
            if self.in_flight is None and not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work(), "no end in sight"
        assert not self.device.host or self.scheduler.preemption._released_copies, "host memory is kept for nobody"
        assert self.pool.num_used == 0 and not self.unfinished()

    def _recover(self, failed: Plan) -> None:
        blamed = {r.group.head(r) for r in failed.rows}
        self.failures.update(request for request in blamed if request.status is not Status.FINISHED)
        quarantined = self.scheduler.restart(self.unfinished(), failed.rows)
        assert all(self.failures[request] >= 2 for request in quarantined)
        assert all(request.finish_reason == "error" and request.error for request in quarantined)
        self.in_flight = None
        accepts = self.device.accepts
        self.device = Device(self.num_blocks, self.pool.block_size, self.pool.groups, self.device.version)
        self.device.accepts = accepts

    def _check_plan(self, plan: Plan, max_tokens: int, in_flight: dict[Sequence, int], waiting: list[Sequence]) -> None:
        scheduler, block_size = self.scheduler, self.pool.block_size
        spans = [(r, r.num_computed - 1, r.num_computed) for r in plan.decodes]
        spans += [(chunk.sequence, chunk.start, chunk.start + chunk.num_tokens) for chunk in plan.chunks]
        assert plan.rows == [request for request, _, _ in spans], "decode rows first"
        assert plan.num_tokens == sum(stop - start for _, start, stop in spans) <= max_tokens
        assert plan.num_tokens or plan.admitted or plan.swap_outs
        assert len(plan.samples) == plan.num_samples <= max_tokens
        assert plan.num_samples == len(plan.decodes) + sum(chunk.num_samples for chunk in plan.chunks) + len(plan.forks)
        for requests in (plan.rows, dict.fromkeys(plan.samples), [request for request, _ in plan.admitted]):
            assert len({r.slot for r in requests}) == len(requests) <= scheduler.running_set.max_num_seqs
        assert not (plan.swap_outs and plan.swap_ins)
        assert len({new[:2] for new in plan.new_blocks}) == len(plan.new_blocks), "one write per cell"
        tables = {request.slot: request.table for request in plan.rows}
        assert all(tables[slot].pages(index) == pages for slot, index, *pages in plan.new_blocks)
        assert len(plan.new_blocks) <= len(plan.rows) + -(-plan.num_tokens // block_size)
        assert plan.full_sampler or not any(request.needs_full_sampler for request in plan.rows)
        assert plan.has_beams or not any(request.is_beam for request in plan.samples)
        if any(request.host_dependent for request in in_flight):
            assert not any(request.host_dependent for request in plan.samples), "they sample in the same steps"
        held = [request.table for request in scheduler.running]
        held += [stem.table for stem in scheduler.running_set.stems.values()]
        holders = Counter(block for table in held for each in table.groups for block in each.ids)
        for request, start, stop in spans:
            assert request.status is Status.RUNNING
            assert start < stop < request.max_total_len, "the last token needs no row"
            num_forks = sum(parent is request for parent, _ in plan.forks)  # they share what is written here
            for each in request.table.groups:
                for index in range(start // block_size, -(-stop // block_size)):
                    is_read = index >= each.group.first_block(stop, block_size)
                    num_holders = holders[each.ids[index - each.start]]
                    assert num_holders == 1 + num_forks * is_read, "a shared block is written"
        orders = [request.order for request, _ in plan.admitted if request in waiting]
        assert orders == sorted(orders)
        for request in waiting:  # only those may be overtaken whose beginning is being written
            if request.status is Status.WAITING and orders and request.order < orders[-1]:
                is_parked = any(sibling.fork_len for sibling in request.group.on_device)
                assert is_parked or any(request.table.keys[:1] == r.table.keys[:1] != [] for r in scheduler.running)

    def check(self) -> None:
        self.scheduler.check()
        assert self.scheduler.num_unfinished_full == sum(r.needs_full_sampler for r in self.unfinished())
        for group, best in self.expected_beams.items():
            if group.sequences[0].finish_reason == "stop":
                assert [(r.output_token_ids, r.finish_reason) for r in group.results] == best
        for request, (tokens, reason) in self.expected.items():
            output = request.output_token_ids
            if request.params.tracks_logprobs:
                first = len(request.prompt_token_ids)
                assert request.logprobs == [f"{request.arrival}:{first + i}" for i in range(len(output))]
            assert output == tokens[: len(output)]
            if request.finish_reason in ("stop", "length"):
                assert (output, request.finish_reason) == (tokens, reason)
            else:
                assert len(output) < len(tokens)
