"""The real engine on an executor made of numpy arrays: it notices any wrong cell or row."""

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from jaxllm.engine.beam.group import BeamSearchGroup
from jaxllm.engine.beam.search import LENGTH, BeamSearch
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.commands import Command
from jaxllm.engine.device.encoder import Buckets, Encoder
from jaxllm.engine.device.packing import SampleLayout
from jaxllm.engine.device.runner import Forward, Handle, Result, Runner
from jaxllm.engine.engine import Engine
from jaxllm.engine.prepare import Intake
from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.cache_groups import EVERYTHING
from jaxllm.engine.schedule.plan import Plan
from jaxllm.engine.schedule.sequence import BARE_LOGPROBS, End, Sequence, Status
from jaxllm.engine.schedule.sequence_group import SequenceGroup
from jaxllm.grammar.compiler import GrammarCompiler
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams
from tests.fake_device import EOS, PROMPT_TOKENS, ShadowExecutor, candidates, hidden_state, sampled
from tests.pooler import pooler

__all__ = ["EOS", "PROMPT_TOKENS", "Ends", "FakeEngine", "expected", "expected_beams", "rows", "truth"]

GIB = 2**30
SIZE_OF_VOCAB = 512  # more than are drawn: tests commit others


def min_len(sequence: Sequence) -> int:
    """Tokens before which it can't end."""
    return len(sequence.prompt_token_ids) + sequence.params.min_tokens


def truth(request: Sequence, num_tokens: int) -> list[int]:
    """The first `num_tokens` tokens of a request that nothing ends."""
    prompt = request.prompt_token_ids
    drawn = [sampled(request.seed, request.sample_index, i, min_len(request)) for i in range(len(prompt), num_tokens)]
    return prompt[:num_tokens] + drawn


class Ends:
    """A matcher of texts that end with the sum of their tokens at `least` or more. It allows each token."""

    error = None

    def __init__(self, least: int):
        self.least = least

    def follow(self, token_ids: list[int]) -> None:
        """Its state is the tokens that it is asked about."""

    def after(self, token: int) -> "Ends":
        return self

    def ends_after(self, token_ids: list[int]) -> bool:
        return sum(token_ids) >= self.least


class NoMasks(GrammarCompiler):
    """Leaves all masks as they are: they allow everything."""

    def fill(self, rows: Any, masks: Any) -> None:
        """Of `Ends`."""


class Injected(RuntimeError):
    """What a step is made to fail with."""


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


def expected_pooled(prompt: list[int], pooling: str) -> np.ndarray:
    """What pooling a prompt gives, in a straight line."""
    states = np.stack([hidden_state(prompt[: i + 1]) for i in range(len(prompt))])
    return {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling]


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
        rows = [candidates(first.seed, first.prompt_token_ids + beam, min_len(first)) for beam in beams]
        beams = [[*beams[c.beam], c.token] for c in search.advance(rows, ends, keep)]
    return [(f.payload, "length" if f.reason == LENGTH else "stop") for f in search.finished[: params.n]]


def rows(plan: Plan | None) -> list[Sequence]:
    return [] if plan is None else plan.rows


class DraftEncoder(Encoder):
    """Encodes samples of drafts as well, which have several for a slot: the `ShadowExecutor` verifies them."""

    def __init__(self, config: EngineConfig, *arguments: Any):
        super().__init__(config, *arguments)
        self.all = Buckets(self.all.tokens, self.all.tokens)
        self._samples = {n: SampleLayout(n, config.max_num_seqs) for n in self.all.samples}

    def encode_sample(self, plan: Plan, buckets: Buckets, masks: Any = None) -> list[Command]:
        drafts, plan.drafts = plan.drafts, {}
        try:
            return super().encode_sample(plan, buckets, masks)
        finally:
            plan.drafts = drafts


