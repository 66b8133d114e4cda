"""An engine around a device made of lists: driven as `Engine` drives the real one, it notices any wrong cell or row."""

import itertools
import sys
import zlib
from collections import Counter
from dataclasses import dataclass

from jaxllm.engine.block_pool import BlockPool
from jaxllm.engine.request import Request, Status
from jaxllm.engine.scheduler import Plan, Scheduler
from jaxllm.sampling_params import SamplingParams

EOS = 0
PROMPT_TOKENS = (1, 2)  # few, so that prefixes collide


def sampled(request: Request, position: int) -> int:
    """The token that the model gives at `position`: a function of the request alone, like a seeded draw."""
    draw = zlib.crc32(b"%d,%d" % (request.seed, position)) % 10
    masked = position < len(request.prompt_token_ids) + request.params.min_tokens
    return EOS if draw == 0 and not masked else PROMPT_TOKENS[draw % 2]


def truth(request: Request, num_tokens: int) -> list[int]:
    """The first `num_tokens` tokens of a request that nothing ends."""
    prompt = request.prompt_token_ids
    return prompt[:num_tokens] + [sampled(request, i) for i in range(len(prompt), num_tokens)]


def expected(request: Request) -> tuple[list[int], str]:
    """A request's output and finish reason, generated in a straight line."""
    output = truth(request, request.max_total_len)[len(request.prompt_token_ids) :]
    for i, token in enumerate(output):
        if token in request.stop_ids:
            return output[: i + 1], "stop"
    return output, "length"


def rows(plan: Plan | None) -> list[Request]:
    return [] if plan is None else plan.rows


@dataclass
class Slot:
    request: Request
    block_table: list[int]
    length: int  # tokens in the pool
    last_token: int


class Device:
    """A KV pool whose cells hold the token they were computed from, and the version of the parameters."""

    def __init__(self, num_blocks: int, block_size: int, version: int = 0):
        self.block_size, self.version = block_size, version
        self.cells = [[(None, None)] * block_size for _ in range(num_blocks)]
        self.slots: dict[int, Slot] = {}

    def read(self, slot: Slot) -> list[tuple[int, int]]:
        at = (divmod(i, self.block_size) for i in range(slot.length))
        return [self.cells[slot.block_table[index]][cell] for index, cell in at]

    def run(self, plan: Plan) -> list[int]:
        """Executes a step at once, writes before reads as the kernel does. Returns the token of each row."""
        for request, length in plan.admitted:
            known = request.prompt_token_ids + request.output_token_ids
            slot = Slot(request, list(request.block_ids), length, known[-1])
            self.slots[request.slot] = slot
            hit = [(token, self.version) for token in known[:length]]
            assert self.read(slot) == hit, "a prefix hit must hold its tokens before the step, of these parameters"
        for slot, index, block in plan.new_blocks:
            assert index == len(self.slots[slot].block_table)
            self.slots[slot].block_table.append(block)
        self._write(plan)
        for request in plan.rows:
            slot = self.slots[request.slot]
            assert [token for token, _ in self.read(slot)] == truth(request, slot.length)
        tokens = [-7] * len(plan.chunks)  # read by nobody where the row doesn't sample
        for i, chunk in enumerate(plan.chunks):
            if chunk.samples:
                tokens[i] = self._sample(chunk.request)
        return [self._sample(request) for request in plan.decodes] + tokens

    def _write(self, plan: Plan) -> None:
        written = set()
        given = [(request, None) for request in plan.decodes] + [(chunk.request, chunk) for chunk in plan.chunks]
        for request, chunk in given:
            slot = self.slots[request.slot]
            assert slot.request is request and slot.block_table == request.block_ids
            assert chunk is None or slot.length == chunk.start
            for token in [slot.last_token] if chunk is None else request.token_ids(chunk.start, chunk.stop):
                index, cell = divmod(slot.length, self.block_size)
                block = slot.block_table[index]
                assert (block, cell) not in written
                written.add((block, cell))
                self.cells[block][cell] = (token, self.version)
                slot.length += 1

    def _sample(self, request: Request) -> int:
        slot = self.slots[request.slot]
        slot.last_token = sampled(request, slot.length)
        return slot.last_token


