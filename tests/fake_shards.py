"""`FakeEngine` with several shards of data: each has a shadow of its own, about which the same is asserted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from benchmarks.fake_executor import FakeExecutor
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.commands import Command
from jaxllm.engine.device.encoder import Encoder
from jaxllm.engine.device.packing import StepLayout
from jaxllm.engine.engine import Engine
from jaxllm.engine.schedule import sequence as schedule
from jaxllm.engine.schedule.plan import ShardedPlan
from tests.fake_device import ShadowExecutor
from tests.fake_engine import GIB, SIZE_OF_VOCAB, FakeEngine, LimitedRunner


class ShadowShards(FakeExecutor):
    """Gives each of `shards` its part of every array."""

    def __init__(self, config: EngineConfig):
        super().__init__(config, lambda given: given.tokens, page_bytes=GIB)
        self.num_shared_steps = 0
        self.shards = [ShadowExecutor(config, page_bytes=GIB) for _ in range(config.num_shards)]

    def apply_one(self, command: Command) -> Sequence[np.ndarray]:
        """The results of all, one after the other."""
        if command.kind == "step_shared":
            return [self._step_shared(command)]
        parts = [np.split(array, len(self.shards)) for array in command.arrays]
        found = [
            shard.apply_one(command._replace(arrays=tuple(part[i] for part in parts)))
            for i, shard in enumerate(self.shards)
        ]
        return [np.concatenate(each) for each in zip(*found, strict=True)]

    def _step_shared(self, command: Command) -> np.ndarray:
        """Every shard writes all of the prompt's tokens, wherever they are computed."""
        (packed,), config, (_, tokens) = command.arrays, self.config, command.name
        sizes = config.max_num_seqs, config.block_size, config.pages_per_block, config.num_shards
        inputs = [StepLayout(tokens, *sizes).unpack(own) for own in np.split(packed, config.num_shards)]
        parts = []
        for shard, given in zip(self.shards, inputs, strict=True):
            slot, start, _, _ = given.shared.tolist()
            parts.append((start, shard.run(given, slot)))
        prompt = [token for _, part in sorted(parts) for token in part]
        for shard, given in zip(self.shards, inputs, strict=True):
            slot, _, begin, end = given.shared.tolist()
            assert shard.lengths[slot] == min(parts)[0] == begin
            assert begin % config.block_size == end % config.block_size == 0
            written: set[tuple[int, int]] = set()
            for token in prompt:
                shard.write(slot, token, written)
            assert shard.lengths[slot] == end
        self.num_shared_steps += 1
        return np.concatenate([given.counts for given in inputs])


class ShardedEngine(FakeEngine):
    """Without drafts."""

    def __init__(self, num_shards: int = 2, **sizes):
        super().__init__(num_shards=num_shards, **sizes)

    def _runner(self, config: EngineConfig) -> LimitedRunner:
        self.executor = ShadowShards(config)
        for i, shard in enumerate(self.executor.shards):
            shard.on_admit = partial(self._check_admitted_to, i)
        runner = LimitedRunner(self.executor, config)
        runner._encoder = Encoder(config, SIZE_OF_VOCAB, runner.compile_plan.ready)
        return runner

    @contextmanager
    def _on(self, i: int) -> Iterator[None]:
        """What is asserted of one scheduler, executor and plan is asserted of this shard's."""
        whole = self.scheduler, self.executor, self.planned
        self.scheduler, self.executor, self.planned = (each.shards[i] for each in whole)
        try:
            yield
        finally:
            self.scheduler, self.executor, self.planned = whole

    def add(self, prompt, max_new=4, *, drafts=False, host_dependent=False, **options):
        """As `FakeEngine.add`."""
        return super().add(prompt, max_new, host_dependent=drafts or host_dependent, **options)

    def sampling_in_flight(self) -> list[schedule.Sequence]:
        """As of `FakeEngine`."""
        plans = () if self.in_flight is None else self.in_flight.plan.shards
        pairs = [pair for plan in plans for pair in zip(plan.samples, plan.epochs, strict=True)]
        return [sequence for sequence, epoch in pairs if sequence.epoch == epoch]

    def run(self) -> None:
        """Steps until all is done."""
        left = sum(sequence.max_total_len for sequence in self.unfinished())
        for _ in range(10 * left + 10):
            if self.in_flight is None and not self.scheduler.has_work():
                break
            self.step()
        assert not self.has_work(), "no end in sight"
        for scheduler, executor in zip(self.scheduler.shards, self.executor.shards, strict=True):
            assert len(executor.host) == sum(len(each.preemption._released_copies) for each in self.scheduler.shards)
            assert scheduler.pool.num_used == 0
        assert not self.unfinished()

    def _schedule(self) -> ShardedPlan | None:
        epochs = {sequence: sequence.epoch for sequence in self.sampling_in_flight()}
        queues = [self.scheduler.waiting, *(scheduler.waiting for scheduler in self.scheduler.shards)]
        stems = {group for scheduler in self.scheduler.shards for group in scheduler.running_set.stems}
        groups = [group for queue in queues for group in queue.queued()]
        self._fresh = [group.waiting[0] for group in groups if group.host_copy is None and group not in stems]
        plan = self.planned = Engine._schedule(self)
        assert all(sequence.epoch == epoch for sequence, epoch in epochs.items()), "evicted before it was drained"
        assert plan or self.in_flight or not self.scheduler.has_work(), "stuck: nothing planned, nothing to wait for"
        for i, of_shard in enumerate(() if plan is None else plan.shards):
            if not of_shard.is_empty:
                with self._on(i):
                    self._check_plan(of_shard, self.runner.limit, epochs, [])
        return plan

    def _check_admitted_to(self, i: int, slots: list[int]) -> None:
        with self._on(i):
            self._check_admitted(slots)

    def _check_forward(self, plan: ShardedPlan) -> None:
        for i, of_shard in enumerate(plan.shards):
            with self._on(i):
                super()._check_forward(of_shard)