class LimitedRunner(Runner):
    """A runner whose steps may have to be small, as while executables compile. `on_forward` looks at what a step's
    forward pass has left."""

    limit = 0
    on_forward: Callable[[Plan], None]

    def __init__(self, executor: ShadowExecutor, config: EngineConfig):
        super().__init__(executor, config, SIZE_OF_VOCAB)
        self._encoder = DraftEncoder(config, SIZE_OF_VOCAB, self.compile_plan.ready)

    def max_tokens(self, full_sampler: bool) -> int:
        return min(self.limit, super().max_tokens(full_sampler))

    def wait_first(self, full_sampler: bool = False, *, num_tokens: int = 1, **options: Any) -> None:
        super().wait_first(full_sampler, num_tokens=num_tokens, **options)
        self.limit = max(self.limit, num_tokens)

    def dispatch_forward(self, plan: Plan) -> Forward:
        plan.awaits_masks = True  # so that the sampling comes after the look at what the forward pass has done
        forward = super().dispatch_forward(plan)
        self.on_forward(plan)
        return forward


class NotingIntake(Intake):
    """Keeps the group that it made last; its sequences have `fields` that no request can ask for."""

    made: SequenceGroup
    fields: dict[str, Any] = {}

    def sequences(self, *arguments: Any) -> SequenceGroup:
        self.made = super().sequences(*arguments)
        return self._noted()

    def pooled_sequence(self, *arguments: Any) -> SequenceGroup:
        self.made = super().pooled_sequence(*arguments)
        return self._noted()

    def _noted(self) -> SequenceGroup:
        for sequence in self.made.sequences:
            for name, value in self.fields.items():
                setattr(sequence, name, value)
        return self.made