class FakeEngine:
    """`Engine.step` with a `Device`, and assertions about every plan."""

    def __init__(self, *, num_blocks=16, block_size=2, max_num_seqs=4, max_tokens=8, prefix_caching=True):
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.pool, max_num_seqs=max_num_seqs, prefix_caching=prefix_caching)
        self.device = Device(num_blocks, block_size)
        self.max_tokens = max_tokens
        self.capacity = num_blocks * block_size
        self.in_flight: tuple[Plan, list[int]] | None = None
        self.requests: list[Request] = []
        self.expected: dict[Request, tuple[list[int], str]] = {}
        self.poison: set[Request] = set()  # a step with one of them fails
        self.failures: Counter[Request] = Counter()

    def add(self, prompt, max_new=4, *, seed=0, eos=False, stop_ids=(), min_tokens=0, **fields) -> Request:
        request = Request(
            prompt_token_ids=list(prompt), params=SamplingParams(min_tokens=min_tokens, max_tokens=None), seed=seed,
            arrival=len(self.requests), max_total_len=min(len(prompt) + max_new, self.capacity),
            stop_ids=frozenset([EOS] if eos else stop_ids), eos_ids=frozenset([EOS]), **fields,
        )  # fmt: skip
        self.requests.append(request)
        self.expected[request] = expected(request)
        self.scheduler.add(request)
        self.scheduler.check()
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.finish(request, "abort")
        self.scheduler.check()

    def update_params(self) -> None:
        self.device.version += 1
        self.pool.forget_keys()

    def sampling_in_flight(self) -> list[Request]:
        """Requests whose next token the device has computed and the host does not know."""
        if self.in_flight is None:
            return []
        plan, _ = self.in_flight
        rows = plan.decodes + [chunk.request for chunk in plan.chunks if chunk.samples]
        epochs = dict(zip(plan.rows, plan.epochs, strict=True))
        return [request for request in rows if request.epoch == epochs[request]]

    def step(self, *, fail: str | None = None, max_tokens: int | None = None) -> Plan | None:
        """Dispatches a step, then commits the one before. `fail`, "dispatch" or "collect", says which raises."""
        scheduler, max_tokens = self.scheduler, max_tokens or self.max_tokens
        epochs = {request: request.epoch for request in self.sampling_in_flight()}
        plan = scheduler.schedule(max_tokens)
        assert all(request.epoch == epoch for request, epoch in epochs.items()), "evicted before it was drained"
        done, self.in_flight = self.in_flight, None
        assert plan or done or not scheduler.has_work(), "stuck: nothing planned, nothing to wait for"
        failed = None
        if plan is not None:
            self._check_plan(plan, max_tokens, epochs)
            if fail == "dispatch":
                failed = plan
            else:
                self.in_flight = plan, self.device.run(plan)
        if done is not None:
            if fail == "collect" or not self.poison.isdisjoint(done[0].rows):
                failed = done[0]
            else:
                scheduler.commit(*done)
        if failed is not None:
            self._recover(failed)
        self.check()
        return plan

    def run(self) -> None:
        """Steps until all is done. A request alone needs two steps a token at most; preemption costs some more."""
        left = sum(r.max_total_len for r in self.requests if r.status is not Status.FINISHED)
        for _ in range(10 * left + 10):
            if self.in_flight is None and not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work(), "no end in sight"
        assert self.pool.num_used == 0 and all(request.finish_reason for request in self.requests)

    def interrupted_step(self, num_lines: int) -> bool:
        """A step in which Ctrl-C comes after so many lines of the code under test. False if it has not as many."""
        lines = itertools.count()

        def trace(frame, event, arg):
            if "/jaxllm/engine/" in frame.f_code.co_filename and event == "line" and next(lines) == num_lines:
                raise KeyboardInterrupt
            return trace

        outer = sys.gettrace()
        sys.settrace(trace)
        try:
            self.step()
            return False
        except KeyboardInterrupt:
            self._recover(Plan())
            return True
        finally:
            sys.settrace(outer)
            self.check()

    def _recover(self, failed: Plan) -> None:
        blamed = [request for request in failed.rows if request.status is not Status.FINISHED]
        self.failures.update(blamed)
        unfinished = [request for request in self.requests if request.finish_reason is None]
        quarantined = self.scheduler.restart(unfinished, failed.rows)
        assert all(self.failures[request] >= 2 for request in quarantined)
        assert all(request.finish_reason == "error" and request.error for request in quarantined)
        self.in_flight = None
        self.device = Device(self.pool.num_blocks, self.pool.block_size, self.device.version)

    def _check_plan(self, plan: Plan, max_tokens: int, in_flight: dict[Request, int]) -> None:
        scheduler, block_size = self.scheduler, self.pool.block_size
        spans = [(r, r.num_computed - 1, r.num_computed) for r in plan.decodes]
        spans += [(chunk.request, chunk.start, chunk.stop) for chunk in plan.chunks]
        assert plan.rows == [request for request, _, _ in spans], "decode rows first"
        assert 0 < plan.num_tokens == sum(stop - start for _, start, stop in spans) <= max_tokens
        assert plan.num_samples == len(plan.decodes) + sum(chunk.samples for chunk in plan.chunks)
        assert len({request.slot for request in plan.rows}) == len(plan.rows) <= scheduler.max_num_seqs
        assert len({new[:2] for new in plan.new_blocks}) == len(plan.new_blocks), "one write per cell"
        tables = {request.slot: request.block_ids for request in plan.rows}
        assert all(tables[new.slot][new.index] == new.block for new in plan.new_blocks)
        assert len(plan.new_blocks) <= len(plan.rows) + -(-plan.num_tokens // block_size)
        assert plan.full_sampler or not any(request.needs_full_sampler for request in plan.rows)
        holders = Counter(block for request in scheduler.running for block in request.block_ids)
        for request, start, stop in spans:
            assert request.status is Status.RUNNING
            assert start < stop < request.max_total_len, "the last token needs no row"
            assert not (request.host_dependent and request in in_flight)
            own = request.block_ids[start // block_size : -(-stop // block_size)]
            assert all(holders[block] == 1 for block in own), "a shared block is written"
        orders = [request.order for request, _ in plan.admitted]
        passed = [r for r in self.requests if r.status is Status.WAITING and orders and r.order < orders[-1]]
        assert orders == sorted(orders)
        for request in passed:  # only those may be overtaken whose beginning is being written
            assert any(request.keys[:1] == other.keys[:1] != [] for other in scheduler.running)

    def check(self) -> None:
        self.scheduler.check()
        unfinished = [r for r in self.requests if r.status is not Status.FINISHED]
        assert self.scheduler.num_unfinished_full == sum(r.needs_full_sampler for r in unfinished)
        assert self.scheduler.num_waiting == sum(r.status is Status.WAITING for r in unfinished)
        for request in self.requests:
            tokens, reason = self.expected[request]
            output = request.output_token_ids
            assert output == tokens[: len(output)]
            if request.finish_reason in ("stop", "length"):
                assert (output, request.finish_reason) == (tokens, reason)
            else:
                assert len(output) < len(tokens)