class FakeEngine(Engine):
    """An engine with a `ShadowExecutor`, and assertions about every plan and what the executor makes of it."""

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
        whole_prompts=False,
        num_shards=1,
        most_tokens=64,
        reports_tokens=True,
        bare_logprobs=False,
    ):
        config = EngineConfig(
            max_model_len=2,
            num_shards=num_shards,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=most_tokens,  # and less, by the runner's limit
            block_size=block_size,
            num_blocks=num_blocks,
            enable_prefix_caching=prefix_caching and not whole_prompts,
            preemption="swap",
            swap_space=float(swap_blocks),
            groups=groups,
            generates=not whole_prompts,
            whole_prompts=whole_prompts,
        )
        self.capacity = min(config.longest_len(), max(60, num_blocks * block_size))
        config = replace(config, max_model_len=self.capacity)
        runner = self._runner(config)
        runner.on_forward = self._check_forward
        super().__init__(runner, vocab=SIZE_OF_VOCAB, eos_ids=[EOS], pooler=pooler())
        self.intake = NotingIntake(config, vocab=SIZE_OF_VOCAB, eos_ids=[EOS], tokenizer=None, pooler=pooler())
        self.intake.grammars = NoMasks(None, SIZE_OF_VOCAB, [EOS])
        self.max_tokens = max_tokens
        self.reports_tokens, self.bare_logprobs = reports_tokens, bare_logprobs  # of requests that are added
        self.planned: Plan | None = None
        self._fresh: list[Sequence] = []  # have nothing but what they find in the prefix cache
        self.sequences: list[Sequence] = []
        self.samples: dict[Sequence, list[Sequence]] = {}  # of a request, by its first
        self.updated: list[Sequence] = []  # by the last commit
        self.expected: dict[Sequence, tuple[list[int], str]] = {}
        self.expected_pooled: dict[Sequence, np.ndarray] = {}
        self.expected_beams: dict[BeamSearchGroup, list[tuple[list[int], str]]] = {}
        self.poison: set[Sequence] = set()  # a step with one of them fails
        self.failures: Counter[Sequence] = Counter()

    def _runner(self, config: EngineConfig) -> LimitedRunner:
        self.executor = ShadowExecutor(config, page_bytes=GIB)
        self.executor.on_admit = self._check_admitted
        return LimitedRunner(self.executor, config)

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.pool

    @property
    def in_flight(self) -> Handle | None:
        return self._in_flight

    def _submit(
        self, prompt, params: SamplingParams | PoolingParams, priority: int, fields: dict[str, Any], **options: Any
    ) -> SequenceGroup:
        self.intake.fields = fields
        super().add(prompt, params, request_id=f"r{len(self.sequences)}", priority=priority, **options)
        self.sequences += self.intake.made.sequences
        self.scheduler.check()
        return self.intake.made

    def add(
        self,
        prompt,
        max_new=4,
        *,
        n=1,
        seed=0,
        eos=False,
        stop_ids=(),
        min_tokens=0,
        logprobs=None,
        cache_salt=None,
        drafts=False,
        host_dependent=False,
        priority=0,
        **fields,
    ) -> Sequence:
        """Adds `n` samples; returns the first. `fields` are of `Sequence`."""
        params = SamplingParams(
            n=n,
            seed=seed,
            max_tokens=max_new,
            min_tokens=min(min_tokens, max_new),
            logprobs=logprobs,
            cache_salt=cache_salt,
        )
        if drafts or host_dependent:
            fields["propose"] = propose if drafts else lambda sequence, num_tokens: []
        options = {"as_arrays": self.bare_logprobs}
        group = self._submit(prompt, params, priority, self._fields(eos, stop_ids) | fields, **options)
        first = group.sequences[0]
        self.samples[first] = group.sequences
        for sequence in group.sequences:
            self.expected[sequence] = expected(sequence)
        return first

    def add_pooled(self, prompt, pooling="last", *, priority=0) -> Sequence:
        """Adds a prompt that is pooled."""
        self.intake.pooler = pooler(pooling=pooling)
        (sequence,) = self._submit(prompt, PoolingParams(), priority, {}).sequences
        self.expected_pooled[sequence] = expected_pooled(prompt, pooling)
        return sequence

    def add_beams(
        self, prompt, max_new=4, *, width=2, seed=0, eos=False, min_tokens=0, priority=0, search=()
    ) -> BeamSearchGroup | None:
        """None if they could need more than there is, which the engine refuses."""
        params = SamplingParams(
            beam_width=width,
            n=width,
            seed=seed,
            max_tokens=max_new,
            min_tokens=min(min_tokens, max_new),
            **dict(search),
        )
        try:
            group = self._submit(prompt, params, priority, self._fields(eos, ()))
        except ValueError:
            return None
        self.expected_beams[group] = expected_beams(group)
        return group

    def abort(self, sequence: Sequence) -> None:
        """Ends one sample, or a beam search."""
        head = sequence.group.head(sequence)
        was_over = head.finish_reason is not None
        self.scheduler.finish(sequence, End("abort"))
        if not was_over:
            self.requests.updates([head])
        self.scheduler.check()

    def unfinished(self) -> list[Sequence]:
        """Beams end with the first of their group."""
        heads = [(r.group.head(r), r) for r in self.sequences]
        return [sequence for head, sequence in heads if head.finish_reason is None]

    def update_params(self) -> None:
        super().update_params({})

    def sampling_in_flight(self) -> list[Sequence]:
        """Sequences whose next token the device has computed and the host does not know."""
        if self.in_flight is None:
            return []
        plan = self.in_flight.plan
        pairs = zip(plan.samples, plan.epochs, strict=True)
        return [sequence for sequence, epoch in pairs if sequence.epoch == epoch]

    def step(self, *, fail: str | None = None, max_tokens: int | None = None) -> Plan | None:
        """Dispatches a step, then commits the one before. `fail`, "dispatch" or "collect", says which raises."""
        self.planned, self.runner.limit = None, max_tokens or self.max_tokens
        done = self.in_flight
        if done is not None and (fail == "collect" or not self.poison.isdisjoint(done.plan.rows)):
            for result in (done.tokens, *done.done):
                if result is not None:
                    result.error = Injected("collect")
        self._fails_dispatch = fail == "dispatch"
        super().step()
        self.check()
        return self.planned

    def run(self) -> None:
        """Steps until all is done. A request alone needs two steps a token at most; preemption costs some more."""
        left = sum(r.max_total_len for r in self.unfinished())
        for _ in range(10 * left + 10):
            if self.in_flight is None and not self.scheduler.has_work():
                break
            self.step()
        assert not self.has_work(), "no end in sight"
        assert not self.executor.host or self.scheduler.preemption._released_copies, "host memory is kept for nobody"
        assert self.pool.num_used == 0 and not self.unfinished()

    def _schedule(self) -> Plan | None:
        scheduler = self.scheduler
        epochs = {sequence: sequence.epoch for sequence in self.sampling_in_flight()}
        queued = scheduler.waiting.queued()
        waiting = [group.waiting[0] for group in queued]
        stems = scheduler.running_set.stems
        self._fresh = [group.waiting[0] for group in queued if group.host_copy is None and group not in stems]
        plan = self.planned = super()._schedule()
        assert all(sequence.epoch == epoch for sequence, epoch in epochs.items()), "evicted before it was drained"
        assert plan or self.in_flight or not scheduler.has_work(), "stuck: nothing planned, nothing to wait for"
        if plan is not None:
            self._check_plan(plan, self.runner.limit, epochs, waiting)
        return plan

    def _check_admitted(self, slots: list[int]) -> None:
        forked = {sequence for _, sequence in self.planned.forks}
        admitted = {sequence.slot: sequence for sequence, _ in self.planned.admitted}
        for slot in slots:
            sequence = admitted[slot]
            known = sequence.prompt_token_ids + sequence.output_token_ids
            self.executor.tokens[slot] = self._output_of(sequence)[: self.executor.lengths[slot]]
            assert sequence in forked or self.executor.holds(slot, known), (
                "what it starts with is there before the step"
            )
            if sequence in self._fresh:
                length = int(self.executor.lengths[slot])
                for number, (group, _, _) in enumerate(self.executor.shapes):
                    start = 0 if group.window is None else max(0, length - group.window + 1)
                    versions = self.executor.read(slot, number, start)[..., 1]
                    assert (versions == self.executor.version).all(), "a prefix hit is of these parameters"

    def _check_forward(self, plan: Plan) -> None:
        drafts = {chunk.sequence: [*chunk.drafts] for chunk in plan.chunks if chunk.drafts}
        starts = {sequence: sequence.num_computed - 1 for sequence in plan.decodes}
        starts |= {chunk.sequence: chunk.start for chunk in plan.chunks}
        for sequence in dict.fromkeys([*plan.rows, *plan.samples]):
            slot, known = sequence.slot, self._output_of(sequence)
            if sequence in drafts:
                known = sequence.token_ids(0, sequence.num_tokens) + drafts[sequence]
            for number, of_group in enumerate(sequence.table.groups):
                for index, pages in enumerate(sequence.table.pages_of(of_group), start=of_group.start):
                    assert self.executor.pages(slot, number, index) == list(pages)
            assert self.executor.lengths[slot] == sequence.num_computed
            assert self.executor.holds(slot, known, starts.get(sequence))
        if self._fails_dispatch:
            raise Injected("dispatch")

    def _commit(self, plan: Plan, result: Result) -> list[Sequence]:
        self.updated = super()._commit(plan, result)
        return self.updated

    def answer(self, tokens: list[int]) -> list[Sequence]:
        """Ends the step in flight with these tokens instead of those that were drawn."""
        handle, self._in_flight = self._in_flight, None
        updated = self._commit(handle.plan, self.runner.collect(handle)._replace(tokens=np.asarray(tokens, np.int32)))
        self.scheduler.check()
        return updated

    def _output_of(self, sequence: Sequence) -> list[int]:
        """All its tokens, with those that the host does not know yet."""
        return sequence.prompt_token_ids + self._output(sequence)

    def _output(self, sequence: Sequence) -> list[int]:
        """All tokens that it can have by now, those that the host does not know yet included. (A draft is no such.)"""
        if sequence.group.chooses_tokens or sequence.pooling:
            return sequence.output_token_ids
        return truth(sequence, sequence.num_tokens + sequence.num_in_flight)[len(sequence.prompt_token_ids) :]

    def _recover(self, plan: Plan, error: Exception) -> list[Sequence]:
        if not isinstance(error, Injected):
            raise error
        blamed = {sequence.group.head(sequence) for sequence in plan.rows}
        self.failures.update(sequence for sequence in blamed if sequence.status is not Status.FINISHED)
        ended = super()._recover(plan, error)
        quarantined = [sequence for sequence in ended if "times with this sequence" in sequence.error]
        assert all(self.failures[sequence] >= 2 for sequence in quarantined)
        assert all(sequence.finish_reason == "error" for sequence in ended)
        return ended

    def _check_plan(self, plan: Plan, max_tokens: int, in_flight: dict[Sequence, int], waiting: list[Sequence]) -> None:
        scheduler, block_size = self.scheduler, self.pool.block_size
        spans = [(r, r.num_computed - 1, r.num_computed) for r in plan.decodes]
        spans += [(chunk.sequence, chunk.start, chunk.start + chunk.num_tokens) for chunk in plan.chunks]
        assert plan.rows == [request for request, _, _ in spans], "decode rows first"
        if self.config.whole_prompts:
            assert all(start == 0 and stop == len(r.prompt_token_ids) for r, start, stop in spans), "a prompt was cut"
        assert not any(request.pooling for request in plan.decodes), "a decode has a sample"
        assert plan.num_tokens == sum(stop - start for _, start, stop in spans) <= max_tokens
        assert not plan.is_empty
        assert len(plan.samples) == plan.num_samples <= max_tokens
        assert plan.num_samples == len(plan.decodes) + sum(chunk.num_samples for chunk in plan.chunks) + len(plan.forks)
        for requests in (plan.rows, dict.fromkeys(plan.samples), [request for request, _ in plan.admitted]):
            assert len({r.slot for r in requests}) == len(requests) <= scheduler.running_set.max_num_seqs
        assert not (plan.swap_outs and plan.swap_ins)
        assert len({new[:2] for new in plan.new_blocks}) == len(plan.new_blocks), "one write per cell"
        tables = {request.slot: request.table for request in plan.rows}
        tables |= {guest.slot: guest.table for guest in scheduler.running_set.guests}
        tables |= {request.slot: request.table for request in scheduler.running}
        assert all(tables[slot].pages(index) == pages for slot, index, *pages in plan.new_blocks)
        num_tokens = plan.num_tokens if plan.shared is None else self.config.num_shards * max_tokens
        assert len(plan.new_blocks) <= len(plan.rows) + -(-num_tokens // block_size)
        assert plan.full_sampler or not any(request.params.needs_full_sampler for request in plan.rows)
        assert plan.has_chosen or not any(request.group.chooses_tokens for request in plan.samples)
        if any(request.host_dependent for request in in_flight):
            assert not any(request.host_dependent for request in plan.samples), "they sample in the same steps"
        held = [request.table for request in scheduler.running]
        held += [stem.table for stem in scheduler.running_set.stems.values()]
        held += [guest.table for guest in scheduler.running_set.guests]
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
        assert self.scheduler.num_unfinished_full == sum(r.params.needs_full_sampler for r in self.unfinished())
        for group, best in self.expected_beams.items():
            if group.sequences[0].finish_reason == "stop":
                assert [(r.output_token_ids, r.finish_reason) for r in group.results] == best
        for sequence, vector in self.expected_pooled.items():
            assert (sequence.pooled is None) == (sequence.finish_reason != "stop")
            if sequence.pooled is not None:
                np.testing.assert_allclose(sequence.pooled, vector, rtol=1e-6)
        for request, (tokens, reason) in self.expected.items():
            output, logprobs = request.own_token_ids, request.own_logprobs  # what the log has comes unasked, or later
            assert len(request.prompt_token_ids) + len(output) <= request.num_tokens
            if request.num_logprobs == BARE_LOGPROBS:
                assert logprobs == [request.seed] * len(output)
            elif request.params.tracks_logprobs:
                first = len(request.prompt_token_ids)
                assert [one.rank for one in logprobs] == list(range(first, first + len(output)))
                assert all(one.own == request.seed for one in logprobs)
            assert output == tokens[: len(output)]
            if request.finish_reason in ("stop", "length"):
                assert (output, request.finish_reason) == (tokens, reason)
            else:
                assert len(output) < len(tokens)

    def _fields(self, eos: bool, stop_ids: Any) -> dict[str, Any]:
        """Of a sequence: what ends it, and whether each of its tokens is an update."""
        stop_ids = frozenset([EOS] if eos else stop_ids)
        return {"stop_ids": stop_ids, "eos_ids": frozenset([EOS]), "reports_tokens": self.reports_tokens}
